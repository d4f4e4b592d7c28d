"""Objects of a store, such as a bucket of S3, through TensorStore's key-value stores.

TensorStore finds the credentials, repeats requests that failed for a while, and limits
how many are under way. A request that makes no progress for `timeout_seconds` raises an
error with its key.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .._ground.errors import CheckpointError
from .._ground.text import quoted
from ._address import Address
from ._files import ChangedError
from ._object_faults import Action, fault, is_past_the_end, stalled
from ._place import MissingError, S, T


TIMEOUT_SECONDS = 60.0
# A request takes about as long as to transfer 390 to 420 KiB (`python -m
# benchmarks.store_gap`, without and with 20 ms a request): reading gaps of 256 KiB, too,
# takes 0.79 to 0.86 of the time, and gaps of 512 KiB 1.06 to 1.22.
STORE_GAP_BYTES = 256 * 1024
# Waiting threads take no time.
_WORKERS = 256
# Bytes per second. A network that is slower seems to stall.
_LEAST_RATE = 2**20
# Sizes are found by so many requests at a time.
_PROBES = 16
_MOST_BITS = 48
_CONTEXT = {
    f"{driver}_request_{name}": value
    for driver in ("s3", "gcs")
    for name, value in (
        ("concurrency", {"limit": 256}),
        # The repetitions end before the time-out, so that an error has the answer.
        (
            "retries",
            {"max_retries": 8, "initial_delay": "100ms", "max_delay": "8s"},
        ),
    )
}
_ERRORS = (ValueError, OSError, RuntimeError, TypeError)


class Value(NamedTuple):
    """Bytes of an object, and the object's generation, which every write changes."""

    data: bytes
    generation: bytes


@ft.lru_cache(maxsize=1)
def _context() -> Any:
    """TensorStore's context of all places, with the limits of requests under way."""
    import tensorstore as ts

    return ts.Context(_CONTEXT)


