"""The suite `convert`: a checkpoint of another layout, and a trainer's tree for an
engine.
"""

import argparse
import dataclasses
import functools as ft

from ._case import Case, Entry, Finding, Limit
from ._convert_loads import load_race, memory_of_loads
from ._convert_moves import second_sync, sync_race
from ._convert_programs import (
    memory_between_devices,
    memory_of_programs,
    program_counts,
)
from ._convert_trees import LARGE, LARGE_ENDS, leaf_count
from ._jobs import between
from ._machine import fresh_process
from ._runner import Options


SUMMARY = (
    "Trees that differ: a Hugging Face layout into a stacked tree, and a trainer's"
    " weights for an engine."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mebibytes", type=int, default=None, help="size of the weights"
    )


def cases(options: Options) -> list[Entry]:
    size = options.flags.mebibytes or (64 if options.quick else 1024)
    plans = (
        Limit("plan_seconds", at_most=5.0),
        Limit("host_seconds", at_most=0.5),
        Limit("host_processor_seconds", at_most=0.5),
        Limit("peak_gigabytes", at_most=4.0),
    )
    planning = Finding(
        "405B, planned from 2,048 to 256 devices",
        ft.partial(fresh_process, LARGE, LARGE_ENDS),
        plans,
    )
    return [
        *_loads(size, options),
        *_moves(size, options),
        *_between_processes(size, options),
        planning,
    ]


def _loads(size: int, options: Options) -> list[Entry]:
    name = f"{size} MiB, Hugging Face to stacked"
    times = (
        Limit("speedup.load without a map", at_least=0.7),
        Limit("speedup.load_file, numpy, device_put", at_least=1.0),
    )
    memory = (Limit("peak_over_tensors.shardfx", at_most=1.1),)
    return [
        Case(name, ft.partial(load_race, size, options), _full(options, times)),
        Finding(
            f"{name}, memory",
            ft.partial(memory_of_loads, size, options),
            _full(options, memory),
        ),
    ]


def _moves(size: int, options: Options) -> list[Entry]:
    """From a trainer to an engine in one process."""
    name = f"{size} MiB, trainer to engine"
    times = (
        Limit("speedup.jax.jit, out_shardings", at_least=1.5),
        Limit("speedup.jit per leaf, device_put", at_least=1.0),
    )
    # Where others use the machine, processor time tells more; of `device_put` threads
    # that spin count too.
    processor_times = [
        dataclasses.replace(limit, value=f"processor_{limit.value}") for limit in times
    ]
    counts = (
        Limit("wire_over_lower_bound", at_most=1.05),
        Limit("programs", at_most=12),
    )
    room = (Limit("temporary_over_largest_shard", at_most=1.0),)
    return [
        Case(
            f"{name}, same devices",
            ft.partial(sync_race, size, options, False),
            (*times, *processor_times),
        ),
        Case(
            f"{name}, other devices",
            ft.partial(sync_race, size, options, True),
            times[1:],
        ),
        Finding(
            f"{leaf_count(options):,} leaves, trainer to engine, programs",
            ft.partial(program_counts, options),
            counts,
        ),
        Finding(
            f"{name}, memory of programs",
            ft.partial(memory_of_programs, size, options),
            room,
        ),
        Finding(
            f"{name}, memory between devices",
            ft.partial(memory_between_devices, size, options),
            room,
        ),
        Finding(
            "the second sync over the first",
            ft.partial(second_sync, options),
            (Limit("first_over_second", at_least=5.0),),
        ),
    ]


def _between_processes(size: int, options: Options) -> list[Entry]:
    name = f"{size} MiB in 1,100 arrays, between two processes"
    # A round has 8 MiB, or one larger row of at most 16 MiB.
    beside = Limit("mebibytes_beside_both_states", at_most=17.0)
    plain = (
        Limit("sync_over_stream", at_least=0.8),
        Limit("processor_over_stream", at_most=1.6),
        beside,
    )
    strided = (
        Limit("sync_over_stream", at_least=0.65),
        Limit("processor_over_stream", at_most=2.2),
        beside,
    )
    return [
        Finding(
            f"{name}, plain pieces",
            ft.partial(between, 1100, size, "plain"),
            _full(options, plain),
        ),
        Finding(
            f"{name}, strided pieces",
            ft.partial(between, 1100, size, "strided"),
            _full(options, strided),
        ),
        Finding(f"{name}, encrypted", ft.partial(between, 1100, size, "plain", True)),
    ]


def _full(options: Options, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """Limits on loading are for the full size: of small files, starting up weighs more
    than reading.
    """
    return () if options.quick else limits
