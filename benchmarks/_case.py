"""What a suite hands to the runner: races against rivals, findings of its own, and
limits on both.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


Value = float | int | str


@dataclasses.dataclass(frozen=True)
class Rival:
    """One way of doing a case's work.

    `make` is called once, untimed, after every module in `needs` was found; it returns
    the function to time. A rival whose `needs` are not installed is skipped with a
    line. `check(input, result)` raises `AssertionError` where the result is wrong; it
    runs before any time is taken.
    """

    name: str
    make: Callable[[], Callable[[Any], Any]]
    check: Callable[[Any, Any], None] | None = None
    needs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Floor:
    """The least that the work could cost; timed in turn with the rivals."""

    name: str
    run: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Limit:
    """A promise about one value of a case, for example
    `Limit("speedup.jax.device_put", at_least=2.0)`.
    """

    value: str
    at_most: float | None = None
    at_least: float | None = None

    def holds(self, measured: float) -> bool:
        low = self.at_least is None or measured >= self.at_least
        return low and (self.at_most is None or measured <= self.at_most)

    def __str__(self) -> str:
        if self.at_least is not None:
            bounds = [f">= {self.at_least:g}"]
        else:
            bounds = []
        if self.at_most is not None:
            bounds += [f"<= {self.at_most:g}"]
        return f"{self.value} {' and '.join(bounds)}"


@dataclasses.dataclass(frozen=True)
class Race:
    """The inputs of one timed case, made by `Case.setup` when its turn comes.

    `rivals[0]` is shardfx. `fresh` makes the input of one run, untimed, before every
    single run. `byte_count` gives GB/s; `floor` gives the ratio to the least possible
    cost. `facts` are values known beforehand. A timing covers `number` calls on the
    same input (for calls of microseconds). `block=False` leaves out
    `jax.block_until_ready` on the result, for results that hold no arrays.
    `clear_caches=True` drops JAX's compiled programs before each rival's first call, so
    that `cold_seconds` includes compilation. `clock` may be `time.thread_time` where
    one thread does all the work and waits for nothing: then other processes on the
    machine do not disturb the ratios. `also` is a second clock that is read in the same
    runs, for the values `processor_seconds.<rival>` and `processor_speedup.<rival>`.
    After `most_seconds` no further round begins, as soon as each rival was timed three
    times: of large inputs a run takes seconds.
    """

    rivals: tuple[Rival, ...]
    fresh: Callable[[], Any]
    byte_count: int | None = None
    floor: Floor | None = None
    facts: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    number: int = 1
    block: bool = True
    clear_caches: bool = True
    clock: Callable[[], float] = time.perf_counter
    also: Callable[[], float] | None = None
    most_seconds: float = math.inf


@dataclasses.dataclass(frozen=True)
class Case:
    """A race: `setup` is called when the case's turn comes and its result is dropped
    afterwards.
    """

    name: str
    setup: Callable[[], Race]
    limits: tuple[Limit, ...] = ()


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that the suite measures itself: peak memory, a census, a count of
    bytes.

    `measure` raises `AssertionError` where a result is wrong, and else returns the
    values.
    """

    name: str
    measure: Callable[[], Mapping[str, Value]]
    limits: tuple[Limit, ...] = ()


@dataclasses.dataclass(frozen=True)
class Skip:
    """A case that cannot run here; `why` becomes its line in the table."""

    name: str
    why: str


@dataclasses.dataclass(frozen=True)
class Apart:
    """Cases that need another number of emulated devices, and so a process of their
    own.

    `target` ("benchmarks.reshard:between_meshes") takes the runner's options, with the
    devices of that process, and returns its entries; their records stand in place of
    this one.
    """

    name: str
    target: str
    cpu_devices: int


Entry = Case | Finding | Skip | Apart


def memcpy(byte_count: int) -> Floor:
    """The floor of moving `byte_count` bytes on the host: one `numpy.copyto` of as many
    bytes.
    """
    source = np.ones(byte_count, np.uint8)
    target = np.zeros(byte_count, np.uint8)
    return Floor("memcpy", lambda _: np.copyto(target, source))
