"""Laws of maps between trees: pieces agree with NumPy, and what goes there comes back."""

import html
import itertools
import math
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from maps import chains, filled, leaf, maps, pieces_of, same, shapes, written

from shardfx import From, TreeMap, _convert as convert
from shardfx._convert.entries import selections_of
from shardfx.errors import MapError


def slices_of(box):
    return tuple(slice(start, stop) for start, stop in box)


def reader(arrays):
    """A function that reads a box of an array."""

    def read(path, box):
        return np.ascontiguousarray(arrays[path][slices_of(box)])

    return read


def from_pieces(array, arrays):
    """A whole array, filled piece by piece."""
    memory = np.zeros(array.shape, array.dtype)
    whole = tuple((0, size) for size in array.shape)
    for piece in array.pieces:
        convert.fill(memory, whole, piece, reader(arrays))
    return memory


def box_of(draw, shape):
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        stop = draw(st.integers(start, size))
        box.append((start, stop))
    return tuple(box)


def on_devices(arrays):
    """The arrays as arrays of JAX."""
    return {path: jnp.asarray(array) for path, array in arrays.items()}


def parts_within(array, box):
    """The parts of an array's pieces in a box."""
    parts = []
    for piece in array.pieces:
        parts += convert.within(piece, box)
    return parts


def fill_by_copies(memory, box, part, read):
    """Fills a part of a box by strided copies of its source."""
    if part.value.path is None:
        convert.fill(memory, box, part, read)
        return
    for copy in convert.strided_boxes(part, box):
        convert.box_view(memory, copy)[...] = read(part.value.path, copy.source)


@settings(max_examples=120, deadline=None)
@given(maps(), st.data())
def test_pieces_within_a_box_equal_numpy_slices(case, data):
    tree_map, arrays = written(case)
    read = reader(arrays)
    applied = tree_map.apply(arrays)
    for path, array in pieces_of(tree_map, arrays).items():
        whole = applied[path]
        assert array.shape == whole.shape
        assert array.dtype == whole.dtype
        elements = sum(piece.elements for piece in array.pieces)
        assert elements == math.prod(array.shape)

        box = box_of(data.draw, array.shape)
        expected = whole[slices_of(box)]
        in_chunks = np.full(expected.shape, 7).astype(array.dtype)
        by_copies = np.zeros(expected.shape, array.dtype)
        for part in parts_within(array, box):
            most_elements = data.draw(st.integers(1, 40))
            for chunk in convert.chunks(part, most_elements):
                convert.fill(in_chunks, box, chunk, read)
            fill_by_copies(by_copies, box, part, read)
        same(in_chunks, expected)
        same(by_copies, expected)


def with_dim(shape, dim, size):
    return (*shape[:dim], size, *shape[dim:])


# The checks of types, where they are on, look at random items of a list.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@settings(max_examples=80, deadline=None)
@given(shapes(), st.data())
def test_entries_of_a_stack_are_what_each_evaluation_makes(shape, data):
    """A rule is evaluated once for all entries. It takes one entry of a leaf, or two
    different ones, which are evaluated each.
    """
    inner_dim = data.draw(st.integers(0, len(shape)))
    outer_dim = data.draw(st.integers(0, len(shape) + 1))
    stack_shape = with_dim(with_dim(shape, inner_dim, 5), outer_dim, 3)
    arrays = {"w": filled(stack_shape, np.dtype("int32"))}
    layers = From("w").at("i", dim=outer_dim)
    entry = layers.at("2*j+1", dim=inner_dim)
    other = layers.at("j", dim=inner_dim)
    rule, _ = data.draw(chains(entry, shape))
    operand_lists = [[entry], [entry, entry], [entry, other]]
    operands = data.draw(st.sampled_from(operand_lists))
    if len(operands) > 1 and shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        rule = From.concat(operands, dim=dim)
    leaves = convert.structs_of(arrays, arrays.values())
    is_same_entry = other not in operands or not shape
    selections = selections_of(rule, leaves)
    assert (selections is not None) == is_same_entry
    tree_map = TreeMap({"{i}/{j}": rule})
    # Pieces are those of the first entry, moved; arrays are evaluated each.
    entries = tree_map.apply(arrays)
    expected_paths = {f"{i}/{j}" for i, j in itertools.product(range(3), range(2))}
    assert entries.keys() == expected_paths
    for path, array in pieces_of(tree_map, arrays).items():
        same(from_pieces(array, arrays), entries[path])
    first = entries["0/0"]
    for path in ("3/0", "0/2"):
        with pytest.raises(MapError, match="is out of range along dim"):
            tree_map.apply(arrays, like={"0/0": first, path: first})
    with pytest.raises(MapError, match="needs a number"):
        tree_map.apply(arrays, like={"first/0": first})


