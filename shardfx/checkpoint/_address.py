"""What names the place of a checkpoint: a path, the URL of a bucket, or a spec of
TensorStore.
"""

import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._ground.errors import CheckpointError, LeafTypeError, of_argument
from .._ground.text import quoted


# TensorStore's drivers by the scheme of a URL.
DRIVERS = {"s3": "s3", "gs": "gcs"}
_SCHEMES = {driver: scheme for scheme, driver in DRIVERS.items()}
# The members of a spec that a URL may set, by the name of the URL's parameter.
_PARAMETERS = {"s3": {"endpoint": "endpoint", "region": "aws_region"}, "gcs": {}}
_ANY_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# What stands before an "@" or is no name of a bucket, and the parameters.
_SECRETS = re.compile(r"(?s)(?<=://)([^/?]*:.*@|[^/?]*@|[^/?]*:[^/?]*)|\?.*")
# `pathlib` makes one slash of two.
_LOST_SLASH = re.compile(r"(s3|gs):/(?!/)")

# What a user gives to name the place of a checkpoint.
Where = str | os.PathLike[str] | Mapping[str, Any]


class Address(NamedTuple):
    """A prefix of the keys of a store.

    - `spec`: TensorStore's spec of the store, without a path.
    - `path`: the prefix, without a slash at its ends.
    - `root`: the beginning of all file names of the store, such as `s3://bucket`. It
      has no secret.
    """

    spec: dict[str, Any]
    path: str
    root: str

    @property
    def shown(self) -> str:
        """The address as errors show it."""
        if self.path:
            return f"{self.root}/{self.path}"
        return self.root

    @property
    def parent(self) -> "Address":
        """The address of the directory above."""
        parent_path = self.path.rpartition("/")[0]
        return self._replace(path=parent_path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    def below(self, name: str) -> "Address":
        """The address of the file or directory `name` in this directory."""
        path = name
        if self.path:
            path = f"{self.path}/{name}"
        return self._replace(path=path)


def address_of(where: Where) -> Address | str:
    """The address of a store, or the path of a file or directory.

    Raises `CheckpointError` for a URL or a spec of a kind that is not read.
    """
    if isinstance(where, Mapping):
        return _address_of_spec(where)
    if not isinstance(where, str | os.PathLike):
        raise of_argument(
            LeafTypeError(
                "the place of a checkpoint is a text or a `pathlib.Path`, not"
                f' {type(where).__name__}; give it first, such as "run/step-100".'
            )
        )
    text = os.fspath(where)
    lost_slash = _LOST_SLASH.match(text)
    if lost_slash is not None:
        scheme = lost_slash[1]
        raise CheckpointError(
            f"{text!r} is no path: `pathlib` makes one slash of the two in"
            f' `{scheme}://`. Give the address as text: "{scheme}://bucket/step-1".'
        )
    if not _ANY_URL.match(text):
        return text
    scheme, _, after_scheme = text.partition("://")
    if scheme.lower() == "file":
        return _path_of_file_url(text, after_scheme)
    if scheme.lower() not in DRIVERS:
        raise CheckpointError(
            f"{_without_secrets(text)!r} is an address of the kind `{scheme}`, and"
            " checkpoints are read from and saved to paths, `gs://bucket/path`,"
            " `s3://bucket/path`, `s3://bucket/path?endpoint=https://host`, and"
            ' TensorStore\'s specs such as `{"driver": "s3", "bucket": "bucket",'
            ' "path": "path"}`; copy it to one of them, or mount it.'
        )
    return _address_of_url(text, DRIVERS[scheme.lower()], after_scheme)


def _path_of_file_url(text: str, after_scheme: str) -> str:
    """The path of a URL such as `file:///run/step-1`. `text` is the URL, and
    `after_scheme` what follows `://`. Raises `CheckpointError` for another host.
    """
    authority, slash, path = after_scheme.partition("/")
    _, _, host = authority.rpartition("@")
    if host.lower() not in ("", "localhost"):
        raise CheckpointError(
            f"{_without_secrets(text)!r} names the host {quoted(host)}, and files are"
            " read from and saved to this machine's file system; write"
            " `file:///path` with three slashes, or the path alone."
        )
    return urllib.parse.unquote(slash + path)


def _address_of_url(text: str, driver: str, after_scheme: str) -> Address:
    """The address of a URL such as `s3://bucket/key?endpoint=https://host`.

    `text` is the URL, `driver` TensorStore's driver for its scheme, and `after_scheme`
    what follows `://`. Raises `CheckpointError` for a URL without a bucket, with
    credentials, or with a parameter that the driver does not have.
    """
    bucket_and_key, _, query = after_scheme.partition("?")
    bucket, _, key = bucket_and_key.partition("/")
    spec: dict[str, Any] = {"driver": driver, "bucket": bucket}
    shown_text = repr(_without_secrets(text))
    parameters = _PARAMETERS[driver]
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if name not in parameters:
            quoted_names = [f"`{parameter}`" for parameter in parameters]
            possible = " and ".join(quoted_names) or "no parameters"
            raise CheckpointError(
                f"{shown_text} has the parameter {quoted(name)}, and"
                f" `{_SCHEMES[driver]}://` addresses have {possible}; leave it out, or"
                " give TensorStore's spec as a dict."
            )
        spec[parameters[name]] = value
    _require_no_secrets(spec, shown_text)
    if not bucket:
        raise CheckpointError(
            f"{shown_text} names no bucket; write `{_SCHEMES[driver]}://bucket/path`."
        )
    return Address(
        spec=spec,
        path=key.strip("/"),
        root=f"{_SCHEMES[driver]}://{bucket}",
    )


def _require_no_secrets(spec: Mapping[str, Any], shown_text: str) -> None:
    """Raises `CheckpointError` for a bucket or an endpoint with credentials, since
    later errors show both. `shown_text` names the address, without its secrets.
    """
    bucket = str(spec.get("bucket", ""))
    endpoint = str(spec.get("endpoint", ""))
    # A secret key may hold a slash, and then ends the bucket.
    if re.search("[@:]", bucket) or re.search("[@?#]", endpoint):
        raise CheckpointError(
            f"{shown_text} has credentials or parameters in its bucket or its endpoint;"
            " they would get into logs. Leave them out: they are found in the"
            " environment (AWS_ACCESS_KEY_ID), or in ~/.aws/credentials. An endpoint is"
            " `https://host:port`."
        )


def _address_of_spec(spec: Mapping[str, Any]) -> Address | str:
    """The address of a spec of TensorStore; for the driver `file`, the path in it.

    Raises `CheckpointError` for a spec of another driver, or with credentials.
    """
    if "driver" not in spec:
        raise CheckpointError(
            "a dict is given as the place of a checkpoint, and it has no `driver`, as a"
            " spec of TensorStore has. If it is the tree, give the path first: write"
            " `save(path, tree, plan)` or `load(path, plan)`."
        )
    driver = spec.get("driver")
    path = spec.get("path", "")
    if driver == "file" and isinstance(path, str):
        return path
    if driver not in (*_SCHEMES, "memory") or not isinstance(path, str):
        raise CheckpointError(
            f"a spec of TensorStore with the driver {driver!r:.60} is given as the"
            " place of a checkpoint; the drivers are `s3`, `gcs`, `file` and `memory`,"
            ' as in `{"driver": "s3", "bucket": "bucket", "path": "path"}`.'
        )
    _require_no_secrets(spec, f"a spec of a bucket with the driver `{driver}`")
    spec_without_path = {}
    for name, value in spec.items():
        if name != "path":
            spec_without_path[name] = value
    root = f"{_SCHEMES.get(driver, driver)}://{spec.get('bucket', '')}".rstrip("/")
    if driver == "memory":
        root = "memory:/"
    return Address(
        spec=spec_without_path,
        path=path.strip("/"),
        root=root,
    )


def shown(where: object) -> str:
    """What a user gave as a place, as errors show it, without secrets."""
    if isinstance(where, Mapping):
        parts = [where.get("bucket"), where.get("path")]
        path = "/".join(str(part) for part in parts if part)
        return repr(f"{where.get('driver')}://{path}")[:500]
    text = where
    if isinstance(where, os.PathLike):
        text = os.fspath(where)
    if isinstance(text, str) and _ANY_URL.match(text):
        text = _without_secrets(text)
    return repr(text)[:500]


def below(where: Where, name: str) -> Where:
    """The place of a file or directory with the given name in another place."""
    address = address_of(where)
    if isinstance(address, str):
        return os.path.join(address, name)
    if isinstance(where, Mapping):
        return {**where, "path": address.below(name).path}
    path, question_mark, query = os.fspath(where).partition("?")
    return f"{path.rstrip('/')}/{name}{question_mark}{query}"


def _without_secrets(text: str) -> str:
    """The address without its user information and without its parameters."""
    return _SECRETS.sub("", text)
