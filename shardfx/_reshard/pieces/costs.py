"""The cost of assembling one array from others: bytes, rounds and memory."""

import itertools as it
from collections.abc import Mapping
from typing import Any

from ..._convert import Piece, hull, once, swapped
from .work import Work


def costs_of(work: Work, most_bytes: int, known: dict[object, dict[str, object]]) -> dict[str, Any]:
    """The cost of assembling an array with programs, or as if its devices had separate memories.

    **Arguments:**

    - `work`: the plan of the array; its way is "programs" or "host".
    - `most_bytes`: bytes that programs between different device sets may take of each device.
    - `known`: the costs of arrays of other kinds; filled on the way.

    **Returns:**

    `wire_bytes` and `lower_bound_bytes` summed over all devices, `links`, `rounds`, and `extra_bytes` per memory beside
    the shards of both sides.
    """
    if work.kind not in known or work.kind is None:
        known[work.kind] = _costs(work, most_bytes)
    return known[work.kind]


def _costs(work: Work, most_bytes: int) -> dict[str, Any]:
    steps = work.exchanges(None, most_bytes)
    return {
        "wire_bytes": work.cuts.wire_bytes,
        "lower_bound_bytes": _least_bytes(work),
        "links": named_links(work),
        "rounds": sum(len(step.rounds) for step in steps),
        "extra_bytes": work.extra_bytes(steps),
    }


def named_links(work: Work) -> dict[tuple[int, int], int]:
    """Bytes per (sender, receiver), by device ids."""
    ids = [getattr(device, "id", device) for device in work.devices]
    # Devices of two platforms may have equal ids; their positions tell them apart.
    names = ids if len({*ids}) == len(ids) else list(range(len(ids)))
    return {(names[sender], names[receiver]): size for (sender, receiver), size in work.cuts.links.items()}


def _least_bytes(work: Work) -> int:
    """The bytes that devices need and do not hold, each counted once; at most the bytes that are sent."""
    total = 0
    by_receiver: dict[tuple[int, str | None], list[Any]] = {}
    for cut in work.cuts.made:
        if cut.sender != cut.receiver:
            by_receiver.setdefault((cut.receiver, cut.piece.value.path), []).append(cut)
    overlaps = _overlapping(work)
    for (_, path), cuts in by_receiver.items():
        # If two pieces may have common elements, the lower bound is the larger of the two.
        total += max(cut.bytes for cut in cuts) if path in overlaps else sum(cut.bytes for cut in cuts)
    return total


def _overlapping(work: Work) -> Mapping[str | None, None]:
    """The arrays of which two pieces may have elements in common."""
    by_path: dict[str | None, list[Piece]] = {}
    for piece in work.made.pieces:
        by_path.setdefault(piece.value.path, []).append(swapped(once(piece)))
    return {path: None for path, own in by_path.items() if any(it.starmap(_meet, it.combinations(own, 2)))}


def _meet(one: Piece, two: Piece) -> bool:
    return all(low < stop and start < high for (low, high), (start, stop) in zip(hull(one), hull(two), strict=True))