def test_rules_whose_targets_differ_in_more_are_evaluated_each():
    leaves = {"w": convert.Struct((2, 3, 4), np.dtype("int8"))}
    for rule in (
        From("{i}").at("j"),
        From("w").T.at("i"),
        From("w").at("i").stack("i", count=2),
        From("absent").at("i"),
        From("w").at("i", dim=3),
    ):
        assert selections_of(rule, leaves) is None
    selections = selections_of(From("w").at(1).at("i", dim=-1).T, leaves)
    assert selections == {"w": (("i", 2, 4),)}


@settings(max_examples=60, deadline=None)
@given(maps(), st.data())
def test_two_maps_are_one(case, data):
    tree_map, arrays = written(case)
    between = tree_map.apply(arrays)
    rules = {}
    for path, array in between.items():
        recipe, _ = data.draw(chains(leaf(path), array.shape))
        rules[f"last/{path}"] = recipe.make(None)
    last_map = TreeMap(rules)
    joined_map = tree_map.then(last_map)
    expected = last_map.apply(between)
    for path, array in joined_map.apply(arrays).items():
        same(array, expected[path])
    for path, array in pieces_of(joined_map, arrays).items():
        same(from_pieces(array, arrays), expected[path])


@settings(max_examples=40, deadline=None)
@given(maps(keeps_all=True), st.data())
def test_the_inverse_of_maps_leads_back(case, data):
    tree_map, arrays = written(case)
    for number in range(data.draw(st.integers(0, 2))):
        rules = {}
        for path, array in tree_map.apply(arrays).items():
            steps = chains(leaf(path), array.shape, keeps_all=True)
            recipe, _ = data.draw(steps)
            rules[f"{number}/{path}"] = recipe.make(None)
        tree_map = tree_map.then(TreeMap(rules))
    inverse = tree_map.inverse()
    targets = tree_map.apply(arrays)
    there_and_back = tree_map.then(inverse)
    sources = [
        there_and_back.apply(arrays, like=arrays),
        inverse.apply(targets, like=arrays),
        inverse.apply(on_devices(targets), like=arrays),
    ]
    for source in sources:
        assert source.keys() == arrays.keys()
        for path, array in arrays.items():
            same(source[path], array)


@settings(max_examples=40, deadline=None)
@given(maps())
def test_a_map_is_its_text_and_its_json(case):
    tree_map, _ = written(case)
    read = TreeMap.from_json(tree_map.to_json())
    assert read == tree_map
    assert hash(read) == hash(tree_map)
    for _, rule in tree_map.steps[0].rules:
        assert eval(str(rule), {"From": From}) == rule
    text = str(tree_map)
    assert repr(tree_map) == text
    assert text in html.unescape(tree_map._repr_html_())


NUMBERS = [0, 0.0, -0.0, False, 1, 1.0, True, 2**53, 2.0**53, math.nan, math.inf]
SUMMANDS = [0.0, -0.0, 1]
FACTORS = [1, 1.0, 2.0**53]
INDICES = [0, 1, "i"]


