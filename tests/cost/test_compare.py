import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st

from shardfx import MeshSpec
from shardfx.cost import Frame, Traffic, TrafficRow, compare, estimate, traffic


KIB = 1024


def row(kind, kib, line=1, leaf=None, axes=("fsdp",), shares=None, dtype="f32", **rest):
    source = Frame("/home/me/step.py", line, "step")
    shares = shares or ((leaf, kib * KIB),)
    return TrafficRow(
        kind,
        wire_bytes=kib * KIB,
        dcn_bytes=0,
        calls=1,
        dtype=dtype,
        group_size=8,
        axes=axes,
        source=source,
        stack=(source,),
        leaf=leaf,
        shares=shares,
        **rest,
    )


def compared(ours, theirs):
    return compare(Traffic(tuple(ours), 8), Traffic(tuple(theirs), 8))


@pytest.mark.parametrize(
    "ours, theirs, why",
    [
        ([row("all-reduce", 10)], [row("all-reduce", 20)], "sends it otherwise"),
        (
            [row("reduce-scatter", 10)],
            [row("all-reduce", 20)],
            "it is sent by all-reduce, not by reduce-scatter",
        ),
        (
            [row("all-gather", 10, note="it rolls otherwise.")],
            [row("all-gather", 20)],
            "it rolls otherwise",
        ),
        ([], [row("all-gather", 10)], "nothing was estimated here"),
        (
            [row("all-gather", 10, dtype="bf16")],
            [row("all-gather", 20)],
            "it is sent as f32, not as bf16",
        ),
    ],
)
def test_a_difference_is_explained(ours, theirs, why):
    comparison = compared(ours, theirs)
    (difference,) = comparison.rows
    assert why in difference.why
    assert difference.extra_bytes == comparison.extra_bytes == 10 * KIB
    assert difference.axes == ("fsdp",)
    assert difference.source is not None
    assert difference.source.line == 1
    text = str(comparison)
    assert "step.py:1 step" in text
    assert difference.why in text
    assert "+10.0 KiB" in text


def test_bytes_on_another_line_of_the_same_axes_are_no_excess():
    rows = compared(
        [row("all-gather", 10, line=1)], [row("all-gather", 10, line=2)]
    ).rows
    assert rows == ()
    (difference,) = compared(
        [row("all-gather", 10, line=1, axes=("data",))], [row("all-gather", 10, line=2)]
    ).rows
    assert difference.why == "nothing was estimated here"
    # A sum that the compiler merged is told apart by leaf.
    cases = ((1, "up"), (2, "down"))
    ours = [row("reduce-scatter", 10, line=line, leaf=leaf) for line, leaf in cases]
    shares = (("up", 10 * KIB), ("down", 20 * KIB))
    merged = row(
        "all-reduce",
        30,
        line=9,
        leaf="up, down",
        shares=shares,
    )
    (difference,) = compared(ours, [merged]).rows
    assert (difference.source and difference.source.line) == 2
    assert difference.leaf == "down"
    assert difference.extra_bytes == 10 * KIB


def test_small_differences_are_one_row():
    small = [row("all-gather", 1, line=line, axes=("data",)) for line in (3, 4)]
    comparison = compared([row("all-gather", 3000)], [row("all-gather", 9000), *small])
    named, rest = comparison.rows
    assert named.extra_bytes == 6000 * KIB
    assert rest.extra_bytes == 2 * KIB
    assert rest.source is None
    assert rest.axes == ()
    assert "what has no line, and lines at which little differs" in str(comparison)
    (less,) = compared([row("all-gather", 40)], [row("all-gather", 10)]).less
    assert less.extra_bytes == -30 * KIB


FRAMES = [None, *(Frame("/home/me/step.py", line, "step") for line in range(4))]
AXES = [("data",), ("fsdp",), ("data", "fsdp")]
LEAVES = [None, "up", "down"]


