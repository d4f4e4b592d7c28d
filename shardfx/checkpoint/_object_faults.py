"""The errors of requests to a store: which request, what the store said, and what to
do.

TensorStore's texts hold the bodies of answers, which may repeat parts of a signature.
Only the code and the message of an answer are shown.
"""

import re
from typing import Literal

from .._ground.errors import CheckpointError
from .._ground.text import printable


Action = Literal["reading", "listing", "writing", "deleting"]


class ShortError(CheckpointError):
    """The error for a read of bytes behind the end of an object."""


# What is shown: the status, and the code and the message of an answer in XML or JSON,
# whose quotes TensorStore escapes.
_SHOWN = re.compile(
    r"http_response_code='(\d+)'"
    r"|<Code>(\w+)</Code>"
    r"|<Message>([^<]{1,200})"
    r'|\\*"reason\\*": *\\*"([\w ]+)\\*"'
    r'|\\*"message\\*": *\\*"([^"\\]{1,200})'
    r"|CURL error ([^\[]{1,200})"
)
_REGION = re.compile(r"expecting &?[^a-z]*([a-z]{2}-[a-z]+-\d)|<Region>([a-z0-9-]+)")
# Names of keys, signatures and tokens, should a message repeat one.
_SECRET = re.compile(r"\b(?:AKIA|ASIA|ya29\.)[\w.-]{8,}|[\w/+=-]{36,}")

# The first pattern that TensorStore's text has decides. Credentials are looked for
# before a request is sent.
_FIXES = {
    "Failed to get credentials|JSON credentials file": (
        "no credentials were found: {log_in}"
    ),
    "NoSuchBucket|code='404'": (
        "there is no such bucket: create it, or correct its name"
    ),
    "PermanentRedirect|HeaderMalformed|IllegalLocationConstraint|code='301'": (
        "the bucket is in another region than the request: name the region, as in"
        " `s3://bucket/path?region={region}`"
    ),
    "InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken"
    "|TokenRefreshRequired|authError|^UNAUTHENTICATED|code='401'": (
        "the credentials are not accepted: {log_in}"
    ),
    "^PERMISSION_DENIED|code='403'": (
        "there are no credentials, or they lack the right `{right}`: allow it, or"
        " {log_in}"
    ),
    "curl_code": (
        "no server answers there: correct the endpoint, or look at this machine's"
        " network and proxy"
    ),
    "code='(5|429)": (
        "the store is overloaded or down, and all repetitions failed: try later"
    ),
    "": "nothing was changed here",
}
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


def fault(driver: str, what: str, action: Action, error: Exception) -> CheckpointError:
    """The error for a request that failed. It says what the store answered, and a fix
    that depends on the store, the action and the answer.

    `driver` is TensorStore's driver of the store, `what` names the store, the bucket
    and the key, and `error` is TensorStore's.
    """
    text = str(error)
    if text.startswith("OUT_OF_RANGE"):
        return ShortError(f"{what} is shorter than what is read of it; copy it again.")
    # The status, the code and the message of the answer: of the groups of a match, the
    # one that is there.
    shown_parts = [match[match.lastindex or 0] for match in _SHOWN.finditer(text)]
    answer = ", ".join(dict.fromkeys(shown_parts)) or text.partition("[")[0][:200]
    shown = printable(_SECRET.sub("...", answer)).strip(" .")
    # The last pattern is in every text.
    fix = next(fix for pattern, fix in _FIXES.items() if re.search(pattern, text))
    region = "eu-west-1"
    if match := _REGION.search(text):
        region = match[match.lastindex or 0]
    advice = fix.format(
        log_in=_LOG_IN.get(driver, "log in again"),
        right=_RIGHTS.get(driver, {}).get(action, action),
        region=region,
    )
    return CheckpointError(f"{action} {what} failed, with {shown!r}; {advice}.")


def stalled(what: str, action: Action, seconds: float) -> CheckpointError:
    """The error for a request that got no answer in time."""
    return CheckpointError(
        f"{action} {what} made no progress for {seconds:g} s, repetitions included; the"
        " store or the network stalls. Try again, or give a longer `timeout_seconds`."
    )
