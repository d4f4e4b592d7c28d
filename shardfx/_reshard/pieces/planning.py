"""Plans how each array is assembled from shards of other arrays, from shapes and
shardings alone.

`may_copy_on_host` says whether CPU devices of one process may copy shards in the memory
that they share. `lost` are devices whose shards are not to be read.
"""

import dataclasses
import functools as ft
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from ..._convert import (
    NO_NUMBERS,
    Arithmetic,
    Made,
    NumberCopies,
    Piece,
    Struct,
    TreeMap,
    Value,
    bound,
    extended,
    leaf_made,
    names_of,
    simplified,
)
from ..._ground.boxes import Box, first_holder_by_box
from ..._ground.errors import MeshError
from ..._ground.keys import data_of
from ..movable import naming, require_movable, require_reduced
from ..shardings import divided_in_slices, slices_of
from .assembly import (
    Assembly,
    MovedLeaf,
    ScaledArray,
    numbers_text,
    with_numbered_sources,
)
from .copies import HostCopies, host_copies, joint_copies
from .devices import HOST, Devices, devices_of, shardings_of
from .parts import ShardParts, Source, shard_parts
from .relay import may_need_a_relay, with_relay
from .shard_part import ShardPart


class TargetArray(NamedTuple):
    """An array that a `TreeMap` makes, the paths of its sources, and the plan for
    assembling it. `assembly` is `None` if the array is an unchanged source array, which
    moves as it would without a map.
    """

    leaf: MovedLeaf
    sources: tuple[str, ...]
    assembly: Assembly | None


@ft.lru_cache(maxsize=16)
def target_arrays(
    tree_map: TreeMap,
    sources: tuple[MovedLeaf, ...],
    targets: tuple[MovedLeaf, ...],
    may_copy_on_host: bool,
    numbers: NumberCopies = NO_NUMBERS,
) -> tuple[TargetArray, ...]:
    """Plans how each array of `targets`, which `tree_map` makes, is assembled from
    `sources` or moved. CPU devices of one process may copy shards in the memory that
    they share if `may_copy_on_host`. `numbers` are the Python numbers of the source. It
    caches results.
    """
    target_by_path = bound(tree_map, _structs(sources), _structs(targets), numbers)
    source_by_path = {leaf.path: leaf for leaf in sources}
    cache: dict[object, Assembly] = {}
    arrays = []
    for leaf in targets:
        target = target_by_path[leaf.path]
        source_paths = _source_paths(target)
        leaf_sources = [source_by_path[path] for path in source_paths]
        with naming(str, leaf.path):
            _require_movable(leaf, leaf_sources)
            is_unchanged = len(source_paths) == 1 and target == _unchanged(
                leaf_sources[0]
            )
            assembly = None
            if not is_unchanged:
                assembly = _cached_assembly(
                    leaf=leaf,
                    target=target,
                    sources=leaf_sources,
                    may_copy_on_host=may_copy_on_host,
                    cache=cache,
                )
        arrays.append(TargetArray(leaf=leaf, sources=source_paths, assembly=assembly))
    return tuple(arrays)


def _structs(leaves: Sequence[MovedLeaf]) -> dict[str, Struct]:
    """The shape and dtype of each array, by its path."""
    return {leaf.path: Struct(leaf.shape, leaf.dtype) for leaf in leaves}


def _source_paths(target: Made) -> tuple[str, ...]:
    """The paths of the arrays that the pieces of `target` read, each once."""
    paths: dict[str, None] = {}
    for piece in target.pieces:
        paths.update(dict.fromkeys(names_of(piece)))
    return tuple(paths)


def _require_movable(leaf: MovedLeaf, sources: Sequence[MovedLeaf]) -> None:
    """Raises an error if the array `leaf` cannot be moved, or if it or one of its
    sources is an unfinished sum over mesh axes.
    """
    assert leaf.sharding is not None
    require_movable(leaf.shape, leaf.dtype, leaf.sharding)
    require_reduced(leaf.sharding, *shardings_of(sources))


def _unchanged(leaf: MovedLeaf) -> Made:
    """What a map makes of the array `leaf` if it leaves it as it is."""
    target = leaf_made(leaf.path, Struct(leaf.shape, leaf.dtype))
    pieces = tuple(map(simplified, target.pieces))
    return dataclasses.replace(target, pieces=pieces)


class _AssemblyKey(NamedTuple):
    """All that the plan for assembling an array depends on. `numbers` is the
    `numbers_text` of the pieces.
    """

    target: MovedLeaf
    pieces: tuple[Piece, ...]
    numbers: str
    sources: tuple[MovedLeaf, ...]


