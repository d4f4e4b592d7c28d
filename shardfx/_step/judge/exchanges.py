"""Collectives: exchanges between the devices of a replica group.

A permute, an all-gather and an all-to-all move elements. An all-reduce adds the terms of
an unfinished sum, which its devices must not have twice.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ..._ground.opcodes import IDEMPOTENT
from ..collectives import groups_of
from ..hlo_text import Instruction, arrays_in
from .choices import gathered_choices
from .cuts import HOLE, Cut, Split
from .forms import numbers, reducer_of
from .held import Axis, Context, Fills, Held, require_finished, term_devices
from .joining import with_axis
from .local_reshapes import Overflowing, with_absorbed_axes
from .verdict import Unjudged, Wrong


def groups_in(context: Context, instruction: Instruction) -> np.ndarray:
    """The replica groups, an array (groups, members) in the order of the members."""
    kind = instruction.opcode.removesuffix("-start")
    groups = groups_of(instruction, kind, context.devices)
    if len(groups) != 1 or sorted(groups[0].ravel()) != [*range(context.devices)]:
        raise Unjudged("replica groups of different sizes, or without some devices")
    return groups[0]


class Members(NamedTuple):
    """The replica groups by device.

    - `others`: the devices of each device's group, an array (devices, members).
    - `ranks`: the place of each device in its group.
    """

    others: np.ndarray
    ranks: np.ndarray


def members_of(context: Context, groups: np.ndarray) -> Members:
    """The replica groups by device, from an array of shape (groups, members)."""
    others = np.zeros((context.devices, groups.shape[1]), np.int64)
    ranks = np.zeros(context.devices, np.int64)
    for group in groups:
        others[group] = group
        ranks[group] = np.arange(len(group))
    return Members(others, ranks)


def permute(context: Context, instruction: Instruction, operand: Held) -> Held:
    """What devices hold after a permute. A device that receives nothing has zeros: it
    has holes that are filled with zeros along its axes, or, of a value along which
    nothing changes, no term of a sum.
    """
    sources = _sources_of(context, instruction)
    if (
        operand.known_numbers is not None
        and operand.is_uniform
        and (sources >= 0).all()
    ):
        return operand
    permuted = _taken(context, operand, sources)
    terms = operand.terms
    is_partial = bool((sources < 0).any())
    if terms is not None:
        terms = tuple(sorted(_permuted_mask(term, sources) for term in terms))
    fill = operand.fill
    reducer = operand.reducer
    if is_partial and terms is not None and reducer != "add":
        raise Unjudged(f"a permute, to some devices, of an unfinished {reducer}")
    if is_partial:
        # Devices that receive nothing have zeros.
        if all(axis is None for axis in operand.axes):
            if terms is None:
                terms = (_permuted_mask(context.everywhere, sources),)
                reducer = "add"
        elif fill != 0 and _sends_holes(operand, sources):
            fill = _with_zeros(operand)
        else:
            fill = 0
    return dataclasses.replace(
        permuted,
        terms=terms,
        reducer=reducer,
        fill=fill,
        known_numbers=None,
    )


def _taken(context: Context, operand: Held, sources: np.ndarray) -> Held:
    """The operand, where each device holds the elements that another one holds now.
    `sources` has the number of that device, by device; -1 for none.
    """
    axes: list[Axis | None] = []
    for axis in operand.axes:
        if axis is not None:
            axis = Axis(axis.dim, context.cuts.taken(axis.cut, sources))
        axes.append(axis)
    dropped_axes = [
        Axis(axis.dim, context.cuts.taken(axis.cut, sources))
        for axis in operand.dropped_axes
    ]
    return dataclasses.replace(
        operand, axes=tuple(axes), dropped_axes=tuple(dropped_axes)
    )


def _sources_of(context: Context, instruction: Instruction) -> np.ndarray:
    """The device from which each device receives its array in a permute, by device; -1
    for none.
    """
    if "channel_id=" not in instruction.structure:
        # Its pairs are numbers of replicas, of which a program has one.
        raise Unjudged("a permute between replicas")
    sources = np.full(context.devices, -1)
    # Pairs of one device are left out of the groups.
    text = instruction.structure.partition("source_target_pairs={")[2]
    for pair in text.partition("}}")[0].replace("{", "").split("},"):
        pair_text = pair.strip(" ,}")
        if not pair_text:
            continue
        source, target = (int(device) for device in pair_text.split(","))
        if sources[target] >= 0:
            raise Unjudged("a permute with two senders to one device")
        sources[target] = source
    return sources


def _sends_holes(operand: Held, sources: np.ndarray) -> bool:
    """Whether a permute sends a hole from any device. `sources` has the device from
    which each device receives; -1 for none.
    """
    senders = sources[sources >= 0]
    return any(
        bool((axis.cut.starts[senders] == HOLE).any())
        for axis in (*operand.axes, *operand.dropped_axes)
        if axis is not None
    )


def _with_zeros(operand: Held) -> Fills | None:
    """What the holes are filled with after a permute that gives some devices zeros.
    Such a device has holes along all dimensions, and zeros along those that had none.
    """
    number = operand.fill_number
    dims = {axis.dim for axis in operand.axes if axis is not None}
    without_holes = dims - operand.hole_dims
    if number is None or not without_holes:
        return None
    return Fills(dims=frozenset(without_holes), number=0, other=number)


def _permuted_mask(mask: int, sources: np.ndarray) -> int:
    """The devices that receive something from those of a bit mask."""
    return sum(
        1 << target
        for target, source in enumerate(sources.tolist())
        if source >= 0 and mask >> source & 1
    )


def all_gather(context: Context, instruction: Instruction, operand: Held) -> Held:
    """The parts of a group side by side, on each of its devices. They have to be equal
    in all other dimensions.
    """
    shape = arrays_in(instruction.result)[0].shape
    (along,) = numbers(instruction, "dimensions")
    groups = groups_in(context, instruction)
    members = members_of(context, groups)
    _require_same_parts(instruction, operand, groups, along)
    if operand.terms is not None:
        held = gathered_choices(operand, along, members.others, shape)
        if held is not None:
            return held
        _require_same_terms(operand, groups)
    axis = operand.axes[along]
    if axis is None:
        return dataclasses.replace(operand, shape=shape, known_numbers=None)
    cut = gathered_cut(context, axis.cut, members)
    held = with_axis(operand, along, Axis(axis.dim, cut))
    return dataclasses.replace(held, shape=shape, known_numbers=None)


def gathered_cut(context: Context, cut: Cut, members: Members) -> Cut:
    """The cuts of the members of each group, side by side."""
    count = members.others.shape[1]
    starts = cut.starts[members.others].reshape(context.devices, -1)
    if cut.size == 1:
        return context.cuts.from_indices(starts)
    return context.cuts.from_segments(cut.lengths * count, starts, cut.step)


def _require_same_parts(
    instruction: Instruction,
    operand: Held,
    groups: np.ndarray,
    along: int | None,
) -> None:
    """Raises `Unjudged` if the devices of a group hold different parts in another
    dimension than `along`; `None` for none. `groups` is an array of shape (groups,
    members). Only where their parts start can differ: a cut has the same lengths on
    each device.
    """
    for dim, axis in enumerate(operand.axes):
        # Nothing changes along a dimension without an axis: all devices hold the same.
        if axis is None or dim == along:
            continue
        starts = axis.cut.starts[groups]
        if (starts == starts[:, :1]).all():
            continue
        # It is no fault: a piece of a slice may be read as a piece of the sliced value,
        # and masked pieces are summed to look up an element.
        raise Unjudged(f"{instruction.opcode} of different pieces")
    for axis in operand.dropped_axes:
        if (axis.cut.starts[groups] != axis.cut.starts[groups][:, :1]).any():
            raise Unjudged(f"{instruction.opcode} of a dropped dimension")


def _require_same_terms(operand: Held, groups: np.ndarray) -> None:
    """Raises `Unjudged` if some devices of a group have a term of a sum and others have
    not.
    """
    for group_mask in masks_of(groups):
        for term in operand.terms or ():
            if term & group_mask not in (0, group_mask):
                raise Unjudged("a gather of unfinished sums")


def all_reduce(context: Context, instruction: Instruction, operand: Held) -> Held:
    """The reduction over each group. A sum needs each term on one device of a group: it
    is `Wrong` if several have it, since they add it several times. A maximum may take a
    term once or more.
    """
    reducer = reducer_of(context.module, instruction)
    if operand.known_numbers is not None and operand.is_uniform:
        if not operand.known_numbers.any() and reducer == "add":
            return operand
    groups = groups_in(context, instruction)
    if not reducer:
        raise Unjudged("an all-reduce by another function")
    if operand.root < 0:
        raise Unjudged("an all-reduce of numbers of one device's program")
    if reducer == "add" and operand.has_holes and operand.fill == 0:
        union = _united(context, operand, groups)
        if union is not None:
            return union
    if reducer == "add":
        operand = _where_terms_are(context, operand, groups)
    _require_same_parts(instruction, operand, groups, None)
    if operand.reducer != reducer and not operand.is_finished:
        require_finished(operand, f"an all-reduce by {reducer}")
    terms = (context.everywhere,) if operand.terms is None else operand.terms
    group_masks = masks_of(groups)
    reduced_terms = {_spread(term, group_masks) for term in terms}
    scale = operand.scale
    if reducer not in IDEMPOTENT:
        scale = _scale_of_reduction(scale, reducer, terms, groups)
    return _reduced(
        context=context,
        operand=operand,
        reduced_terms=reduced_terms,
        reducer=reducer,
        scale=scale,
    )


def _scale_of_reduction(
    scale: Fraction | int,
    reducer: str,
    terms: Sequence[int],
    groups: np.ndarray,
) -> Fraction | int:
    """The scale of a value after an all-reduce of its `terms` over `groups`. Raises
    `Wrong` if the devices of a group add or multiply what several of them hold.
    """
    # How many devices of a group have a term that any of them has.
    term_by_group = itertools.product(terms, masks_of(groups))
    holder_counts = {
        (term & group_mask).bit_count() for term, group_mask in term_by_group
    }
    holder_counts.discard(0)
    if reducer != "add" and holder_counts != {1}:
        raise Wrong(
            fault=f"an all-reduce by {reducer} over devices {groups[0].tolist()} takes"
            " what these devices hold already",
            right="a reduction over the devices that hold different parts, and no"
            " others",
            mend="constrain the sharding of this line's operands",
        )
    if len(holder_counts) > 1:
        raise Wrong(
            fault=f"an all-reduce over {groups.tolist()} adds some terms of a sum once"
            " and others more often",
            right="a reduction over devices that hold different terms",
            mend="constrain the sharding of this line's operands",
        )
    scale *= Fraction(holder_counts.pop())
    if scale > 1:
        times = int(scale) if scale.denominator == 1 else scale
        raise Wrong(
            fault=f"an all-reduce over devices {groups[0].tolist()} adds what these"
            f" devices hold already: the result is {times} times what it should be",
            right="a reduction over the devices that hold different terms, and no"
            " others",
            mend="constrain the sharding of this line's operands with"
            " `jax.lax.with_sharding_constraint`, so that no mesh axis is unused",
        )
    return scale


def _where_terms_are(context: Context, operand: Held, groups: np.ndarray) -> Held:
    """The same operand of an all-reduce over `groups`, where devices without a term of
    the sum hold what a device of their group holds that has one: they add zeros, so
    their elements may be any. The partitioner takes a row of a dimension that is cut
    from the device that has it, and zeros from others.
    """
    if operand.terms is None or operand.reducer != "add":
        return operand
    holders: set[int] = set()
    for term in operand.terms:
        holders.update(term_devices(term))
    sources = np.arange(context.devices)
    for group in groups.tolist():
        holders_of_group = [device for device in group if device in holders]
        if not holders_of_group:
            continue
        for device in group:
            if device not in holders:
                sources[device] = holders_of_group[0]
    return _taken(context, operand, sources)


def masks_of(groups: np.ndarray) -> list[int]:
    """The devices of each group as a bit mask."""
    return [sum(1 << device for device in group) for group in groups.tolist()]


def _spread(term: int, group_masks: Sequence[int]) -> int:
    """The devices of all groups that have a device of the bit mask `term`."""
    mask = 0
    for group_mask in group_masks:
        if term & group_mask:
            mask |= group_mask
    return mask


def _reduced(
    context: Context,
    operand: Held,
    reduced_terms: set[int],
    reducer: str,
    scale: Fraction | int,
) -> Held:
    """The operand after a reduction. `reduced_terms` has the devices that have each
    term then, as bit masks.
    """
    terms = (
        None if reduced_terms == {context.everywhere} else tuple(sorted(reduced_terms))
    )
    return dataclasses.replace(
        operand,
        terms=terms,
        reducer=reducer,
        scale=1 if scale == 1 else scale,
        known_numbers=operand.known_numbers
        if terms is None and scale == 1 and reducer != "add"
        else None,
    )


def _united(context: Context, operand: Held, groups: np.ndarray) -> Held | None:
    """The sum over each group of parts of a value with zeros elsewhere; `None` if parts
    overlap, or if they are no rows and columns of a larger part.
    """
    if operand.terms is not None or operand.scale != 1 or operand.dropped_axes:
        return None
    members = members_of(context, groups)
    member_count = groups.shape[1]
    axes: list[Axis | None] = []
    element_masks: list[np.ndarray] = []
    for axis in operand.axes:
        if axis is None:
            axes.append(None)
            continue
        indices = context.cuts.indices(axis.cut)[members.others]
        united = indices.max(axis=1)
        if ((indices != HOLE) & (indices != united[:, None])).any():
            return None
        axes.append(Axis(axis.dim, context.cuts.from_indices(united)))
        element_masks.append((indices != HOLE).reshape(len(indices), member_count, -1))
    for group in groups.tolist():
        if not _do_tile(element_masks, group[0], member_count):
            return None
    return dataclasses.replace(
        operand,
        axes=tuple(axes),
        fill=0 if any(a is not None and a.cut.has_holes for a in axes) else None,
        known_numbers=None,
    )


def _do_tile(
    element_masks: Sequence[np.ndarray],
    device: int,
    member_count: int,
) -> bool:
    """Whether the parts of the members of a device's group are disjoint, and together
    all rows times all columns that any of them has. `element_masks` has an array for
    each dimension, of shape (devices, members, positions): where a member of the
    device's group has an element.
    """
    member_masks = [pattern[device] for pattern in element_masks]
    element_count = 0
    for member in range(member_count):
        part_sizes = [int(mask[member].sum()) for mask in member_masks]
        element_count += int(np.prod(part_sizes))
        for other in range(member):
            if all((mask[member] & mask[other]).any() for mask in member_masks):
                return False
    united_sizes = [int(mask.any(axis=0).sum()) for mask in member_masks]
    return element_count == int(np.prod(united_sizes))


def reduce_scatter(context: Context, instruction: Instruction, operand: Held) -> Held:
    """An all-reduce of which each device keeps the part at its rank."""
    shape = arrays_in(instruction.result)[0].shape
    (along,) = numbers(instruction, "dimensions")
    groups = groups_in(context, instruction)
    members = members_of(context, groups)
    reduced = all_reduce(context, instruction, operand)
    held = dataclasses.replace(reduced, shape=shape, known_numbers=None)
    axis = reduced.axes[along]
    if axis is None:
        return held
    offsets = members.ranks * shape[along]
    cut = context.cuts.window(axis.cut, offsets, shape[along])
    return with_axis(held, along, Axis(axis.dim, cut))


def all_to_all(context: Context, instruction: Instruction, operand: Held) -> Held:
    """The exchange of the parts of one dimension, one for each member of a group: part
    j comes from member j, which sends the part at the receiver's own rank. So the
    dimension numbers the members afterwards, and what differs between the senders
    changes along it.
    """
    groups = groups_in(context, instruction)
    members = members_of(context, groups)
    (split_dim,) = numbers(instruction, "dimensions")
    require_finished(operand, "all-to-all")
    if operand.shape[split_dim] != groups.shape[1]:
        return _all_to_all_in_place(context, operand, split_dim, members)

    dropped_axes: list[Axis] = []
    # What differs between the members that send to a device.
    varying: list[_Received] = []
    for received in _received_indices(context, operand, split_dim, members):
        if received.is_constant:
            starts = received.indices[:, 0]
            cut = context.cuts.from_starts(starts, 1)
            dropped_axes.append(Axis(received.dim, cut))
        else:
            varying.append(received)

    axes: list[Axis | None] = list(operand.axes)
    is_overflowing = False
    for place, axis in enumerate(operand.axes):
        if place == split_dim or axis is None:
            continue
        split = _split_by_sender(context, operand, axis, members)
        if split is not None:
            is_overflowing |= split.is_overflowing
            axes[place] = Axis(axis.dim, split.inner)
            varying.append(_Received(axis.dim, context.cuts.indices(split.outer)))

    if len(varying) > 1:
        raise Unjudged("an all-to-all of several dimensions")
    axes[split_dim] = None
    for received in varying:
        cut = context.cuts.from_indices(received.indices)
        axes[split_dim] = Axis(received.dim, cut)
    held = dataclasses.replace(
        operand, axes=tuple(axes), dropped_axes=tuple(dropped_axes), known_numbers=None
    )
    if is_overflowing:
        held = dataclasses.replace(held, idiom=Overflowing())
    return with_absorbed_axes(context, held)


class _Received(NamedTuple):
    """The index, in dimension `dim` of the value, of the part that each member of its
    group sends to a device: an array (devices, members).
    """

    dim: int
    indices: np.ndarray

    @property
    def is_constant(self) -> bool:
        """Whether all members send a device parts of the same index."""
        return bool((self.indices == self.indices[:, :1]).all())


def _received_indices(
    context: Context,
    operand: Held,
    split_dim: int,
    members: Members,
) -> list[_Received]:
    """The indices of the parts that an all-to-all sends: in the dimensions of the value
    that the operand lacks, and in that of `split_dim`, of which each member sends one
    position, that of the receiver's rank.
    """
    received: list[_Received] = []
    for axis in operand.dropped_axes:
        starts = axis.cut.starts[members.others, 0]
        received.append(_Received(axis.dim, starts))
    split_axis = operand.axes[split_dim]
    if split_axis is not None:
        indices = context.cuts.indices(split_axis.cut)
        indices_at_ranks = indices[members.others, members.ranks[:, None]]
        received.append(_Received(split_axis.dim, indices_at_ranks))
    return received


def _split_by_sender(
    context: Context,
    operand: Held,
    axis: Axis,
    members: Members,
) -> Split | None:
    """What devices receive along an axis of which the members of a group hold different
    parts: the cut of the dimension that numbers the members, and of the dimension
    itself. `None` if the members hold the same.
    """
    starts = axis.cut.starts[members.others]
    if (starts == starts[:, :1]).all():
        return None
    whole_size = None
    if operand.root >= 0:
        whole_size = context.values.nodes[operand.root].shape[axis.dim]
    return context.cuts.exchanged(axis.cut, members.others, whole_size)


def _all_to_all_in_place(
    context: Context,
    operand: Held,
    split_dim: int,
    members: Members,
) -> Held:
    """As `all_to_all`, where dimension `split_dim` has several positions for each
    member, and keeps its size.
    """
    member_count = members.others.shape[1]
    unsplit_axes = [*operand.axes[:split_dim], *operand.axes[split_dim + 1 :]]
    for axis in [*unsplit_axes, *operand.dropped_axes]:
        if axis is None:
            continue
        starts = axis.cut.starts[members.others]
        if (starts != starts[:, :1]).any():
            raise Unjudged("an all-to-all of several dimensions")
    axis = operand.axes[split_dim]
    if axis is None:
        return dataclasses.replace(operand, known_numbers=None)
    if operand.shape[split_dim] % member_count:
        raise Unjudged("an all-to-all of unequal parts")
    indices = context.cuts.indices(axis.cut)
    parts = indices.reshape(context.devices, member_count, -1)
    received = parts[members.others, members.ranks[:, None]]
    cut = context.cuts.from_indices(received.reshape(context.devices, -1))
    return dataclasses.replace(
        with_axis(operand, split_dim, Axis(axis.dim, cut)), known_numbers=None
    )