@dataclasses.dataclass(frozen=True)
class ObjectPlace:
    """A prefix of a store's keys. Its methods are those of `Place`.

    It records the generation of each object that was read. Every object must stay
    unchanged until the checkpoint has been read.
    """

    address: Address
    timeout_seconds: float = TIMEOUT_SECONDS
    seen: dict[str, bytes] = dataclasses.field(
        default_factory=dict,
        compare=False,
        repr=False,
    )

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
        except _ERRORS as error:
            if "use_conditional_write" in str(error):
                raise CheckpointError(
                    "this TensorStore does not write to S3 with conditions, which keep"
                    " savers apart; install a newer one: `pip install -U"
                    " 'tensorstore>=0.1.74'`."
                ) from error
            raise CheckpointError(
                f"TensorStore cannot open {self.address.root!r}:"
                f" {str(error).partition('[')[0][:300]}; correct the address."
            ) from error

    def what(self, key: str) -> str:
        """The name of an object in errors: its file name, and the endpoint if the
        address has one.
        """
        endpoint = self.address.spec.get("endpoint")
        name = quoted(f"{self.address.root}/{key}", 300)
        return f"{name} at {endpoint}" if isinstance(endpoint, str) else name

    def done(self, future: Any, key: str, action: Action) -> Any:
        """The result of a request. Raises `CheckpointError` if it fails or stalls."""
        try:
            return future.result(timeout=self.timeout_seconds)
        except TimeoutError:
            raise stalled(self.what(key), action, self.timeout_seconds) from None
        except _ERRORS as error:
            raise self.fault(key, action, error) from error

    def fault(self, key: str, action: Action, error: Exception) -> CheckpointError:
        return fault(self.address.spec["driver"], self.what(key), action, error)

    def begin_read(self, key: str, start: int, stop: int | None) -> Any:
        """Starts to read bytes of an object. Returns TensorStore's future."""
        return self.store.read(key, byte_range=slice(start, stop))

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Value | None:
        """The bytes of an object from `start` to `stop`; fewer bytes at its end, and
        `None` for an object that is not there.
        """
        future = self.begin_read(key, start, stop)
        try:
            result = future.result(timeout=self.timeout_seconds)
        except TimeoutError:
            raise stalled(self.what(key), "reading", self.timeout_seconds) from None
        except _ERRORS as error:
            if not is_past_the_end(error):
                raise self.fault(key, "reading", error) from error
            if stop is None or stop - start == 1:
                return Value(b"", self.seen.get(key, b""))
            # The object ends within the range, so its rest is shorter than the range.
            return self.read(key, start, None)
        if result.state == "missing":
            return None
        return Value(result.value, result.stamp.generation)

    def write(self, key: str, data: bytes) -> None:
        """Writes an object, whether there is one or not."""
        self.done(self.store.write(key, data), key, "writing")

    def write_new(self, key: str, data: bytes) -> bool:
        """Writes an object if there is none. Returns whether `data` is there now."""
        missing = self.done(self.store.read(key), key, "reading")
        if missing.state != "missing":
            return missing.value == data
        condition = missing.stamp.generation
        future = self.store.write(key, data, if_equal=condition)
        self.done(future, key, "writing")
        # An answer may be lost, and the repeated request then fails on its own object.
        # Some servers ignore conditions.
        written = self.read(key)
        return written is not None and written.data == data

    def delete(self, key: str) -> None:
        """Removes an object."""
        self.done(self.store.write(key, None), key, "deleting")

    def delete_below(self, path: str) -> None:
        """Removes all objects below a path."""
        import tensorstore as ts

        everything = ts.KvStore.KeyRange(f"{path}/", f"{path}0")
        self.done(self.store.delete_range(everything), f"{path}/", "deleting")

    def require_same(self, key: str, generation: bytes) -> None:
        """Raises `ChangedError` if the object has another generation than before."""
        if generation and self.seen.setdefault(key, generation) != generation:
            raise ChangedError(
                f"{self.what(key)} was replaced since its header was read; nothing was"
                " loaded. Read the index again once the writer is done."
            )

    def missing(self, key: str) -> MissingError:
        return MissingError(
            f"checkpoint file {self.what(key)} is missing; copy it there, or point to a"
            " whole checkpoint."
        )

    def key_of(self, real: str) -> str:
        """The key of a file name."""
        return real.removeprefix(f"{self.address.root}/")

    @ft.cached_property
    def keys(self) -> tuple[str, ...]:
        """The sorted names of all objects of the place."""
        return self.keys_below(self.address.path)

    def keys_below(self, path: str) -> tuple[str, ...]:
        """The sorted names of all objects below a path of the store, asked anew."""
        import tensorstore as ts

        prefix = f"{path}/" if path else ""
        # The key after all that begin with the prefix.
        end = f"{prefix[:-1]}0" if prefix else ""
        future = self.store.list(ts.KvStore.KeyRange(prefix, end), len(prefix))
        keys = self.done(future, prefix, "listing")
        return tuple(sorted(key.decode("utf-8", "replace") for key in keys))

    def timeout(self, nbytes: int) -> float:
        return self.timeout_seconds + nbytes / _LEAST_RATE

    def names(self) -> list[str]:
        return sorted({key.partition("/")[0] for key in self.keys})

    def directories(self) -> Iterator[tuple[str, str]]:
        names = {"."}
        for key in self.keys:
            parts = key.split("/")[:-1]
            names |= {"/".join(parts[: count + 1]) for count in range(len(parts))}
        for name in sorted(names):
            is_top = name == "."
            yield name, self.directory if is_top else f"{self.directory}/{name}"

    def has_file(self, real: str) -> bool:
        return real.removeprefix(f"{self.directory}/") in self._key_set

    @ft.cached_property
    def _key_set(self) -> frozenset[str]:
        return frozenset(self.keys)

    def inside(self, name: str) -> str:
        if name.startswith("/") or ".." in name.split("/") or "\0" in name or not name:
            raise CheckpointError(
                f"checkpoint {self.directory!r} names the file {quoted(name)}, which is"
                " not a relative path below the directory; nothing outside it is"
                " opened. Correct the index, or load a checkpoint that you trust."
            )
        return f"{self.directory}/{name.removeprefix('./')}"

    @contextlib.contextmanager
    def opened(self, real: str) -> "Iterator[ObjectFile]":
        yield ObjectFile(
            place=self,
            key=self.key_of(real),
            is_kept=True,
        )

    @contextlib.contextmanager
    def chunk(self, real: str) -> "Iterator[ObjectFile]":
        yield ObjectFile(
            place=self,
            key=self.key_of(real),
            is_kept=False,
        )

    def each(self, call: Callable[[S], T], items: Iterable[S]) -> list[T]:
        todo = [*items]
        if len(todo) < 2:
            return [call(item) for item in todo]
        workers = min(_WORKERS, len(todo))
        with concurrent.futures.ThreadPoolExecutor(workers, "shardfx-store") as pool:
            return [*pool.map(call, todo)]

    def require_unchanged(self) -> None:
        # Each read compares the generation of its object.
        pass

    def require_plain_tree(self, real: str) -> None:
        # A store has no links and no pipes.
        pass

    def kvstore(self, real: str) -> dict[str, Any]:
        return {
            **self.address.spec,
            "path": f"{self.key_of(real)}/",
            "context": {**_CONTEXT, **self.address.spec.get("context", {})},
        }


class ObjectFile(NamedTuple):
    """An object that is open for reading. `is_kept` is whether it must not change."""

    place: ObjectPlace
    key: str
    is_kept: bool

    @property
    def known_size(self) -> None:
        return None

    def read(self, count: int, offset: int) -> bytes:
        value = self.place.read(self.key, offset, offset + count) if count else None
        if not count:
            return b""
        if value is None:
            raise self.place.missing(self.key)
        if self.is_kept:
            self.place.require_same(self.key, value.generation)
        return value.data

    def size(self) -> int:
        """The number of bytes, which no request tells. It is found by reads of single
        bytes, many at a time.
        """

        def holds(position: int) -> bool:
            return bool(self.read(1, position))

        powers = [0, *[2**bit for bit in range(0, _MOST_BITS, 4)]]
        held = self.place.each(holds, powers)
        if not any(held):
            return 0
        # The byte at `low` is there, and that at `high` is not.
        low = max(power for power, is_held in zip(powers, held, strict=True) if is_held)
        high = 16 * low if low else 1
        while high - low > 1:
            step = max(1, (high - low) // _PROBES)
            probes = list(range(low + step, high, step))
            are_held = self.place.each(holds, probes)
            for position, is_held in zip(probes, are_held, strict=True):
                if is_held:
                    low = max(low, position)
                else:
                    high = min(high, position)
        return high