def _assembly_key(
    leaf: MovedLeaf,
    pieces: tuple[Piece, ...],
    sources: Sequence[MovedLeaf],
) -> _AssemblyKey:
    """The key of an array whose `pieces` name their sources by position. Paths do not
    count.
    """
    nameless_sources = [source._replace(path="") for source in sources]
    return _AssemblyKey(
        target=leaf._replace(path=""),
        pieces=pieces,
        numbers=numbers_text(pieces),
        sources=tuple(nameless_sources),
    )


def _cached_assembly(
    leaf: MovedLeaf,
    target: Made,
    sources: Sequence[MovedLeaf],
    may_copy_on_host: bool,
    cache: dict[object, Assembly],
) -> Assembly:
    """The plan for assembling `leaf` from `sources`. `target` has the pieces of the
    sources that fill it. `cache` has earlier plans, since arrays that differ only in
    paths share one; a new plan is added to it.
    """
    shape, dtype = data_of(leaf.shape, leaf.dtype)
    pieces: Sequence[Piece] = target.pieces
    # The key data of PRNG keys has further dimensions.
    key_sizes = shape[len(leaf.shape) :]
    if key_sizes:
        pieces = [extended(piece, key_sizes) for piece in pieces]
    pieces = with_numbered_sources(pieces, [source.path for source in sources])
    key = _assembly_key(leaf, pieces, sources)
    if key not in cache:
        numbered_sources: list[MovedLeaf] = []
        for number, source in enumerate(sources):
            numbered_sources.append(source._replace(path=str(number)))
        numbered_target = Made(shape=shape, dtype=dtype, pieces=pieces)
        cache[key] = _assembly(
            leaf, numbered_target, numbered_sources, may_copy_on_host
        )
    return cache[key]


def assembly_between(
    shape: tuple[int, ...],
    dtype: object,
    src: Sharding,
    dst: Sharding,
    lost: tuple[object, ...],
    may_copy_on_host: bool,
    sent_before: tuple[tuple[int, int], ...] = (),
) -> Assembly:
    """The plan for moving an array without a map to another sharding, on any devices.
    For typed PRNG keys, `shape` and `dtype` are those of their `key_data`. CPU devices
    of one process may copy shards in the memory that they share if `may_copy_on_host`.

    `parts.missing` of the plan has the boxes of the elements that only `lost` devices
    hold. `sent_before` has pairs: the number of a device, and how many more bytes it
    has sent in earlier moves than the device with the same shard that has sent the
    fewest. Raises `MeshError` if no program spans the devices and no process can
    address all shards.
    """
    return _assembly(
        leaf=MovedLeaf(path="", shape=shape, dtype=dtype, sharding=dst),
        target=leaf_made("0", Struct(shape, dtype)),
        sources=[MovedLeaf(path="0", shape=shape, dtype=dtype, sharding=src)],
        may_copy_on_host=may_copy_on_host,
        lost=lost,
        sent_before=sent_before,
    )


def _assembly(
    leaf: MovedLeaf,
    target: Made,
    sources: Sequence[MovedLeaf],
    may_copy_on_host: bool,
    lost: tuple[object, ...] = (),
    sent_before: tuple[tuple[int, int], ...] = (),
) -> Assembly:
    """The plan for assembling `leaf` from `sources` in its sharding, or divided further
    inside TPU slices, or with a relay in each slice, if fewer bytes then cross between
    slices. `target` has the pieces that fill the array. The last three arguments are
    those of `assembly_between`.
    """
    arguments = (target, sources, may_copy_on_host, lost, sent_before)
    assembly = _assembly_in(leaf, *arguments)
    if assembly.method != "programs" or not assembly.dcn_bytes:
        return assembly
    assert leaf.sharding is not None
    best = assembly
    divided_sharding = divided_in_slices(leaf.shape, leaf.sharding)
    if divided_sharding is not None:
        divided_leaf = leaf._replace(sharding=divided_sharding)
        divided_assembly = _assembly_in(divided_leaf, *arguments)
        if divided_assembly.dcn_bytes < assembly.dcn_bytes:
            best = dataclasses.replace(divided_assembly, target=leaf.sharding)
    if may_need_a_relay(leaf._replace(sharding=best.sharding), best.dcn_bytes):
        relayed = with_relay(assembly, leaf)
        if relayed is not None and relayed.dcn_bytes < best.dcn_bytes:
            return relayed
    return best


