"""Objects of a store, such as a bucket of S3, through TensorStore's key-value stores.

TensorStore finds the credentials, repeats requests that failed for a while, and limits
how many are under way. If no request makes progress for `timeout_seconds`, an error
with the key is raised.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools as ft
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .._ground.errors import CheckpointError
from .._ground.text import quoted
from ._address import Address
from ._files import ChangedError, require_relative
from ._object_faults import Action, ShortError, fault, stalled
from ._place import MissingError, S, T
from ._stores import METADATA, OCDBT_MANIFEST


TIMEOUT_SECONDS = 60.0
# A request takes about as long as to transfer 390 to 420 KiB (`python -m
# benchmarks.store_gap`, without and with 20 ms a request): reading gaps of 256 KiB,
# too, takes 0.79 to 0.86 of the time, and gaps of 512 KiB 1.06 to 1.22.
STORE_GAP_BYTES = 256 * 1024
# Waiting threads take no time.
_WORKERS = 256
# The ends of the keys of what describes arrays in chunks.
_OF_CHUNKS = (*METADATA, OCDBT_MANIFEST)
# Bytes per second. A network that is slower seems to stall.
_LEAST_RATE = 2**20
_LIMIT = {"limit": 256}
# The repetitions end before the time-out, so that an error has the answer.
_RETRIES = {"max_retries": 8, "initial_delay": "100ms", "max_delay": "8s"}
_CONTEXT = {
    "s3_request_concurrency": _LIMIT,
    "s3_request_retries": _RETRIES,
    "gcs_request_concurrency": _LIMIT,
    "gcs_request_retries": _RETRIES,
}


@ft.lru_cache(maxsize=1)
def _context() -> Any:
    """TensorStore's context of all places, with the limits of requests under way."""
    import tensorstore as ts

    return ts.Context(_CONTEXT)


