"""The errors of requests to a store: which request, what the store said, and what to do.

TensorStore's texts hold the bodies of answers, which may repeat parts of a signature.
Only the code and the message of an answer are shown.
"""

import re
from typing import Literal

from .._ground.errors import CheckpointError
from .._ground.text import printable


Action = Literal["reading", "listing", "writing", "deleting"]

# The code of an answer in XML or JSON, whose quotes TensorStore escapes.
_CODES = (
    re.compile(r"<Code>([A-Za-z0-9]+)</Code>"),
    re.compile(r'\\*"reason\\*": *\\*"([A-Za-z0-9 ]+)\\*"'),
)
_MESSAGES = (
    re.compile(r"<Message>([^<]{1,200})"),
    re.compile(r'\\*"message\\*": *\\*"([^"\\]{1,200})'),
)
_STATUS = re.compile(r"http_response_code='(\d+)'")
_CURL = re.compile(r"CURL error ([^\[]{1,200})")
_REGION = re.compile(r"expecting &?[^a-z]*([a-z]{2}-[a-z]+-\d)|<Region>([a-z0-9-]+)")
# Names of keys, signatures and tokens, should a message repeat one.
_SECRET = re.compile(r"\b(?:AKIA|ASIA|ya29\.)[\w.-]{8,}|[\w/+=-]{36,}")

# TensorStore's texts before it sends a request.
_NO_CREDENTIALS = ("Failed to get credentials", "JSON credentials file")
_UNKNOWN_KEYS = (
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "authError",
)
_OTHER_REGION = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
)
_RIGHTS = {
    "s3": {
        "reading": "s3:GetObject",
        "listing": "s3:ListBucket",
        "writing": "s3:PutObject",
        "deleting": "s3:DeleteObject",
    },
    "gcs": {
        "reading": "storage.objects.get",
        "listing": "storage.objects.list",
        "writing": "storage.objects.create",
        "deleting": "storage.objects.delete",
    },
}
_LOG_IN = {
    "s3": "log in again (`aws sso login`), or set AWS_PROFILE, or AWS_ACCESS_KEY_ID"
    " and AWS_SECRET_ACCESS_KEY",
    "gcs": "log in again (`gcloud auth application-default login`), or set"
    " GOOGLE_APPLICATION_CREDENTIALS",
}


def is_past_the_end(error: Exception) -> bool:
    """Whether a read failed since the object is shorter than its range."""
    return str(error).startswith("OUT_OF_RANGE")


def fault(driver: str, what: str, action: Action, error: Exception) -> CheckpointError:
    """The error for a request that failed.

    `what` names the store, the bucket and the key, and `error` is TensorStore's.
    """
    text = str(error)
    status = _first((_STATUS,), text)
    code = _first(_CODES, text)
    said = _first(_MESSAGES, text)
    curl = _first((_CURL,), text)
    answer = " ".join(part for part in (status, code) if part)
    if said and said != code:
        answer = f"{answer}: {said}" if answer else said
    if curl:
        answer = curl.strip()
    if not answer:
        answer = text.partition("[")[0][:200].strip()
    shown = printable(_SECRET.sub("...", answer)).rstrip(".")
    fix = _fix(
        driver=driver,
        action=action,
        text=text,
        status=status,
        code=code,
    )
    return CheckpointError(f"{action} {what} failed, with {shown!r}; {fix}.")


def _fix(driver: str, action: Action, text: str, status: str, code: str) -> str:
    log_in = _LOG_IN.get(driver, "log in again")
    if any(sign in text for sign in _NO_CREDENTIALS):
        return f"no credentials were found: {log_in}"
    if code == "NoSuchBucket" or (status == "404" and action != "reading"):
        return "there is no such bucket: create it, or correct its name"
    if code in _OTHER_REGION or status == "301":
        region = _first((_REGION,), text) or "eu-west-1"
        return (
            "the bucket is in another region than the request: name the region, as in"
            f" `s3://bucket/path?region={region}`"
        )
    if code in _UNKNOWN_KEYS or status == "401" or text.startswith("UNAUTHENTICATED"):
        return f"the credentials are not accepted: {log_in}"
    if status == "403" or text.startswith("PERMISSION_DENIED"):
        right = _RIGHTS.get(driver, {}).get(action, action)
        return (
            f"there are no credentials, or they lack the right `{right}`: allow it, or"
            f" {log_in}"
        )
    if "curl_code" in text:
        return (
            "no server answers there: correct the endpoint, or look at this machine's"
            " network and proxy"
        )
    if status[:1] == "5" or status == "429":
        return "the store is overloaded or down, and all repetitions failed: try later"
    return "nothing was changed here"


def stalled(what: str, action: Action, seconds: float) -> CheckpointError:
    """The error for a request that got no answer in time."""
    return CheckpointError(
        f"{action} {what} made no progress for {seconds:g} s, repetitions included; the"
        " store or the network stalls. Try again, or give a longer `timeout_seconds`."
    )


def _first(patterns: tuple[re.Pattern[str], ...], text: str) -> str:
    for pattern in patterns:
        match = pattern.search(text)
        if match is not None:
            return next(group for group in match.groups() if group)
    return ""
