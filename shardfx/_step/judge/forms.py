"""The form of an operation: what identifies it, and which dimensions of its operands
the dimensions of its result follow.

The whole program and the partitioned program have the same forms, since a form has no
sizes in it.
"""

import functools as ft
import re
from collections.abc import Sequence
from typing import NamedTuple

from ..._ground.opcodes import ELEMENTWISE
from ..collectives import KINDS, groups_of
from ..hlo_text import HloModule, Instruction, arrays_in, root_of


class View(NamedTuple):
    """A numbered value, seen with other dimensions.

    - `root`: the number of the value.
    - `dims`: for each dimension, the dimension of the value that it follows; `None` if
      nothing changes along it.
    """

    root: int
    dims: tuple[int | None, ...]


class Form(NamedTuple):
    """The form of an operation.

    - `key`: what identifies its result.
    - `dims`: for each dimension of the result, its dimension in the numbered value;
      `None` if nothing changes along it.
    - `kept`: the dimensions of the result that the numbered value has.
    """

    key: tuple[object, ...]
    dims: tuple[int | None, ...]
    kept: tuple[int, ...]


_ATTRIBUTE = re.compile(
    r"(\w+)=(\{(?:[^{}]|\{[^{}]*\})*\}|\[[^\]]*\](?:<=\[[^\]]*\])?(?:T\([^)]*\))?"
    r'|"(?:[^"\\]|\\.)*"|[^,\s{}"]+)'
)
_NAMES = re.compile(r", (?:channel_id|to_apply)=[^,]+")
_TO_APPLY = re.compile(r"\bto_apply=%?([\w.\-]+)")
_NUMBER = re.compile(r"-?\d+")
# Attributes that do not say what an operation computes.
_NOISE = frozenset(
    "sharding metadata channel_id frontend_attributes backend_config to_apply calls"
    " body condition branch_computations true_computation false_computation"
    " called_computations control parameter_replication use_global_device_ids"
    " replica_groups operand_layout_constraints indices_are_sorted origin select scatter"
    " statistics".split()
)


@ft.lru_cache(maxsize=2**15)
def _attributes(text: str) -> dict[str, str]:
    return dict(_ATTRIBUTE.findall(text))


def attributes_of(instruction: Instruction) -> dict[str, str]:
    """The attributes of an instruction by name, without its metadata."""
    return _attributes(text_of(instruction))


def text_of(instruction: Instruction) -> str:
    """The text of the attributes of an instruction, without its metadata."""
    text = instruction.attributes
    if instruction.opcode != "custom-call":
        text = text.partition(", metadata={")[0]
    return text.partition(", backend_config=")[0]


def nameless_text(instruction: Instruction) -> str:
    """The text of the attributes of an instruction, without its metadata, and without
    the names of channels and of functions, which differ between equal layers.
    """
    text = text_of(instruction)
    if "channel_id=" in text or "to_apply=" in text:
        return _NAMES.sub("", text)
    return text


def attribute(instruction: Instruction, name: str) -> str:
    """The text of an attribute of an instruction; "" if it has none of this name."""
    return attributes_of(instruction).get(name, "")


def numbers(instruction: Instruction, name: str) -> tuple[int, ...]:
    """The numbers in an attribute, such as the dimensions of a broadcast."""
    return _numbers_in(attribute(instruction, name))


@ft.lru_cache(maxsize=2**12)
def _numbers_in(text: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in _NUMBER.findall(text))


def meaning_of(
    instruction: Instruction,
    sizes: frozenset[str] = frozenset(),
) -> tuple[tuple[str, str], ...]:
    """The attributes that say what an operation computes, without those in `sizes`,
    which depend on the size of a shard.
    """
    return _meaning_of(text_of(instruction), sizes)


@ft.lru_cache(maxsize=2**15)
def _meaning_of(text: str, sizes: frozenset[str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, value)
        for name, value in sorted(_attributes(text).items())
        if name not in _NOISE and name not in sizes
    )


def sizes_of(instruction: Instruction) -> tuple[str, ...]:
    """The attributes of an instruction that hold sizes, such as its window."""
    attributes = attributes_of(instruction)
    return tuple(attributes[name] for name in sorted(_SIZES & attributes.keys()))