def drawn_rule(draw, depth):
    """A rule with numbers that are equal in Python and no same text."""
    kinds = ["leaf", "constant"]
    if depth:
        kinds += ["pad_to", "plus", "times", "at", "concat"]
    kind = draw(st.sampled_from(kinds))
    if kind == "leaf":
        path = draw(st.sampled_from("ab"))
        return From(path)
    # `float` makes an object of its own of a text, also of that of a NaN.
    number = draw(st.sampled_from(NUMBERS))
    if isinstance(number, float):
        number = float(str(number))
    if kind == "constant":
        return From.constant(number, (2,), "float32")
    rule = drawn_rule(draw, depth - 1)
    if kind == "pad_to":
        return rule.pad_to(1, value=number)
    if kind == "plus":
        summand = draw(st.sampled_from(SUMMANDS))
        return rule.plus(summand)
    if kind == "times":
        factor = draw(st.sampled_from(FACTORS))
        return rule.times(factor)
    if kind == "at":
        index = draw(st.sampled_from(INDICES))
        return rule.at(index)
    other_rule = drawn_rule(draw, depth - 1)
    return From.concat([rule, other_rule])


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_maps_are_equal_where_their_json_is(data):
    depth = data.draw(st.integers(0, 2))
    rules = [drawn_rule(data.draw, depth) for _ in range(2)]
    maps_of_rules = []
    for rule in rules:
        dropped = data.draw(st.sampled_from([[], ["v"]]))
        tree_map = TreeMap({"x": rule}, drop=dropped)
        if data.draw(st.booleans()):
            tree_map = tree_map.inverse()
        maps_of_rules.append(tree_map)
    for first, second in itertools.product(maps_of_rules, repeat=2):
        copy = TreeMap.from_json(second.to_json())
        is_same = first.to_json() == second.to_json()
        assert (first == copy) == (first == second) == is_same
        assert len({first, second, copy}) == 2 - is_same
        assert (first.digest == second.digest) == is_same


@pytest.mark.parametrize("first, second", list(itertools.combinations(NUMBERS, 2)))
@pytest.mark.parametrize("depth", [0, 3])
def test_numbers_of_two_types_or_signs_are_two_maps(first, second, depth):
    rules = []
    for number in (first, second):
        rule = From("v").pad_to(8, value=number)
        for _ in range(depth):
            rule = From.concat([rule.T, From("w")])
        rules.append(rule)
    assert len({*rules}) == 2
    tree_maps = {TreeMap({"v": rule}) for rule in rules}
    assert len(tree_maps) == 2


def test_a_map_keeps_its_hash_and_does_not_pickle_it():
    constant = From.constant(math.nan, (2,), "float32")
    tree_map = TreeMap({"v": constant.plus(1)})
    pickled = pickle.dumps(tree_map)
    copy = pickle.loads(pickled)
    assert hash(copy) == hash(tree_map)
    assert copy == tree_map
    assert pickle.dumps(tree_map) == pickled


@pytest.mark.parametrize("value", [0.0, -0.0, False, 1.0])
def test_the_text_of_a_rule_has_a_zero_that_is_no_default(value):
    rule = From("v").pad_to(8, value=value)
    assert str(rule) == f"From('v').pad_to(8, value={value!r})"
    assert eval(str(rule), {"From": From}) == rule


def test_the_text_of_a_map_tells_dropped_leaves_from_the_rest():
    tree_map = TreeMap({"w": From("w")}, drop=["v"], rest=["{path*}"])
    *_, dropped, rest = str(tree_map).splitlines()
    assert dropped == "  (dropped) <- v"
    assert rest == "  (rest) <- {path*}"


def test_scaled_blocks_are_what_numpy_makes_of_them():
    weight = filled((200, 130), np.dtype("int8"))
    scales = filled((2, 2), np.dtype("float32")) + 0.5
    scaled = From("w").scale("s", block=(128, 128))
    rounded = scaled.cast("bfloat16")
    tree_map = TreeMap({"w": rounded.T})
    arrays = {"w": weight, "s": scales}
    scale_of_row = scales.repeat(128, axis=0)
    scale_of_element = scale_of_row.repeat(128, axis=1)[:200, :130]
    by_hand = weight.astype(np.float32) * scale_of_element
    whole = tree_map.apply(arrays)["w"]
    same(whole, by_hand.astype(whole.dtype).T)
    # Also ahead of an inverted map, which is applied by pieces.
    turned = TreeMap({"w": From("w").T}).inverse()
    there_and_turned = tree_map.then(turned)
    for tree in (arrays, on_devices(arrays)):
        applied = there_and_turned.apply(tree, like={"w": whole.T})
        same(applied["w"], whole.T)
    (array,) = pieces_of(tree_map, arrays).values()
    box = ((100, 130), (5, 190))
    memory = np.zeros((30, 185), array.dtype)
    read = reader(arrays)
    for part in parts_within(array, box):
        for chunk in convert.chunks(part, 1000):
            convert.fill(memory, box, chunk, read)
    same(memory, whole[100:130, 5:190])


