"""The cost of assembling one array from others: bytes, rounds and memory."""

import functools as ft
import itertools as it
from typing import Any

from ..._convert import Piece, hull, once, swapped
from ..._ground.boxes import common
from ..._ground.spec import array_bytes
from .work import Assembly


@ft.lru_cache(maxsize=4096)
def costs_of(assembly: Assembly, most_bytes: int) -> dict[str, Any]:
    """The cost of assembling an array with programs, or as if its devices had separate memories.

    **Arguments:**

    - `assembly`: the plan of the array.
    - `most_bytes`: bytes that programs between different device sets may take of each device.

    **Returns:**

    The fields of a `LeafMove`, and `extra_bytes` per memory beside the shards of both sides.
    """
    steps, count = assembly.exchanges(None, most_bytes), max(1, assembly.sharding.num_devices)
    return {
        "wire_bytes": -(-assembly.cuts.wire_bytes // count),
        "lower_bound_bytes": -(-_least_bytes(assembly) // count),
        "target_bytes": array_bytes(assembly.shard_shape, assembly.dtype),
        "links": named_links(assembly),
        "rounds": sum(len(step.rounds) for step in steps),
        "extra_bytes": assembly.extra_bytes(steps),
    }


def named_links(assembly: Assembly) -> dict[tuple[int, int], int]:
    """Bytes per (sender, receiver), by device ids."""
    ids = [getattr(device, "id", device) for device in assembly.devices]
    # Devices of two platforms may have equal ids; their positions tell them apart.
    names = ids if len({*ids}) == len(ids) else list(range(len(ids)))
    return {(names[sender], names[receiver]): size for (sender, receiver), size in assembly.cuts.links.items()}


def _least_bytes(assembly: Assembly) -> int:
    """The bytes that devices need and do not hold, each counted once; at most the bytes that are sent."""
    by_source: dict[str | None, list[Piece]] = {}
    for piece in assembly.pieces:
        by_source.setdefault(piece.value.path, []).append(swapped(once(piece)))
    pairs = {key: it.combinations(map(hull, own), 2) for key, own in by_source.items()}
    repeated = {key for key, boxes in pairs.items() if any(common(*pair) is not None for pair in boxes)}
    by_receiver: dict[tuple[int, str | None], list[int]] = {}
    for cut in assembly.cuts.made:
        if cut.sender != cut.receiver:
            by_receiver.setdefault((cut.receiver, cut.piece.value.path), []).append(cut.bytes)
    # If two pieces may have common elements, the lower bound is the larger of the two.
    return sum(max(own) if key in repeated else sum(own) for (_, key), own in by_receiver.items())