def _assembly_in(
    leaf: MovedLeaf,
    target: Made,
    sources: Sequence[MovedLeaf],
    may_copy_on_host: bool,
    lost: tuple[object, ...],
    sent_before: tuple[tuple[int, int], ...],
) -> Assembly:
    """The plan for assembling `leaf` from `sources` in its sharding. `target` has the
    pieces that fill the array. If programs assemble it, quantised sources are
    multiplied by their scales first: the products then take the place of the sources.
    The last three arguments are those of `assembly_between`.
    """
    # The numbered devices, and which device sends which part of its shard to which.
    devices = devices_of(leaf, sources, lost)
    parts = _parts(target, sources, devices, sent_before)
    method = _method(
        leaf=leaf,
        target=target,
        sources=sources,
        may_copy_on_host=may_copy_on_host,
        parts=parts,
        devices=devices,
    )
    scaled: dict[str, ScaledArray] = {}
    if method == "programs" and _has_scales(target):
        target, scaled = _with_products(target)
        sources = _scaled_sources(target, sources, scaled)
        devices = devices_of(leaf, sources, lost)
        parts = _parts(target, sources, devices, sent_before)

    source_devices: dict[str, tuple[Any, ...]] = {}
    for path, shards in devices.sources.items():
        source_devices[path] = devices.remaining(shards)
    assert leaf.sharding is not None
    assembly = Assembly(
        target=leaf.sharding,
        sharding=leaf.sharding,
        shape=target.shape,
        dtype=target.dtype,
        shard_shape=devices.shard_shape,
        method=method,
        pieces=tuple(target.pieces),
        scaled=scaled,
        parts=parts,
        devices=devices.all,
        target_devices=devices.remaining(devices.target),
        source_devices=source_devices,
        source_shapes=devices.source_shapes,
    )
    if method == "host" and devices.have_devices:
        return _with_host_copies(assembly, sources, devices)
    return assembly


def _has_scales(target: Made) -> bool:
    """Whether some piece of an array is multiplied by scales."""
    return any(piece.value.scale is not None for piece in target.pieces)


def _method(
    leaf: MovedLeaf,
    target: Made,
    sources: Sequence[MovedLeaf],
    may_copy_on_host: bool,
    parts: ShardParts,
    devices: Devices,
) -> Literal["programs", "host"]:
    """Decides whether programs on devices or NumPy copies on the host assemble `leaf`.
    All processes decide alike. `target` has the pieces of the sources that fill the
    array, and `parts` are the parts of shards in them. If `may_copy_on_host`, CPU
    devices take copies where they can.
    """
    # An array of constants alone has no sources, and so no program.
    if not devices.have_devices:
        return "programs" if sources else "host"

    all_devices = set[Any]()
    for sharding in shardings_of([*sources, leaf]):
        all_devices |= sharding.device_set
    platforms = {device.platform for device in all_devices}
    processes = {device.process_index for device in all_devices}
    source_shardings = shardings_of(sources)
    has_numpy_sources = len(source_shardings) < len(sources)
    is_empty = 0 in target.shape
    has_program = (
        len(platforms) == 1 and bool(sources) and not has_numpy_sources and not is_empty
    )
    if has_program and not (may_copy_on_host and platforms == {"cpu"}):
        return "programs"

    if not source_shardings or len(processes) == 1:
        return "host"
    # The host also copies if no process needs elements of another one. Scales are
    # always read as whole arrays.
    if not _travels(parts, devices) and not _has_scales(target):
        return "host"
    if has_program:
        return "programs"
    raise MeshError(
        f"no program spans {' and '.join(sorted(platforms))} devices of several"
        " processes, or NumPy arrays beside them; move to devices of one platform"
        " within each process first."
    )


def _travels(parts: ShardParts, devices: Devices) -> bool:
    """Whether a process needs elements that another process holds."""
    processes = [device.process_index for device in devices.all]
    for sender, receiver in parts.links:
        if sender != HOST and processes[sender] != processes[receiver]:
            return True
    return False


