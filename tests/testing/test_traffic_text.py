"""The golden text of a step's collectives, and what must not be among them."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx.testing import assert_collectives, assert_same_traffic_text, traffic_text


def loss(weights, x):
    for layer in weights["layers"]:
        x = jnp.tanh(x @ layer["up"])
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def traffic():
    mesh = sfx.MeshSpec({"data": 8}).abstract()
    sharding = NamedSharding(mesh, P("data"))
    up = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=sharding)
    x = jax.ShapeDtypeStruct(
        (64, 16), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )
    step = jax.jit(jax.grad(loss), out_shardings=NamedSharding(mesh, P("data")))
    return sfx.cost.estimate(step, {"layers": [{"up": up}] * 2}, x)


EXPECTED = """\
# shardfx traffic text 1
8 devices

all-gather over data: 2 x f32[16,16], layers/{0..1}/up, LINE
all-reduce over data: 2 x backward f32[16,16], LINE
""".replace("LINE", 'test_traffic_text.py loss: x = jnp.tanh(x @ layer["up"])')


def test_the_text_joins_what_is_alike_and_quotes_the_lines(traffic):
    for order in (1, -1):
        replaced = dataclasses.replace(traffic, rows=traffic.rows[::order])
        actual = traffic_text(replaced)
        assert actual == EXPECTED
    text = traffic_text(traffic, sizes=True)
    assert "8 devices, 5.2 KiB enter each\n" in text
    assert 'up"]), 1.8 KiB\n' in text
    rows = [
        dataclasses.replace(
            row, source=row.source and row.source._replace(file="gone.py")
        )
        for row in traffic.rows
    ]
    gone = traffic_text(dataclasses.replace(traffic, rows=tuple(rows)))
    assert f"gone.py:{traffic.rows[0].source.line} loss" in gone


def test_a_golden_file_is_written_and_compared(traffic, tmp_path):
    golden = tmp_path / "traffic.txt"
    with pytest.raises(
        AssertionError, match=r"there is no file .* with the text of a traffic yet"
    ):
        assert_same_traffic_text(traffic, golden)
    assert_same_traffic_text(traffic, golden, update=True)
    assert_same_traffic_text(traffic, golden)
    rows = (*traffic.rows, dataclasses.replace(traffic.rows[0], kind="all-to-all"))
    replaced = dataclasses.replace(
        traffic,
        rows=rows,
    )
    with pytest.raises(AssertionError) as error:
        assert_same_traffic_text(replaced, golden)
    message = str(error.value)
    assert "+all-to-all over data: 1 x" in message
    assert (
        f"run `assert_same_traffic_text(traffic, {str(golden)!r}, update=True)`"
        in message
    )


@pytest.mark.parametrize(
    ("pattern", "is_there"),
    [
        ("all-gather", True),
        ("forward all-gather over data of layers/./up at loss", True),
        ("any at test_traffic_text.py", True),
        ("backward all-gather", False),
        ("all-to-all over data", False),
        ("all-gather of down", False),
        ("any at other.py", False),
    ],
)
def test_a_pattern_finds_kind_axes_leaf_pass_and_place(traffic, pattern, is_there):
    finds = pytest.raises(AssertionError, match=f"that it must not have.\n`{pattern}`")
    with finds if is_there else contextlib.nullcontext():
        assert_collectives(traffic, none=[pattern])


def test_bytes_sum_by_the_pass(traffic):
    expected = {"forward": 0, "backward": 0}
    for row in traffic.rows:
        expected[row.phase] += row.wire_bytes
    assert traffic.by("phase") == expected
    assert all(expected.values())


def test_limits_are_calls_or_bytes(traffic):
    assert_collectives(traffic, at_most={"all-gather": 2, "any": "5.5 KiB"})
    with pytest.raises(AssertionError, match="2 calls, more than 1"):
        assert_collectives(traffic, at_most={"all-gather": 1})
    with pytest.raises(AssertionError, match=r"5.2 KiB, more than 3 KiB"):
        assert_collectives(traffic, at_most={"any": "3 KiB"})
    replaced = dataclasses.replace(traffic.rows[0], calls=None)
    rows = (replaced,)
    unknown = dataclasses.replace(traffic, rows=rows)
    with pytest.raises(
        AssertionError, match="in a loop whose turns are not known, more than 9 may be"
    ):
        assert_collectives(unknown, at_most={"all-reduce": 9})


def test_a_pattern_that_cannot_find_anything_is_an_error(traffic):
    with pytest.raises(ValueError, match="no pattern of collectives"):
        assert_collectives(traffic, none=["allgather"])
    with pytest.raises(
        ValueError,
        match=r"names the axis 'date', and the mesh has data \(did you mean 'data'\?\)"
        r"\. No .* leave the pattern out, or write one",
    ):
        assert_collectives(traffic, none=["any over date"])
    without_mesh = dataclasses.replace(traffic, axes=())
    with pytest.raises(ValueError, match=r"not known; write `traffic\(compiled, mesh"):
        assert_collectives(without_mesh, none=["any over data"])
    for limit in ("3 bytes", "1.2.3 MiB", ", KiB"):
        with pytest.raises(ValueError, match="is no number of bytes"):
            assert_collectives(traffic, at_most={"any": limit})
    with pytest.raises(ValueError, match="is no regex: unterminated character set"):
        assert_collectives(traffic, none=["any of layers/["])


@pytest.mark.parametrize("pattern", ["allgather", "any over tensor", "any of ["])
def test_a_wrong_pattern_is_an_error_without_collectives(traffic, pattern):
    empty = dataclasses.replace(traffic, rows=())
    with pytest.raises(ValueError, match="`any|`allgather"):
        assert_collectives(empty, none=[pattern])


def test_a_limit_may_have_commas_and_no_whole_part(traffic):
    assert_collectives(traffic, at_most={"any": "5,500 B"})
    assert_collectives(traffic, at_most={"any": "6. KiB"})
    with pytest.raises(AssertionError, match=r"5.2 KiB, more than .5 KiB"):
        assert_collectives(traffic, at_most={"any": ".5 KiB"})
