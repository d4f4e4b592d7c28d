"""Relays inside TPU slices (or nodes), for parts that several devices of one slice need
from another slice: one of them receives a part, and then sends it to the others.

A sharding that divides the replicas of a slice (`divided_in_slices`) does the same with
an all-gather, which is faster. Relays serve meshes whose axes do not end where slices
do, and shards that the replicas do not divide.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..._convert import Factor, Piece, Value, whole
from ..._ground.boxes import Box
from ..._ground.spec import bits
from ..shardings import slices_of
from .assembly import Assembly, MovedLeaf, shards_of
from .parts import PartList, ShardParts
from .shard_part import Block, ShardPart, divided, unsent


# A relay is a second exchange, which takes longer than fewer bytes between slices.
LEAST_SAVED_BYTES = 1 << 20
# The name of the array that the first exchange has assembled in part.
_RECEIVED = Value("0")


def may_need_a_relay(leaf: MovedLeaf, dcn_bytes: int) -> bool:
    """Whether a relay may save enough of the `dcn_bytes` that enter slices without one:
    some elements enter twice if two devices of one slice hold the same box.
    """
    if dcn_bytes < LEAST_SAVED_BYTES:
        return False
    boxes = shards_of(leaf).boxes
    slices_and_boxes = set(zip(slices_of(list(boxes)), boxes.values(), strict=True))
    return len(slices_and_boxes) < len(boxes)


def with_relay(assembly: Assembly, leaf: MovedLeaf) -> Assembly | None:
    """`assembly`, the plan for `leaf` in its sharding, with a relay in each slice: one
    device of the slice receives a part and then sends it to the others that need it.
    `None` if that saves too few bytes between slices.
    """
    number_of = {device: number for number, device in enumerate(assembly.devices)}
    boxes: dict[int, Box] = {}
    for device, box in shards_of(leaf).boxes.items():
        boxes[number_of[device]] = box
    slices = slices_of(assembly.devices)
    parts = assembly.parts
    relayed = _relayed_parts(parts.all, slices, boxes, assembly.dtype)
    if relayed is None:
        return None

    # The relay is a second exchange, among the target's devices, numbered anew. Its
    # only source is the array that the first exchange has assembled in part.
    devices = assembly.target_devices
    position_of: dict[int, int] = {}
    for position, device in enumerate(devices):
        position_of[number_of[device]] = position
    spreading = _kept_parts(range(len(devices)), assembly.shard_shape, assembly.dtype)
    for part in relayed.spreading:
        renumbered = part._replace(
            sender=position_of[part.sender],
            receiver=position_of[part.receiver],
        )
        spreading.append(renumbered)
    block = Block(assembly.shard_shape, assembly.dtype)
    relay = dataclasses.replace(
        assembly,
        pieces=whole(_RECEIVED, assembly.shape),
        scaled={},
        parts=ShardParts(rows=PartList(tuple(spreading))),
        devices=devices,
        source_devices={"0": devices},
        source_shapes={"0": block},
    )
    entering = dataclasses.replace(parts, rows=PartList(relayed.entering))
    return dataclasses.replace(assembly, parts=entering, relay=relay)


class _RelayedParts(NamedTuple):
    """Two exchanges that together give each device its shard. After those in `entering`
    each element that a slice lacks is on one of its devices, and those in `spreading`
    send it from there to the others.
    """

    entering: tuple[ShardPart, ...]
    spreading: tuple[ShardPart, ...]


def _relayed_parts(
    parts: Sequence[ShardPart],
    slices: Sequence[int],
    boxes: Mapping[int, Box],
    dtype: Any,
) -> _RelayedParts | None:
    """Divides `parts`, by which devices assemble their shards, into two exchanges, so
    that each element enters a slice once. `None` if that saves too few bytes between
    slices. `slices` has the slice of each device, `boxes` the box of each device's
    shard, and `dtype` is that of the shards.
    """
    entering: list[ShardPart] = []
    # Parts from other slices that several devices of one slice need alike.
    equal_parts: dict[object, list[ShardPart]] = {}
    for part in parts:
        receiver = part.receiver
        if slices[part.sender] == slices[receiver]:
            entering.append(part)
        else:
            key = (slices[receiver], boxes[receiver], part.piece)
            equal_parts.setdefault(key, []).append(part)
    saved_bytes = 0
    for group in equal_parts.values():
        saved_bytes += group[0].bytes * (len(group) - 1)
    if saved_bytes < LEAST_SAVED_BYTES:
        return None

    # All devices that hold a box in a slice take their turn in receiving. If they are
    # more than the parts, these are divided.
    part_counts = collections.Counter[tuple[int, Box]]()
    for group in equal_parts.values():
        receiver = group[0].receiver
        part_counts[slices[receiver], boxes[receiver]] += 1
    spreading: list[ShardPart] = []
    received_bytes = collections.Counter[int]()
    for group in equal_parts.values():
        receiver = group[0].receiver
        part_count = part_counts[slices[receiver], boxes[receiver]]
        section_count = -(-len(group) // part_count)
        section_bytes = -(-group[0].memory_bytes // section_count)
        for section in divided(group[0], section_bytes):
            first = min(group, key=lambda part: received_bytes[part.receiver])
            received_bytes[first.receiver] += section.bytes
            received = section._replace(sender=first.sender, receiver=first.receiver)
            entering.append(received)
            for other in group:
                if other is not first:
                    spreading.append(_sent_on(received, other.receiver, dtype))
    return _RelayedParts(entering=tuple(entering), spreading=tuple(spreading))


def _sent_on(part: ShardPart, receiver: int, dtype: Any) -> ShardPart:
    """The part by which the receiver of `part` sends the elements that it wrote into
    its shard, of `dtype`, to another `receiver`, whose shard has the same box.
    """
    factors: list[Factor] = []
    for factor in part.piece.factors:
        as_written = factor._replace(
            source_dim=factor.target_dim,
            source_step=factor.target_step,
        )
        factors.append(as_written)
    piece = Piece(
        value=_RECEIVED,
        source=part.piece.target,
        target=part.piece.target,
        factors=tuple(factors),
    )
    sent = unsent(piece, piece.elements, [bits(dtype)])
    return sent._replace(sender=part.receiver, receiver=receiver)


def _kept_parts(
    devices: Sequence[int],
    shard_shape: tuple[int, ...],
    dtype: Any,
) -> list[ShardPart]:
    """The parts by which each of `devices` keeps what its shard has from the first
    exchange. What it receives in the second one is written over them.
    """
    (piece,) = whole(_RECEIVED, shard_shape)
    kept = unsent(piece, math.prod(shard_shape), [bits(dtype)])
    return [kept._replace(sender=device, receiver=device) for device in devices]
