import dataclasses

import jax
import jax.numpy as jnp
import pytest

from shardfx import MeshSpec, Traffic, TrafficRow, compare, estimate, traffic
from shardfx._cost import Frame


KIB = 1024


def row(kind, kib, line=1, leaf=None, axes=("fsdp",), shares=None):
    source = Frame("/home/me/step.py", line, "step")
    shares = shares or ((leaf, kib * KIB),)
    return TrafficRow(kind, kib * KIB, 0, 1, "f32", 8, axes, source, (source,), leaf, shares)


def compared(ours, theirs):
    return compare(Traffic(tuple(ours), 8), Traffic(tuple(theirs), 8))


@pytest.mark.parametrize(
    "ours, theirs, why, extra",
    [
        ([("reduce-scatter", 10)], [("all-reduce", 20)], "reduces whole", 10),
        ([("all-to-all", 10)], [("all-gather", 80)], "gathers for an exchange", 70),
        ([("all-gather", 10)], [("all-reduce", 30)], "sums instead of gathering", 20),
        ([("all-gather", 10)], [("all-gather", 10), ("all-gather", 10)], "more often", 10),
        ([], [("all-gather", 10)], "not expected", 10),
        ([("all-reduce", 10)], [("collective-permute", 30)], "otherwise", 20),
    ],
)
def test_each_kind_of_surplus_has_its_name_and_fix(ours, theirs, why, extra):
    made = compared([row(*one) for one in ours], [row(*one) for one in theirs])
    (found,) = made.rows
    assert (found.why, found.extra_bytes, found.axes) == (why, extra * KIB, ("fsdp",))
    assert found.source is not None and found.source.line == 1
    text = str(made)
    assert "step.py:1 step" in text and found.fix in text and f"+{extra}.0 KiB" in text
    assert "constrain" in found.fix and made.extra_bytes == extra * KIB


def test_what_moves_to_another_line_along_the_same_axes_is_no_surplus():
    assert compared([row("all-gather", 10, line=1)], [row("all-gather", 10, line=2)]).rows == ()
    (found,) = compared([row("all-gather", 10, line=1, axes=("data",))], [row("all-gather", 10, line=2)]).rows
    assert found.why == "not expected"


def test_sums_that_the_compiler_joined_are_told_apart_by_leaf():
    ours = [row("reduce-scatter", 10, line=line, leaf=leaf) for line, leaf in ((1, "up"), (2, "down"))]
    joined = row("all-reduce", 30, line=9, leaf="up, down", shares=(("up", 10 * KIB), ("down", 20 * KIB)))
    (found,) = compared(ours, [joined]).rows
    assert (found.source and found.source.line, found.leaf, found.extra_bytes) == (2, "down", 10 * KIB)


def test_lines_that_send_less_are_named_too_and_the_rows_make_up_the_difference():
    ours = [row("all-gather", 40, line=1), row("all-gather", 10, line=2, axes=("data",))]
    theirs = [row("all-gather", 10, line=1), row("all-gather", 30, line=2, axes=("data",))]
    made = compared(ours, theirs)
    (more,), (less,) = made.rows, made.less
    assert (more.extra_bytes, less.extra_bytes, less.why) == (20 * KIB, -30 * KIB, "less")
    assert made.extra_bytes == -10 * KIB and made.explained == 1
    assert compared([], []).explained == 1
    # What no line is known of explains nothing.
    unknown = compared([], [row("all-gather", 30), dataclasses.replace(row("all-gather", 10), source=None)])
    assert unknown.explained == 0.75


def test_the_same_traffic():
    made = compared([row("all-gather", 10)], [row("all-gather", 10)])
    assert made.rows == () and made.extra_bytes == 0
    assert str(made) == ("10.0 KiB are sent to each device in a step; 10.0 KiB were estimated, 1.00 times as much.")
    assert str(compared([], [])) == "0 B are sent to each device in a step; 0 B were estimated."


def test_a_compiled_program_is_read():
    mesh = MeshSpec({"data": 8}).build(jax.devices())
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((16, 64, 128), jnp.float32, sharding=rows)

    def best(x):
        return jax.lax.top_k(x, 2)[0]

    compiled = jax.jit(best).lower(x).compile()
    (found,) = compare(estimate(best, x), compiled).rows
    assert found.why == "not expected" and found.extra_bytes == traffic(compiled).wire_bytes