# Plain values: what checks annotations draws random numbers, which hypothesis forbids
# while it draws.
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["all-gather", "all-reduce", "reduce-scatter", "all-to-all"]),
        st.integers(0, 3000) | st.integers(0, 3_000_000),
        st.sampled_from(AXES),
        st.sampled_from(FRAMES),
        st.lists(st.sampled_from(LEAVES), min_size=1, max_size=3, unique=True),
    ),
    max_size=8,
)


def drawn(rows):
    traffic_rows = []
    for kind, wire, axes, source, leaf_paths in rows:
        # Rounded, as those of programs.
        shares = tuple((leaf, round(wire / len(leaf_paths))) for leaf in leaf_paths)
        leaf = ", ".join(filter(None, leaf_paths)) or None
        traffic_rows.append(
            TrafficRow(
                kind,
                wire_bytes=wire,
                dcn_bytes=0,
                calls=1,
                dtype="f32",
                group_size=8,
                axes=axes,
                source=source,
                stack=(),
                leaf=leaf,
                shares=shares,
            )
        )
    return Traffic(tuple(traffic_rows), 8)


@given(ROWS, ROWS)
@settings(max_examples=60, deadline=None)
def test_every_byte_that_differs_is_in_one_row(estimated, compiled):
    ours = drawn(estimated)
    theirs = drawn(compiled)
    comparison = compare(ours, theirs)
    turned = compare(theirs, ours)
    rows = [*comparison.rows, *comparison.less]
    total = sum(row.extra_bytes for row in rows)
    assert total == comparison.extra_bytes == theirs.wire_bytes - ours.wire_bytes
    assert all(row.extra_bytes > 0 for row in comparison.rows)
    assert all(row.extra_bytes < 0 for row in comparison.less)
    # A line and axes are in one row, of what is more or of what is less; only the rest
    # has no line, and comes last.
    named = [(row.source, row.axes) for row in rows if row.source is not None]
    assert len(set(named)) == len(named)
    for side in (comparison.rows, comparison.less):
        assert all(row.source is not None for row in side[:-1])
    # What differs is no more than all, and no less than the totals do.
    assert (
        abs(comparison.extra_bytes)
        <= comparison.different_bytes
        <= ours.wire_bytes + theirs.wire_bytes
    )
    # A row holds no more than there is at its line, on its own side.
    for row in rows:
        if row.source is not None:
            elements = dict(row.found if row.extra_bytes > 0 else row.expected).values()
            limit = sum(elements)
            assert abs(row.extra_bytes) <= limit
    # What is the same along the same axes, at whatever line, is no difference.
    ours_by = ours.by("axes")
    theirs_by = theirs.by("axes")
    apart = sum(abs(ours_by.get(axes, 0) - theirs_by.get(axes, 0)) for axes in AXES)
    assert comparison.different_bytes <= apart
    same = compare(ours, ours)
    assert same.different_bytes == 0
    assert same.rows == same.less == ()
    assert turned.extra_bytes == -comparison.extra_bytes


def test_the_same_traffic():
    comparison = compared([row("all-gather", 10)], [row("all-gather", 10)])
    assert (
        str(comparison)
        == "10.0 KiB are sent to each device in a step; 10.0 KiB were estimated, 1.00"
        " times as much."
    )
    assert (
        str(compared([], []))
        == "0 B are sent to each device in a step; 0 B were estimated."
    )


def test_a_compiled_program_is_read_and_is_its_estimate():
    mesh = MeshSpec({"data": 8}).build(jax.devices())
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((16, 64, 128), jnp.float32, sharding=rows)

    def best(x):
        return jax.lax.top_k(x, 2)[0]

    compiled = jax.jit(best).lower(x).compile()
    same = compare(estimate(best, x, compiler="cpu"), compiled)
    assert same.rows == ()
    assert same.extra_bytes == 0
    assert traffic(compiled).wire_bytes > 0
    estimated = estimate(lambda x: x[..., :2], x, compiler="cpu")
    nothing = compare(estimated, compiled)
    assert nothing.rows[0].why == "nothing was estimated here"
    assert nothing.extra_bytes == traffic(compiled).wire_bytes