def test_arithmetic_is_in_float32_and_rounded_to_the_dtype():
    single = np.dtype("float32")
    matrix = filled((8, 6), single)
    arrays = {
        "x": matrix.astype(jnp.bfloat16),
        "n": filled((6,), single),
    }
    increased_rule = From("n").plus(1)
    rules = {
        "x": From("x").T.times(0.3).plus(1.1),
        "n": increased_rule.cast("float16").times(2),
    }
    tree_map = TreeMap(rules)
    whole = tree_map.apply(arrays)

    def rounded(x):
        narrow = x.astype(jnp.bfloat16)
        return narrow.astype(np.float32)

    factor = np.float32(0.3)
    summand = np.float32(1.1)
    turned = arrays["x"].T.astype(np.float32)
    product = rounded(turned * factor)
    by_hand = rounded(product + summand)
    same(whole["x"].astype(np.float32), by_hand)
    increased = arrays["n"] + 1
    doubled = increased.astype(np.float16) * np.float16(2)
    same(whole["n"], doubled)
    for path, array in pieces_of(tree_map, arrays).items():
        same(from_pieces(array, arrays), whole[path])
    for path, array in tree_map.apply(on_devices(arrays)).items():
        same(array, whole[path])


def test_parts_of_one_element_have_any_rank():
    scalar = From("scalar.{i}").reshape(1)
    matrix = From("matrix.{i}").reshape(1)
    row = From.concat([scalar, matrix])
    tree_map = TreeMap({"x": row.stack("i")})
    arrays = {}
    for number in range(2):
        arrays[f"scalar.{number}"] = np.float32(number)
        arrays[f"matrix.{number}"] = np.full((1, 1), number + 2, np.float32)
    expected = np.array([[0, 2], [1, 3]], np.float32)
    applied = tree_map.apply(arrays)
    same(applied["x"], expected)
    turned = TreeMap({"y": From("x").T})
    applied = tree_map.then(turned).apply(arrays)
    same(applied["y"], expected.T)
    inverse = tree_map.inverse()
    back = inverse.apply({"x": expected}, like=arrays)
    for path, array in arrays.items():
        same(back[path], array)


def test_constants_are_stacked():
    constant = From.constant(2, (3,), "int32")
    tree_map = TreeMap({"x": constant.stack("i", count=2), "w": "w"})
    applied = tree_map.apply({"w": np.float32(1)})
    expected = np.full((2, 3), 2, np.int32)
    same(applied["x"], expected)


SIGNED = [-8, -1, 0, 7]
UNSIGNED = [8, 15, 0, 7]
POWERS_OF_2 = [0.5, 1, 4, 256]
LARGE = [1e30, -1e30, 1, 0]
INFINITE = [np.inf, -np.inf, 1, 0]
CASTS = [
    ("int4", "uint4", SIGNED, UNSIGNED),
    ("uint4", "int4", UNSIGNED, SIGNED),
    ("float8_e4m3fn", "float8_e8m0fnu", POWERS_OF_2, POWERS_OF_2),
    ("float8_e8m0fnu", "float8_e5m2", POWERS_OF_2, POWERS_OF_2),
    ("float32", "float16", LARGE, INFINITE),
]


@pytest.mark.parametrize("stored, to, values, expected", CASTS)
def test_casts_that_numpy_lacks_or_warns_of(stored, to, values, expected):
    singles = np.asarray(values, np.float32)
    expected_singles = np.asarray(expected, np.float32)
    cast = expected_singles.astype(jnp.dtype(to))
    arrays = {"x": singles.astype(jnp.dtype(stored))}
    tree_map = TreeMap({"x": From("x").cast(to)})
    applied = tree_map.apply(arrays)
    same(applied["x"], cast)
    (array,) = pieces_of(tree_map, arrays).values()
    memory = np.zeros(4, array.dtype)
    box = ((0, 4),)
    read = reader(arrays)
    for part in parts_within(array, box):
        convert.fill(memory, box, part, read)
    same(memory, cast)
