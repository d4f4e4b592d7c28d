"""`shardings(...).known_faults`: operations whose arrays are sharded as a known fault
has them.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx import MeshSpec
from shardfx.cost import shardings


MESH = MeshSpec({"a": 4, "b": 2}).abstract()


def struct(shape, spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, spec))


def conv(x, w):
    numbers = ("NCHW", "OIHW", "NCHW")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


@pytest.mark.parametrize(
    "image, kernel, parts",
    [
        (P(None, None, "b"), P(), ["sharded dimension"]),
        (P("a", None, "b"), P(), []),
        (P("a"), P(), []),
        (P(None, None, ("a", "b")), P(), []),
    ],
    ids=["height", "rows and height", "rows", "height over all axes"],
)
def test_a_convolution_along_a_sharded_dimension_is_told(image, kernel, parts):
    args = struct((4, 8, 8, 8), image), struct((8, 8, 3, 3), kernel)
    sentences = shardings(conv, *args, compiler="cpu").known_faults
    assert len(sentences) == len(parts)
    for sentence, part in zip(sentences, parts, strict=True):
        assert part in sentence
        assert "test_known_faults.py" in sentence
        assert "check_step" in sentence
        assert "constrained to rows" in sentence


def test_uneven_indices_of_a_scatter_are_told():
    rows = NamedSharding(MESH, P("a"))

    def step(x, indices, updates):
        hold = lambda y: jax.lax.with_sharding_constraint(y, rows)
        return x.at[hold(indices)].mul(hold(updates))

    def args(count):
        indices = jax.ShapeDtypeStruct((count,), jnp.int32)
        return struct((16, 8), P("a")), indices, struct((count, 8), P())

    (sentence,) = shardings(step, *args(5), compiler="cpu").known_faults
    assert "scatter" in sentence
    assert "indices sharded unevenly" in sentence
    known_faults = shardings(step, *args(8), compiler="cpu").known_faults
    assert known_faults == ()


@pytest.mark.parametrize(
    "groups, image, is_told",
    [
        (8, P("a"), True),
        (2, P("a"), True),
        (1, P("a"), False),
        (8, P(("a", "b")), False),
        (8, P("a", "b"), False),
    ],
    ids=["depthwise", "groups", "no groups", "all axes", "channels"],
)
def test_the_gradient_of_a_grouped_kernel_is_told(groups, image, is_told):
    def loss(w, x):
        numbers = ("NCHW", "OIHW", "NCHW")
        y = jax.lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "SAME",
            dimension_numbers=numbers,
            feature_group_count=groups,
        )
        return jnp.sum(jnp.sin(y))

    args = struct((8, 8 // groups, 3, 3), P()), struct((8, 8, 8, 8), image)
    sentences = shardings(jax.grad(loss), *args, compiler="cpu").known_faults
    assert any("grouped convolution" in sentence for sentence in sentences) == is_told
    assert shardings(loss, *args, compiler="cpu").known_faults == ()
