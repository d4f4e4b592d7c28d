"""The errors for arguments of a wrong type or value in `shardfx.cost`."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

from shardfx import MeshSpec
from shardfx.cost import (
    Policy,
    Traffic,
    TrafficRow,
    compare,
    compile_for,
    estimate,
    fit,
    policy,
    seconds,
    shardings,
    typed,
)
from shardfx.errors import (
    LeafTypeError,
    MeshError,
    PlanFormatError,
    UnknownPathError,
)


SENT = Traffic(rows=(), devices=8, axes=("data",))
ALL_REDUCE = TrafficRow(
    kind="all-reduce",
    wire_bytes=1024,
    dcn_bytes=0,
    calls=1,
    dtype="f32",
    group_size=8,
    axes=("data",),
    source=None,
    stack=(),
    leaf=None,
)
ALONG_DATA = Traffic(rows=(ALL_REDUCE,), devices=8, axes=("data",))
MESH = MeshSpec({"data": 8})
ROWS = jax.ShapeDtypeStruct(
    (64, 16), jnp.float32, sharding=jax.NamedSharding(MESH.abstract(), jax.P("data"))
)


@ft.cache
def rows_of_sine():
    return shardings(jnp.sin, ROWS)


def kept(w):
    return policy(lambda w: jnp.sum(w**2), w, chip="v5e")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: SENT.by("axis"),  # pyright: ignore[reportArgumentType]
            UnknownPathError,
            "no field 'axis'.*axes.*write `by",
        ),
        (
            lambda: seconds(SENT, "v5p", MeshSpec({"data": -1})),
            MeshError,
            "-1",
        ),
        (
            lambda: seconds(SENT, "v5p", MESH, slice=(2, 2, 2)),  # pyright: ignore
            MeshError,
            r"`slice=\(2, 2, 2\)` must have 3 extents .* as in '2x2x2'",
        ),
        (
            lambda: seconds(ALONG_DATA, "v5p", MeshSpec({"x": 8})),
            MeshError,
            r"all-reduce along data is of another mesh: .* has no axis 'data'; pass the",
        ),
        (
            lambda: seconds(ALONG_DATA, "h100", MeshSpec({"x": 8})),
            MeshError,
            "has no axis 'data'",
        ),
        (
            lambda: seconds(SENT, "v5p", slice="2x2x2"),
            MeshError,
            r"there is no mesh; write `seconds\(traffic, chip, mesh, slice='2x2x2'\)`",
        ),
        (
            lambda: estimate(jnp.sin, ROWS, compiler=5),  # pyright: ignore
            MeshError,
            "there is no compiler 5; `compiler` is one of tpu, gpu, cpu",
        ),
        (
            lambda: compare(jnp.sin, SENT),  # pyright: ignore[reportArgumentType]
            LeafTypeError,
            "`estimated` must be of type Traffic.*cost.estimate",
        ),
        (
            lambda: rows_of_sine().at(41),  # pyright: ignore[reportArgumentType]
            UnknownPathError,
            "no array of the step is made at 41",
        ),
        (
            lambda: rows_of_sine().of(0),  # pyright: ignore[reportArgumentType]
            UnknownPathError,
            "no array of the step has an axis from 0",
        ),
        (
            lambda: rows_of_sine().annotate(5),  # pyright: ignore
            LeafTypeError,
            "`traffic` must be of type Traffic",
        ),
        (
            lambda: kept(jnp.ones((4, 4))).diff(5),  # pyright: ignore
            LeafTypeError,
            "`other` must be of type Policy",
        ),
        (
            lambda: Policy.from_json("[]"),
            PlanFormatError,
            r"this text is no policy \(it holds a list, not an object\)",
        ),
        (
            lambda: compile_for(jnp.sin, ROWS, target=[1, 2]),
            MeshError,
            r"`target=\[1, 2\]` is neither a slice, a mesh nor devices",
        ),
        (
            lambda: typed(5, ROWS),  # pyright: ignore[reportArgumentType]
            LeafTypeError,
            "`step` must be a function, not int",
        ),
        (
            lambda: fit(jnp.sin, ROWS, chip="v5e", compiled=5),
            LeafTypeError,
            "`compiled` must be a compiled step, not int.*`compiled=",
        ),
    ],
)
def test_an_argument_that_is_wrong_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_only_traffic_is_subtracted_from_traffic():
    with pytest.raises(TypeError, match="unsupported operand"):
        SENT - 5  # pyright: ignore