def _parts(
    target: Made,
    sources: Sequence[MovedLeaf],
    devices: Devices,
    sent_before: tuple[tuple[int, int], ...],
) -> ShardParts:
    """The parts of the shards of `sources` that fill the array `target`, each with its
    sender. `devices` numbers the devices. `sent_before` is that of `assembly_between`.
    """
    # Sources that differ only in their paths share one value, and so one grid of shards.
    source_values: dict[MovedLeaf, Source] = {}
    values_by_path: dict[str, Source] = {}
    for source in sources:
        dtype = devices.source_shapes[source.path].dtype
        key = source._replace(path="")
        if key not in source_values:
            source_values[key] = Source(dtype, devices.holders(source.path))
        values_by_path[source.path] = source_values[key]
    group_of: dict[int, int] = {}
    if devices.have_devices:
        group_of = dict(enumerate(_groups(devices.all)))
    targets: list[tuple[int, Box]] = []
    for device, box in devices.target.items():
        targets.append((devices.numbers[device], box))
    return shard_parts(
        target,
        targets=targets,
        sources=values_by_path,
        group_of=group_of,
        sent_before=sent_before,
    )


def _groups(devices: Sequence[Any]) -> list[int]:
    """A number for each device: that of its TPU slice (or node). If all are in one, it
    is that of its process.
    """
    slices = slices_of(devices)
    if len(set(slices)) > 1:
        return slices
    return [device.process_index for device in devices]


def _with_host_copies(
    plan: Assembly,
    sources: Sequence[MovedLeaf],
    devices: Devices,
) -> Assembly:
    """Returns `plan` with the NumPy copies that this process makes from `sources`.
    Replicas share memory and are copied once. `devices` numbers the devices.
    """
    receiver_of_box = first_holder_by_box(
        (devices.numbers[device], box)
        for device, box in devices.target.items()
        if device.process_index == jax.process_index()
    )
    # In the order of the array, parts of one old shard are evenly spaced more often.
    targets = tuple(sorted(receiver_of_box))
    parts_by_receiver: dict[int, list[ShardPart]] = {
        receiver: [] for receiver in receiver_of_box.values()
    }
    for part in plan.parts.all:
        if part.receiver in parts_by_receiver:
            parts_by_receiver[part.receiver].append(part)

    shapes = [plan.source_shapes[source.path] for source in sources]
    shard_numbers = [_shard_numbers(source, devices) for source in sources]
    copies: list[HostCopies] = []
    for box in targets:
        parts = parts_by_receiver[receiver_of_box[box]]
        copies.append(
            host_copies(
                parts=parts,
                dtype=plan.dtype,
                box=box,
                shapes=shapes,
                shard_numbers=shard_numbers,
            )
        )
    return dataclasses.replace(
        plan,
        targets=targets,
        host_copies=tuple(copies),
        joint_copies=joint_copies(targets, copies, plan.dtype),
    )


def _shard_numbers(source: MovedLeaf, devices: Devices) -> dict[int, int]:
    """From the number of a device to the number of its shard among the shards of the
    source that this process holds. A NumPy array, and an array without shards in this
    process, have the entry of the host alone.
    """
    if source.sharding is None:
        return {HOST: HOST}
    local_devices = source.sharding.addressable_devices_indices_map(source.shape)
    shard_numbers: dict[int, int] = {}
    for number, device in enumerate(local_devices):
        # A lost device has no number, and nothing is read from it.
        shard_numbers[devices.numbers.get(device, HOST)] = number
    return shard_numbers or {HOST: HOST}


def _with_products(target: Made) -> tuple[Made, dict[str, ScaledArray]]:
    """Replaces each source that is multiplied by scales by a new array, the product.
    Returns `target`, the pieces that fill an array, with the products as sources, and, by
    the name of each product, how to compute it.
    """
    scaled: dict[str, ScaledArray] = {}
    pieces = []
    for piece in target.pieces:
        value = piece.value
        if value.scale is not None:
            assert value.path is not None
            # The product has the dtype of the first cast, if it is cast at once.
            dtype = jnp.dtype("float32")
            casts = value.casts
            if casts and not isinstance(casts[0], Arithmetic):
                dtype = casts[0]
                casts = casts[1:]
            product_name = f"{value.path} * {value.scale} in {dtype}"
            scaled[product_name] = ScaledArray(
                source=value.path,
                scale=value.scale,
                dtype=dtype,
            )
            value = Value(path=product_name, casts=casts)
        pieces.append(piece._replace(value=value))
    return dataclasses.replace(target, pieces=tuple(pieces)), scaled


def _scaled_sources(
    target: Made,
    sources: Sequence[MovedLeaf],
    scaled: Mapping[str, ScaledArray],
) -> list[MovedLeaf]:
    """The sources of `target`, the products among them. A product lies as the array that
    is multiplied does.
    """
    by_path = {source.path: source for source in sources}
    for product_name, product in scaled.items():
        source = by_path[product.source]
        by_path[product_name] = source._replace(path=product_name, dtype=product.dtype)
    return [by_path[path] for path in _source_paths(target)]