def computation_text(module: HloModule, name: str) -> str:
    """The text of a computation without the names of its instructions, so that equal
    computations have equal texts. Operands are given by their place in the computation.
    """
    rows = []
    place_by_name: dict[str, int] = {}
    for instruction in module.computations[name].values():
        place_by_name[instruction.name] = len(place_by_name)
        operands = ",".join(
            str(place_by_name[operand]) for operand in instruction.operands
        )
        inside = instruction.inside if not instruction.operands else ""
        types = "+".join(array.dtype for array in arrays_in(instruction.result))
        called_texts = "".join(
            computation_text(module, callee) for _, callee in instruction.called
        )
        row = (instruction.opcode, types, operands, inside, called_texts)
        rows.append(f"{row}{meaning_of(instruction)}{instruction.is_root}")
    return ";".join(rows)


def reducer_of(module: HloModule, instruction: Instruction) -> str:
    """The opcode of the computation that an instruction calls to reduce, such as "add";
    "" if that is no single operation of its two parameters.
    """
    called_name = _TO_APPLY.search(text_of(instruction))
    computation = module.computations.get(called_name[1]) if called_name else None
    if computation is None:
        return ""
    root = root_of(computation)
    while root.opcode == "copy":
        root = computation[root.operands[0]]
    operands = [computation[operand] for operand in root.operands]
    parameter_numbers = sorted(
        operand.inside for operand in operands if operand.opcode == "parameter"
    )
    if parameter_numbers != ["0", "1"]:
        return ""
    return root.opcode if root.opcode in _REDUCERS else ""


_DOT_ATTRIBUTES = (
    "lhs_contracting_dims",
    "rhs_contracting_dims",
    "lhs_batch_dims",
    "rhs_batch_dims",
)
_COMMUTATIVE = frozenset("add multiply maximum minimum and or xor".split())
_REDUCERS = ("add", "maximum", "minimum", "and", "or", "multiply", "xor")
# Attributes with sizes of shards.
_SIZES = frozenset(
    "slice_sizes dynamic_slice_sizes window padding slice iota_dimension"
    " feature_group_count batch_group_count".split()
)
_CALLING = frozenset("reduce scatter sort reduce-window".split())


def form_of(
    instruction: Instruction,
    views: Sequence[View],
    shape: tuple[int, ...],
    module: HloModule,
) -> Form | View:
    """The form of an operation, whose operands have these views and whose result has
    the shape `shape`. A view of operand 0 for an operation that moves no element into
    another value, such as a transpose.
    """
    opcode = instruction.opcode
    if opcode in ("copy", "bitcast-convert-type") or _is_constraint(instruction):
        return views[0]
    if opcode == "broadcast":
        return broadcast_view(views[0], numbers(instruction, "dimensions"), len(shape))
    if opcode == "transpose":
        order = numbers(instruction, "dimensions")
        return View(views[0].root, tuple(views[0].dims[dim] for dim in order))
    if opcode == "bitcast-convert" and len(views[0].dims) != len(shape):
        # Numbers of another width: the last dimension is that of their parts.
        dims = tuple(range(len(shape)))
        dtype = arrays_in(instruction.result)[0].dtype
        return Form((opcode, dtype, views[0]), dims, dims)
    if opcode in ELEMENTWISE:
        return _elementwise(instruction, views, len(shape), module)
    if opcode == "dot":
        return _dot(instruction, views)
    if opcode == "iota":
        along = int(attribute(instruction, "iota_dimension"))
        iota_dims: list[int | None] = [None] * len(shape)
        iota_dims[along] = 0
        # An iota is one value whatever its size, as long as any.
        key = ("iota", arrays_in(instruction.result)[0].dtype)
        return Form(key=key, dims=tuple(iota_dims), kept=())
    if opcode == "constant":
        dtype = arrays_in(instruction.result)[0].dtype if instruction.result else ""
        dims = tuple(range(len(shape)))
        return Form(
            key=("constant", dtype, shape, instruction.inside.strip()),
            dims=dims,
            kept=dims,
        )
    if opcode == "reduce" and len(views) == 2:
        return _reduce(instruction, views, module)
    meaning = meaning_of(instruction, _SIZES)
    if opcode in ("slice", "pad"):
        # Their attributes are sizes.
        meaning = ()
    dims = tuple(range(len(shape)))
    called = _called_by(instruction, module)
    return Form(key=(opcode, meaning, called, *views), dims=dims, kept=dims)


