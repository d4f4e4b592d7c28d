"""Laws of maps between trees: pieces agree with NumPy, and what goes there comes back."""

import html
import math

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from maps import chains, filled, leaf, maps, pieces_of, same, written

from shardfx import From, TreeMap
from shardfx._convert import pieces as p
from shardfx._convert.values import box_view, chunks, fill, strided_boxes


def reader(arrays):
    return lambda path, box: np.ascontiguousarray(
        arrays[path][tuple(slice(*ends) for ends in box)]
    )


def from_pieces(one, arrays):
    """A whole array, filled piece by piece."""
    memory, box = np.zeros(one.shape, one.dtype), tuple((0, size) for size in one.shape)
    for piece in one.pieces:
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
    made, arrays = written(case)
    whole = made.apply(arrays)
    for path, one in pieces_of(made, arrays).items():
        assert one.shape == whole[path].shape and one.dtype == whole[path].dtype
        assert sum(piece.elements for piece in one.pieces) == math.prod(one.shape)
        box = box_of(data.draw, one.shape)
        wanted = whole[path][tuple(slice(*ends) for ends in box)]
        filled_in, landed = (
            np.full(wanted.shape, number).astype(one.dtype) for number in (7, 0)
        )
        for part in (part for piece in one.pieces for part in p.within(piece, box)):
            for few in chunks(part, data.draw(st.integers(1, 40))):
                fill(filled_in, box, few, reader(arrays))
            if part.value.path is None:
                fill(landed, box, part, reader(arrays))
                continue
            for landing in strided_boxes(part, box):
                box_view(landed, landing)[...] = reader(arrays)(
                    part.value.path, landing.source
                )
        same(filled_in, wanted)
        same(landed, wanted)


@settings(max_examples=60, deadline=None)
@given(maps(), st.data())
def test_two_maps_are_one(case, data):
    made, arrays = written(case)
    between = made.apply(arrays)
    second = {}
    for path, array in between.items():
        note, _ = data.draw(chains(leaf(path), array.shape))
        second[f"last/{path}"] = note.make(None)
    both = made.then(TreeMap(second))
    expected = TreeMap(second).apply(between)
    for path, array in both.apply(arrays).items():
        same(array, expected[path])
    for path, one in pieces_of(both, arrays).items():
        same(from_pieces(one, arrays), expected[path])


@settings(max_examples=40, deadline=None)
@given(maps(keeps_all=True), st.data())
def test_the_inverse_of_maps_leads_back(case, data):
    made, arrays = written(case)
    for number in range(data.draw(st.integers(0, 2))):
        notes = {
            path: data.draw(chains(leaf(path), one.shape, keeps_all=True))[0]
            for path, one in made.apply(arrays).items()
        }
        made = made.then(
            TreeMap(
                {f"{number}/{path}": note.make(None) for path, note in notes.items()}
            )
        )
    there = made.apply(arrays)
    found = [made.then(made.inverse()).apply(arrays, like=arrays)]
    for tree in (there, {path: jnp.asarray(one) for path, one in there.items()}):
        found.append(made.inverse().apply(tree, like=arrays))
    for again in found:
        assert again.keys() == arrays.keys()
        for path, array in arrays.items():
            same(again[path], array)


@settings(max_examples=40, deadline=None)
@given(maps())
def test_a_map_is_its_text_and_its_json(case):
    made, _ = written(case)
    assert TreeMap.from_json(made.to_json()) == made
    for _, one in made.steps[0].made:
        assert eval(str(one), {"From": From}) == one
    assert hash(TreeMap.from_json(made.to_json())) == hash(made)
    assert repr(made) == str(made) and str(made) in html.unescape(made._repr_html_())


def test_scaled_blocks_are_what_numpy_makes_of_them():
    weight, scales = (
        filled((200, 130), np.dtype("int8")),
        filled((2, 2), np.dtype("float32")) + 0.5,
    )
    made = TreeMap({"w": From("w").scale("s", block=(128, 128)).cast("bfloat16").T})
    arrays = {"w": weight, "s": scales}
    by_hand = (
        weight.astype(np.float32) * scales.repeat(128, 0).repeat(128, 1)[:200, :130]
    )
    whole = made.apply(arrays)["w"]
    same(whole, by_hand.astype(whole.dtype).T)
    # Also ahead of an inverted map, which is applied by pieces.
    turned = TreeMap({"w": From("w").T}).inverse()
    for tree in (arrays, {path: jnp.asarray(one) for path, one in arrays.items()}):
        same(made.then(turned).apply(tree, like={"w": whole.T})["w"], whole.T)
    (one,) = pieces_of(made, arrays).values()
    box, memory = ((100, 130), (5, 190)), np.zeros((30, 185), one.dtype)
    for few in (
        few
        for piece in one.pieces
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
    made = TreeMap(
        {
            "x": From("x").T.times(0.3).plus(1.1),
            "n": From("n").plus(1).cast("float16").times(2),
        }
    )
    whole = made.apply(arrays)

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(np.float32)

    by_hand = rounded(
        rounded(arrays["x"].T.astype(np.float32) * np.float32(0.3)) + np.float32(1.1)
    )
    same(whole["x"].astype(np.float32), by_hand)
    same(whole["n"], (arrays["n"] + 1).astype(np.float16) * np.float16(2))
    for path, one in pieces_of(made, arrays).items():
        same(from_pieces(one, arrays), whole[path])
    for path, one in made.apply(
        {path: jnp.asarray(one) for path, one in arrays.items()}
    ).items():
        same(one, whole[path])