@dataclasses.dataclass
class ObjectPlace:
    """A prefix of a store's keys. Its methods are those of `Place`.

    `generations` records the generation of each object that was read, which every write
    changes. Every object must stay unchanged until the checkpoint has been read.
    `answered_at` is the time of the last answer: a slow network is no stall.
    """

    address: Address
    timeout_seconds: float = TIMEOUT_SECONDS
    generations: dict[str, bytes] = dataclasses.field(
        default_factory=dict,
        compare=False,
        repr=False,
    )
    answered_at: float = dataclasses.field(default=0.0, compare=False, repr=False)

    @property
    def directory(self) -> str:
        return self.address.shown

    @property
    def gap_bytes(self) -> int:
        return STORE_GAP_BYTES

    @ft.cached_property
    def store(self) -> Any:
        """TensorStore's key-value store of the whole bucket."""
        import tensorstore as ts

        spec = self.address.spec
        if spec["driver"] == "s3":
            # Without it, TensorStore looks and then writes where it does not know the
            # endpoint, and two savers could both succeed.
            spec = {"use_conditional_write": True, **spec}
        try:
            return ts.KvStore.open(spec, context=_context()).result()
        except (ValueError, OSError, TypeError) as error:
            raise CheckpointError(
                f"TensorStore cannot open {self.address.root!r}:"
                f" {str(error).partition('[')[0][:300]}; correct the address, or"
                " install TensorStore 0.1.74 or newer."
            ) from error

    def what(self, key: str) -> str:
        """The name of an object in errors: its file name, and the endpoint if the
        address has one.
        """
        endpoint = self.address.spec.get("endpoint")
        name = quoted(f"{self.address.root}/{key}", 300)
        return f"{name} at {endpoint}" if isinstance(endpoint, str) else name

    def result(self, future: Any, key: str, action: Action = "reading") -> Any:
        """The result of a request. Raises `CheckpointError` if it fails or stalls."""
        seconds = self.timeout_seconds
        while True:
            try:
                result = future.result(timeout=seconds)
            except TimeoutError:
                if time.monotonic() - self.answered_at < seconds:
                    continue
                raise stalled(self.what(key), action, seconds) from None
            except (ValueError, OSError, RuntimeError) as error:
                driver = self.address.spec["driver"]
                raise fault(driver, self.what(key), action, error) from error
            self.answered_at = time.monotonic()
            return result

    def begin_read(self, key: str, start: int | None, stop: int | None) -> Any:
        """Starts to read bytes of an object. Returns TensorStore's future."""
        return self.store.read(key, byte_range=slice(start, stop))

    def answer(self, future: Any, key: str) -> Any:
        """TensorStore's result of a read that was begun. Its `value` are the bytes.

        Raises `MissingError` for an object that is not there, `ShortError` for one that
        has fewer bytes, and `ChangedError` for one that was written since the first
        read.
        """
        result = self.result(future, key)
        if result.state == "missing":
            raise MissingError(
                f"checkpoint file {self.what(key)} is missing; copy it there, or point"
                " to a whole checkpoint."
            )
        generation = result.stamp.generation
        if self.generations.setdefault(key, generation) != generation:
            raise ChangedError(
                f"{self.what(key)} was replaced since its header was read; nothing was"
                " loaded. Read the index again once the writer is done."
            )
        return result

    def holds(self, key: str) -> bool:
        """Whether there is an object."""
        try:
            return self.result(self.begin_read(key, 0, 1), key).state != "missing"
        except ShortError:
            return True

    def write(self, key: str, data: bytes) -> None:
        """Writes an object, whether there is one or not."""
        self.result(self.store.write(key, data), key, "writing")

    def write_new(self, key: str, data: bytes) -> bool:
        """Writes an object if there is none. Returns whether `data` is there now."""
        held = self.result(self.store.read(key), key)
        if held.state == "missing":
            condition = held.stamp.generation
            future = self.store.write(key, data, if_equal=condition)
            self.result(future, key, "writing")
            # An answer may be lost, and the repeated request then fails on its own
            # object. Some servers ignore conditions.
            held = self.result(self.store.read(key), key)
        return held.value == data

    def delete(self, key: str) -> None:
        """Removes an object."""
        self.result(self.store.write(key, None), key, "deleting")

    def delete_below(self, path: str) -> None:
        """Removes all objects below a path."""
        self.result(self.store.delete_range(_below(path)), f"{path}/", "deleting")

    def keys_below(self, path: str) -> frozenset[str]:
        """The names of all objects below a path of the store, asked anew."""
        strip_prefix_length = len(f"{path}/") if path else 0
        future = self.store.list(_below(path), strip_prefix_length)
        keys = self.result(future, f"{path}/", "listing")
        return frozenset(key.decode("utf-8", "replace") for key in keys)

    @ft.cached_property
    def keys(self) -> frozenset[str]:
        """The names of all objects of the place."""
        return self.keys_below(self.address.path)

    def key_of(self, file_path: str) -> str:
        """The key of a file name."""
        return file_path.removeprefix(f"{self.address.root}/")

    def timeout(self, nbytes: int) -> float:
        return self.timeout_seconds + nbytes / _LEAST_RATE

    def names(self) -> list[str]:
        return sorted({key.partition("/")[0] for key in self.keys})

    def directories(self) -> Iterator[tuple[str, str]]:
        for name in sorted({os.path.dirname(key) for key in self.keys}):
            if name:
                yield name, f"{self.directory}/{name}"
            else:
                yield ".", self.directory

    def has_file(self, file_path: str) -> bool:
        return file_path.removeprefix(f"{self.directory}/") in self.keys

    def inside(self, name: str) -> str:
        require_relative(self.directory, name)
        return f"{self.directory}/{name.removeprefix('./')}"

    @contextlib.contextmanager
    def opened(self, file_path: str) -> "Iterator[ObjectFile]":
        yield ObjectFile(self, self.key_of(file_path))

    chunk = opened

    def each(self, call: Callable[[S], T], items: Iterable[S]) -> list[T]:
        with concurrent.futures.ThreadPoolExecutor(_WORKERS, "shardfx-store") as pool:
            return [*pool.map(call, items)]

    def require_unchanged(self) -> None:
        """Raises `ChangedError` if an object of a store of chunks was written since its
        first read, which recorded its generation.
        """
        # Other reads compare the generation of their object, but TensorStore reads
        # chunks.
        keys = [key for key in list(self.generations) if key.endswith(_OF_CHUNKS)]
        reads = [self.begin_read(key, 0, 1) for key in keys]
        for key, read in zip(keys, reads, strict=True):
            with contextlib.suppress(ShortError):
                self.answer(read, key)

    def require_plain_tree(self, directory: str) -> None:
        # A store has no links and no pipes.
        pass

    def kvstore(self, directory: str) -> dict[str, Any]:
        return {
            **self.address.spec,
            "path": f"{self.key_of(directory)}/",
            "context": {**_CONTEXT, **self.address.spec.get("context", {})},
        }


def _below(path: str) -> Any:
    """TensorStore's range of all keys below a path."""
    import tensorstore as ts

    if not path:
        return ts.KvStore.KeyRange()
    # "0" comes after "/".
    return ts.KvStore.KeyRange(f"{path}/", f"{path}0")


class ObjectFile(NamedTuple):
    """An object that is open for reading."""

    place: ObjectPlace
    key: str

    @property
    def known_size(self) -> None:
        return None

    def read(self, count: int, offset: int) -> bytes:
        """The `count` bytes from `offset` on, or fewer if the object ends before."""
        if not count:
            return b""
        data = self._between(offset, offset + count)
        if data is None and count > 1:
            # The object ends within the range, so its rest is shorter than the range.
            data = self._between(offset, None)
        return data or b""

    def tail(self, count: int) -> bytes:
        return self._between(-count, None) or b""

    def _between(self, start: int, stop: int | None) -> bytes | None:
        """The bytes of a range; `None` if the object ends before."""
        future = self.place.begin_read(self.key, start, stop)
        try:
            return self.place.answer(future, self.key).value
        except ShortError:
            return None