def _called_by(instruction: Instruction, module: HloModule) -> tuple[str, ...]:
    """What identifies the functions that an operation calls, and its options; the
    replica groups of a collective, and the type in which a convolution sums, too.
    """
    opcode = instruction.opcode
    if opcode in _CALLING:
        reducer = reducer_of(module, instruction)
        if not reducer:
            reducer = computation_text(module, dict(instruction.called)["to_apply"])
        return (reducer,)
    if opcode in KINDS:
        rows: list[tuple[int, ...]] = []
        for members in groups_of(instruction, opcode, module.partitions):
            rows += map(tuple, members.tolist())
        reducer = reducer_of(module, instruction)
        for _, callee in instruction.called:
            reducer = reducer or computation_text(module, callee)
        return (reducer, str(sorted(rows)))
    if opcode == "select-and-scatter":
        return tuple(
            computation_text(module, attribute(instruction, name).lstrip("%"))
            for name in ("select", "scatter")
        )
    if opcode == "custom-call":
        return options_of(instruction)
    if opcode == "convolution":
        return (arrays_in(instruction.result)[0].dtype,)
    return ()


def options_of(instruction: Instruction) -> tuple[str, ...]:
    """The options of a custom call, such as which triangle it reads, in any order."""
    text = instruction.attributes.partition(", backend_config=")[2]
    options = text.partition(", metadata={")[0]
    return tuple(sorted(options.strip("{}").split(", ")))


