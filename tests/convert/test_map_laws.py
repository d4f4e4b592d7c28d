"""Laws of maps between trees: pieces agree with NumPy, and what goes there comes back."""

import functools as ft
import html
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from maps import chains, filled, leaf, maps, pieces_of, same, shapes, written

from shardfx import From, TreeMap
from shardfx._convert import pieces as p, structs_of
from shardfx._convert.apply import on_arrays
from shardfx._convert.entries import EntryRule, Selection, selections_of
from shardfx._convert.evaluate import LeavesMade, evaluated
from shardfx._convert.values import box_view, chunks, fill, strided_boxes
from shardfx.errors import MapError


def reader(arrays):
    return lambda path, box: np.ascontiguousarray(
        arrays[path][tuple(slice(*bounds) for bounds in box)]
    )


def from_pieces(array, arrays):
    """A whole array, filled piece by piece."""
    memory = np.zeros(array.shape, array.dtype)
    box = tuple((0, size) for size in array.shape)
    for piece in array.pieces:
        fill(memory, box, piece, reader(arrays))
    return memory


def box_of(draw, shape):
    box = []
    for size in shape:
        low = draw(st.integers(0, size))
        box.append((low, draw(st.integers(low, size))))
    return tuple(box)


@settings(max_examples=120, deadline=None)
@given(maps(), st.data())
def test_pieces_within_a_box_equal_numpy_slices(case, data):
    tree_map, arrays = written(case)
    whole = tree_map.apply(arrays)
    for path, array in pieces_of(tree_map, arrays).items():
        assert array.shape == whole[path].shape
        assert array.dtype == whole[path].dtype
        total = sum(piece.elements for piece in array.pieces)
        assert total == math.prod(array.shape)
        box = box_of(data.draw, array.shape)
        struct = whole[path][tuple(slice(*bounds) for bounds in box)]
        filled_in, landed = (
            np.full(struct.shape, number).astype(array.dtype) for number in (7, 0)
        )
        for part in (part for piece in array.pieces for part in p.within(piece, box)):
            most = data.draw(st.integers(1, 40))
            for few in chunks(part, most):
                fill(filled_in, box, few, reader(arrays))
            if part.value.path is None:
                fill(landed, box, part, reader(arrays))
                continue
            for landing in strided_boxes(part, box):
                box_view(landed, landing)[...] = reader(arrays)(
                    part.value.path, landing.source
                )
        same(filled_in, struct)
        same(landed, struct)


on_numpy = ft.partial(on_arrays, np)


def with_dim(shape, dim, size):
    return (*shape[:dim], size, *shape[dim:])


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
    operands = data.draw(st.sampled_from([[entry], [entry, entry], [entry, other]]))
    if len(operands) > 1 and shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        rule = From.concat(operands, dim=dim)
    leaves = structs_of(arrays, arrays.values())
    entry_rule = EntryRule(rule, LeavesMade(leaves, {}))
    is_same_entry = other not in operands or not shape
    assert (selections_of(rule, leaves) is not None) == is_same_entry
    for i, j in [(1, 1), (0, 0), (2, 1), (1, 0)]:
        binding = {"i": i, "j": j}
        expected = evaluated(rule, binding, arrays, arrays.__getitem__, on_numpy)
        same(from_pieces(entry_rule.made(binding), arrays), expected)
    for binding in ({"i": 3, "j": 0}, {"i": 0, "j": 2}):
        with pytest.raises(MapError, match="is out of range along dim"):
            entry_rule.made(binding)
    with pytest.raises(MapError, match="needs a number"):
        entry_rule.made({"i": "first", "j": 0})


def test_rules_whose_targets_differ_in_more_are_evaluated_each():
    leaves = {"w": p.Struct((2, 3, 4), np.dtype("int8"))}
    for rule in (
        From("{i}").at("j"),
        From("w").T.at("i"),
        From("w").at("i").stack("i", count=2),
        From("absent").at("i"),
        From("w").at("i", dim=3),
    ):
        assert selections_of(rule, leaves) is None
    selections = selections_of(From("w").at(1).at("i", dim=-1).T, leaves)
    assert selections == {"w": (Selection("i", 2, 4),)}