def _is_constraint(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and (
        'custom_call_target="Sharding"' in instruction.attributes
    )


def broadcast_view(view: View, dimensions: Sequence[int], rank: int) -> View:
    """The view of a broadcast to `rank` dimensions, where `dimensions` are those of the
    result that the dimensions of the operand become.
    """
    dims: list[int | None] = [None] * rank
    for source, target in enumerate(dimensions):
        dims[target] = view.dims[source]
    return View(view.root, tuple(dims))


def _elementwise(
    instruction: Instruction,
    views: Sequence[View],
    rank: int,
    module: HloModule,
) -> Form:
    """The form of an elementwise operation. Dimensions along which no operand changes
    are none of the value's: the program of one device may broadcast before or after the
    operation.
    """
    pattern = _pattern_of(tuple(view.dims for view in views), rank)
    operands = []
    for view, dims in zip(views, pattern.rows, strict=True):
        operands.append(view if view.dims == dims else View(view.root, dims))
    opcode = instruction.opcode
    function = ""
    if opcode in ("convert", "bitcast-convert"):
        function = arrays_in(instruction.result)[0].dtype
    if opcode == "map":
        function = computation_text(module, dict(instruction.called)["to_apply"])
    key = elementwise_key([opcode, meaning_of(instruction), function, *operands])
    return Form(key, pattern.dims, pattern.kept)


def elementwise_key(parts: Sequence[object]) -> tuple[object, ...]:
    """The key of an elementwise operation from its parts: the opcode, the attributes,
    the type, and the views of its operands. Views of operands that may be exchanged are
    sorted, since the partitioner's clean-up takes both orders for one.
    """
    if parts[0] not in _COMMUTATIVE:
        return tuple(parts)
    views = sorted((part for part in parts if isinstance(part, View)), key=_view_order)
    others = [part for part in parts if not isinstance(part, View)]
    return (*others, *views)


class _Pattern(NamedTuple):
    """How the dimensions of an elementwise operation's operands meet.

    - `rows`: for each operand, its dimensions at the kept dimensions of the result.
    - `dims`, `kept`: as in a `Form`.
    """

    rows: tuple[tuple[int | None, ...], ...]
    dims: tuple[int | None, ...]
    kept: tuple[int, ...]


@ft.lru_cache(maxsize=2**12)
def _pattern_of(
    operand_dims: tuple[tuple[int | None, ...], ...],
    rank: int,
) -> _Pattern:
    """How operands meet in a result of `rank` dimensions. `operand_dims` are the dims
    of each operand's view. A dimension of the result is kept if an operand changes
    along it.
    """
    # Scalars, such as predicates, change along no dimension.
    rows = []
    for dims in operand_dims:
        rows.append(dims if len(dims) == rank else (None,) * rank)
    columns = list(zip(*rows, strict=True))
    kept = tuple(
        dim for dim, column in enumerate(columns) if column.count(None) < len(column)
    )
    place_of_kept = {position: place for place, position in enumerate(kept)}
    return _Pattern(
        rows=tuple(tuple(row[dim] for dim in kept) for row in rows),
        dims=tuple(place_of_kept.get(dim) for dim in range(rank)),
        kept=kept,
    )


def _view_order(view: View) -> tuple[object, ...]:
    """A key by which views are sorted."""
    dims = []
    for dim in view.dims:
        dims.append(-1 if dim is None else dim)
    return view.root, dims


class DotDims(NamedTuple):
    """The dimensions of a product: pairs of those of the first operand and of the other
    that are summed over (`contracted`) or common (`batch`), and the remaining ones of
    each operand (`free`). The result has the batch dimensions, and then the free ones.
    """

    contracted: tuple[tuple[int, int], ...]
    batch: tuple[tuple[int, int], ...]
    free: tuple[tuple[int, ...], tuple[int, ...]]


def dot_dims(instruction: Instruction, ranks: tuple[int, int]) -> DotDims:
    """The dimensions of a product of two arrays of these ranks."""
    return _dot_dims(text_of(instruction), ranks)


@ft.lru_cache(maxsize=2**12)
def _dot_dims(text: str, ranks: tuple[int, int]) -> DotDims:
    """As `dot_dims`, from the text of the product's attributes."""
    attributes = _attributes(text)
    dims_by_attribute = {
        name: _numbers_in(attributes.get(name, "")) for name in _DOT_ATTRIBUTES
    }
    contracted = (
        dims_by_attribute["lhs_contracting_dims"],
        dims_by_attribute["rhs_contracting_dims"],
    )
    batch = (
        dims_by_attribute["lhs_batch_dims"],
        dims_by_attribute["rhs_batch_dims"],
    )
    free = tuple(
        tuple(dim for dim in range(rank) if dim not in contracted_dims + batch_dims)
        for rank, contracted_dims, batch_dims in zip(
            ranks, contracted, batch, strict=True
        )
    )
    return DotDims(
        contracted=tuple(zip(*contracted, strict=True)),
        batch=tuple(zip(*batch, strict=True)),
        free=(free[0], free[1]),
    )


def _dot(instruction: Instruction, views: Sequence[View]) -> Form:
    """The form of a product. A dimension of the result is followed if that of the
    operand is, or one of both for a batch dimension.
    """
    first, second = views
    dims = dot_dims(instruction, (len(first.dims), len(second.dims)))
    are_followed = [
        first.dims[first_dim] is not None or second.dims[second_dim] is not None
        for first_dim, second_dim in dims.batch
    ]
    are_followed += [first.dims[dim] is not None for dim in dims.free[0]]
    are_followed += [second.dims[dim] is not None for dim in dims.free[1]]
    dtype = arrays_in(instruction.result)[0].dtype
    key = ("dot", dtype, meaning_of(instruction), first, second)
    return Form(key, _places_of(are_followed), tuple(range(len(are_followed))))


def _places_of(are_followed: Sequence[bool]) -> tuple[int | None, ...]:
    """The place of each dimension that is followed; `None` for the others."""
    places: list[int | None] = []
    for place, is_followed in enumerate(are_followed):
        places.append(place if is_followed else None)
    return tuple(places)


def _reduce(instruction: Instruction, views: Sequence[View], module: HloModule) -> Form:
    """The form of a reduction of one array. Its key has the text of the function with
    which it reduces: equal functions are one.
    """
    reduced_dims = numbers(instruction, "dimensions")
    remaining_dims = [
        dim
        for dim_number, dim in enumerate(views[0].dims)
        if dim_number not in reduced_dims
    ]
    reducer = reducer_of(module, instruction) or computation_text(
        module, dict(instruction.called)["to_apply"]
    )
    result_dims = _places_of([dim is not None for dim in remaining_dims])
    key = ("reduce", reduced_dims, reducer, *views)
    return Form(key=key, dims=result_dims, kept=tuple(range(len(remaining_dims))))


def squeezed(view: View, shape: Sequence[int]) -> View:
    """The view of an array of this shape without its dimensions of size 1, which become
    `None`: nothing changes along them.
    """
    if 1 not in shape:
        return view
    dims: list[int | None] = []
    for dim, size in zip(view.dims, shape, strict=True):
        dims.append(None if size == 1 else dim)
    return View(view.root, tuple(dims))