@settings(max_examples=60, deadline=None)
@given(maps(), st.data())
def test_two_maps_are_one(case, data):
    tree_map, arrays = written(case)
    between = tree_map.apply(arrays)
    second = {}
    for path, array in between.items():
        note, _ = data.draw(chains(leaf(path), array.shape))
        second[f"last/{path}"] = note.make(None)
    both = tree_map.then(TreeMap(second))
    expected = TreeMap(second).apply(between)
    for path, array in both.apply(arrays).items():
        same(array, expected[path])
    for path, item in pieces_of(both, arrays).items():
        same(from_pieces(item, arrays), expected[path])


@settings(max_examples=40, deadline=None)
@given(maps(keeps_all=True), st.data())
def test_the_inverse_of_maps_leads_back(case, data):
    tree_map, arrays = written(case)
    for number in range(data.draw(st.integers(0, 2))):
        notes = {
            path: data.draw(chains(leaf(path), array.shape, keeps_all=True))[0]
            for path, array in tree_map.apply(arrays).items()
        }
        rules = {f"{number}/{path}": note.make(None) for path, note in notes.items()}
        tree_map = tree_map.then(TreeMap(rules))
    there = tree_map.apply(arrays)
    applied = tree_map.then(tree_map.inverse()).apply(arrays, like=arrays)
    rows = [applied]
    arrays_by_path = {path: jnp.asarray(array) for path, array in there.items()}
    for tree in (there, arrays_by_path):
        rows.append(tree_map.inverse().apply(tree, like=arrays))
    for again in rows:
        assert again.keys() == arrays.keys()
        for path, array in arrays.items():
            same(again[path], array)


@settings(max_examples=40, deadline=None)
@given(maps())
def test_a_map_is_its_text_and_its_json(case):
    tree_map, _ = written(case)
    assert TreeMap.from_json(tree_map.to_json()) == tree_map
    for _, rule in tree_map.steps[0].rules:
        assert eval(str(rule), {"From": From}) == rule
    assert hash(TreeMap.from_json(tree_map.to_json())) == hash(tree_map)
    assert repr(tree_map) == str(tree_map)
    assert str(tree_map) in html.unescape(tree_map._repr_html_())


def test_scaled_blocks_are_what_numpy_makes_of_them():
    weight = filled((200, 130), np.dtype("int8"))
    scales = filled((2, 2), np.dtype("float32")) + 0.5
    rules = {"w": From("w").scale("s", block=(128, 128)).cast("bfloat16").T}
    tree_map = TreeMap(rules)
    arrays = {"w": weight, "s": scales}
    by_hand = (
        weight.astype(np.float32) * scales.repeat(128, 0).repeat(128, 1)[:200, :130]
    )
    whole = tree_map.apply(arrays)["w"]
    same(whole, by_hand.astype(whole.dtype).T)
    # Also ahead of an inverted map, which is applied by pieces.
    turned = TreeMap({"w": From("w").T}).inverse()
    structs_by_path = {path: jnp.asarray(struct) for path, struct in arrays.items()}
    for tree in (
        arrays,
        structs_by_path,
    ):
        applied = tree_map.then(turned).apply(tree, like={"w": whole.T})["w"]
        same(applied, whole.T)
    (array,) = pieces_of(tree_map, arrays).values()
    box = ((100, 130), (5, 190))
    memory = np.zeros((30, 185), array.dtype)
    for few in (
        few
        for piece in array.pieces
        for part in p.within(piece, box)
        for few in chunks(part, 1000)
    ):
        fill(memory, box, few, reader(arrays))
    same(memory, whole[100:130, 5:190])


def test_arithmetic_is_in_float32_and_rounded_to_the_dtype():
    arrays = {
        "x": filled((8, 6), np.dtype("float32")).astype(jnp.bfloat16),
        "n": filled((6,), np.dtype("float32")),
    }
    rules = {
        "x": From("x").T.times(0.3).plus(1.1),
        "n": From("n").plus(1).cast("float16").times(2),
    }
    tree_map = TreeMap(rules)
    whole = tree_map.apply(arrays)

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(np.float32)

    by_hand = rounded(
        rounded(arrays["x"].T.astype(np.float32) * np.float32(0.3)) + np.float32(1.1)
    )
    same(whole["x"].astype(np.float32), by_hand)
    same(whole["n"], (arrays["n"] + 1).astype(np.float16) * np.float16(2))
    for path, array in pieces_of(tree_map, arrays).items():
        same(from_pieces(array, arrays), whole[path])
    structs_by_path = {path: jnp.asarray(struct) for path, struct in arrays.items()}
    applied = tree_map.apply(structs_by_path)
    for path, array in applied.items():
        same(array, whole[path])
