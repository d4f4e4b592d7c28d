"""The origins of mesh axes, against a second propagation of the step without the
origin's sharding.
"""

import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from shardfx._step import step_of
from shardfx.cost import compile_for, estimate, fit, shardings
from shardfx.errors import UnknownPathError
from shardfx.testing import assert_same_shardings_text, shardings_text


MESH = AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
SIZES, WHOLE = (8, 16), P()
MARKS = {
    f"test_shardings.py:{at}": text.partition("  # ")[2]
    for at, text in enumerate(Path(__file__).read_text().splitlines(), 1)
}
LINES = {mark: place for place, mark in MARKS.items()}


def struct(shape, spec=WHOLE):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, spec))


def random_spec(draw, rank):
    axes = draw.sample(["a", "b"], draw.randint(0, 2))
    dims = [None] * rank
    for axis in axes:
        dims[draw.randrange(rank)] = axis
    return P(*dims)


def a_program(seed):
    """A function from specs to a random step, the shapes of the step's arguments, and
    random specs.

    The specs are for the arguments and for two constrained arrays.
    """
    draw = random.Random(seed)
    cuts = {name: random_spec(draw, 2) for name in ("x0", "x1", "x2", "c0", "c1")}
    for name in ("c0", "c1"):
        if draw.random() < 0.5:
            cuts[name] = P()
    choices = [draw.randrange(6) for _ in range(8)]
    order = [draw.randrange(10**6) for _ in range(16)]

    def step(cuts):
        def run(x0, x1, x2):
            arrays, picks = [x0, x1, x2], iter(order)
            for at, choice in enumerate(choices):
                x, y = (arrays[next(picks) % len(arrays)] for _ in range(2))
                if choice < 2:
                    y = (
                        y
                        if x.shape[1] == y.shape[0]
                        else (y.T if x.shape[1] == y.shape[1] else x.T)
                    )
                    made = x @ y
                elif choice == 2:
                    made = jnp.tanh(x)
                elif choice == 3:
                    made = x.T
                elif choice == 4:
                    made = x - jnp.max(x, axis=1, keepdims=True)
                else:
                    made = x + y if x.shape == y.shape else x * 2
                if at == 3 and any(cuts["c0"]):
                    made = jax.lax.with_sharding_constraint(  # c0
                        made, NamedSharding(MESH, cuts["c0"])
                    )
                if at == 6 and any(cuts["c1"]):
                    made = jax.lax.with_sharding_constraint(  # c1
                        made, NamedSharding(MESH, cuts["c1"])
                    )
                arrays.append(made)
            return arrays[3:]

        return run

    shapes = [(draw.choice(SIZES), draw.choice(SIZES)) for _ in range(3)]
    return step, shapes, cuts


def laid(step, shapes, cuts):
    """The rows of a step's arrays in the order of the program."""
    args = [struct(shape, cuts[f"x{at}"]) for at, shape in enumerate(shapes)]
    return sorted(
        shardings(step(cuts), *args, compiler="cpu").rows, key=lambda row: row.number
    )


def named(by):
    """The key in `cuts` of the argument or constraint that an origin names."""
    return MARKS[by.split()[3]] if by.startswith("the constraint at") else by


@pytest.mark.parametrize("seed", range(12))
def test_an_axis_is_there_as_long_as_its_origin_is(seed):
    """An array loses a mesh axis if the sharding of the axis's origin is removed and
    other shardings stay.
    """
    step, shapes, cuts = a_program(seed)
    rows = laid(step, shapes, cuts)
    for origin in sorted({named(one.by) for row in rows for one in row.origins}):
        alone = laid(
            step,
            shapes,
            {name: spec if name == origin else P() for name, spec in cuts.items()},
        )
        without = laid(
            step,
            shapes,
            {name: P() if name == origin else spec for name, spec in cuts.items()},
        )
        for row, only, others in zip(rows, alone, without, strict=True):
            assert (
                (row.operation, row.shape)
                == (only.operation, only.shape)
                == (others.operation, others.shape)
            )
            for one in row.origins:
                if named(one.by) == origin:
                    assert one.axis in axes_of(only) or one.axis not in axes_of(
                        others
                    ), (seed, row, only, others)


def axes_of(row):
    return {
        axis
        for entry in row.spec
        if entry
        for axis in ((entry,) if isinstance(entry, str) else entry)
    }


def decoder(constrained, batch_axis="fsdp", batch=16):
    """A decoder under FSDP: one mesh axis shards the parameters and the batch."""
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    width, hidden = 64, 256

    def cut(shape, *spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, P(*spec))
        )

    params = {
        "embed": cut((512, width), "fsdp"),
        "up": cut((3, width, hidden), None, "fsdp"),
        "down": cut((3, hidden, width), None, None, "fsdp"),
    }

    def block(x, layer):
        x = x + jax.nn.silu(x @ layer["up"]) @ layer["down"]  # block
        if constrained:
            x = jax.lax.with_sharding_constraint(  # constraint
                x, NamedSharding(mesh, P("fsdp"))
            )
        return x, None

    def step(params, tokens):
        def loss(params):
            layers = {name: params[name] for name in ("up", "down")}
            x, _ = jax.lax.scan(block, params["embed"][tokens], layers)  # scan
            return jnp.mean((x @ params["embed"].T) ** 2)  # loss

        return jax.tree.map(lambda a, b: a - b, params, jax.grad(loss)(params))

    return step, params, cut((batch, 32), batch_axis, dtype=jnp.int32)


def test_a_lost_batch_is_mended_by_the_told_constraint():
    found = shardings(*decoder(constrained=False))
    worst = found.replicated().rows[0]
    assert worst.shape == (3, 16, 32, 256) and not worst.origins
    (missed,) = found.missed_axes(worst)
    assert (missed.by, missed.first, missed.shape) == (
        "tokens",
        "params/down",
        (16, 32, 64),
    )
    assert missed.spec == P("fsdp", None, None) and missed.line is not None
    assert missed.line.place == LINES["block"]
    assert "jax.P('fsdp', None, None)" in str(found.at(LINES["block"]))
    mended = shardings(*decoder(constrained=True))
    again = next(row for row in mended.rows if row.shape == worst.shape)
    assert again.bytes_per_device * 8 == worst.bytes_per_device
    (origin,) = again.origins
    assert origin.by.startswith(f"the constraint at {LINES['constraint']}")
    assert (
        estimate(*decoder(constrained=True)).wire_bytes
        < estimate(*decoder(constrained=False)).wire_bytes
    )


def test_shardings_have_rows_of_parameters_and_lines():
    step, *args = decoder(constrained=False)
    found = shardings(step, *args)
    shaped = found.of("params/down").rows
    assert shaped and all(
        any(one.by == "params/down" for one in row.origins) for row in shaped
    )
    assert any(one.chain for row in shaped for one in row.origins)
    of_block = found.at(LINES["block"]).rows
    assert {row.source and row.source.place for row in of_block} == {LINES["block"]}
    assert {row.loop and row.loop.place for row in of_block} == {LINES["scan"]}
    assert {
        row.loop
        for row in found.rows
        if row.source and row.source.place == LINES["loss"]
    } == {None}
    with pytest.raises(
        UnknownPathError, match="no array of the step is made at 'x.py:1'"
    ):
        found.at("x.py:1")
    with pytest.raises(UnknownPathError, match="did you mean 'params/down'"):
        found.of("params/dwon")
    sent = found.annotate(estimate(step, *args))
    summed = next(
        row for row in sent.rows if row.source and row.source.place == LINES["block"]
    )
    assert "summed over fsdp" in summed.note and "from params/down" in summed.note
    assert any("are sharded over it" in one for one in found.conflicts)
    rows = json.loads(found.to_json())
    assert (
        len(rows) == len(found.rows)
        and rows[0]["bytes_per_device"] == found.rows[0].bytes_per_device
    )
    assert len(str(found).splitlines()) <= 40 and "<pre>" in found._repr_html_()


def test_shard_maps_keep_their_specs_and_results_are_origins():
    def step(x):
        x = jax.shard_map(
            lambda x: (x * 2, x.sum(1)),
            mesh=MESH,
            in_specs=P("a", None),
            out_specs=(P("a"), P("a")),
        )(x)
        return jnp.tanh(x[0]) + x[1][:, None], jnp.exp(x[0]).T

    out = (None, NamedSharding(MESH, P("b", None)))
    found = shardings(jax.jit(step, out_shardings=out), struct((8, 16)), compiler="cpu")
    by = {
        row.operation: {one.axis: one.by for one in row.origins} for row in found.rows
    }
    assert by["tanh"]["a"].startswith("the constraint at test_shardings.py")
    assert "result 1" in {one.by for row in found.rows for one in row.origins}
    assert "multiply" not in by and "inside a `shard_map`" in str(found)


def test_layouts_are_those_that_xla_chooses():
    step, *args = decoder(constrained=False)
    products = [
        row
        for row in shardings(step, *args, compiler="cpu").rows
        if row.operation.startswith("dot")
    ]
    text = step_of(step, args).partitioned("cpu")
    for row in products:
        cuts = [8 if entry else 1 for entry in (*row.spec, *[None] * 4)]
        part = ",".join(
            str(size // cut) for size, cut in zip(row.shape, cuts, strict=False)
        )
        assert f"f32[{part}]" in text, row
    assert "0 arrays of 0 lines" in str(
        shardings(lambda x: x, struct((8, 8)), compiler="cpu")
    )


def test_the_peak_of_a_step_says_why_arrays_are_replicated():
    found = fit(*decoder(constrained=False), chip="v5e")
    whole = next(one for one in found.peak_arrays if one.what == "f32[3,16,32,256]")
    assert (
        whole.spec == P()
        and "tokens has it there, and params/down took it first" in whole.why
    )
    assert whole.why in found.explain() and found.shardings is not None
    table = next(one for one in found.peak_arrays if one.what == "params/down")
    assert table.spec == P(None, None, "fsdp") and table.origins[0].by == "params/down"
    mended = fit(*decoder(constrained=True), chip="v5e")
    assert not [one for one in mended.peak_arrays if one.bytes > 2**17 and one.why]


def test_a_missing_constraint_is_told_with_its_savings():
    def trained(**how):
        step, params, tokens = decoder(**how, batch=64)
        return (
            jax.jit(step, out_shardings=jax.tree.map(lambda one: one.sharding, params)),
            params,
            tokens,
        )

    def told(found):
        return [
            one
            for one in found.changes
            if one.what.startswith("constrain the activations")
        ]

    args, mended = trained(constrained=False), trained(constrained=True)
    before, after = (fit(*one, chip="h100") for one in (args, mended))
    (change,) = told(before)
    words = (
        "constrain(x, jax.P('fsdp', None, None), plan) for the f32[64,32,64] of"
        " test_shardings"
    )
    assert change.how.startswith(words) and [one.place for one in change.sources] == [
        LINES["block"]
    ]
    assert (
        change.peak_bytes == pytest.approx(after.peak_bytes, rel=0.05)
        and after.peak_bytes < 0.6 * before.peak_bytes
    )
    for claim, one in ((before.peak_bytes, args), (change.peak_bytes, mended)):
        assert claim == pytest.approx(
            compile_for(*one, target="cpu").memory.needed_bytes, rel=0.2
        )
    assert not told(after) and not told(
        fit(*trained(constrained=False, batch_axis=None), chip="h100")
    )


def test_a_golden_text_of_layouts_changes_with_them_alone(tmp_path):
    before, after = (shardings(*decoder(constrained=on)) for on in (False, True))
    golden = tmp_path / "layouts.txt"
    assert_same_shardings_text(before, golden, update=True)
    assert_same_shardings_text(before, golden)
    with pytest.raises(
        AssertionError, match=r"\+    f32\[16,32,256\] fsdp,-,- \(fsdp: the con"
    ):
        assert_same_shardings_text(after, golden)
    assert f":{LINES['block'].partition(':')[2]}" not in shardings_text(before)


def test_an_array_that_a_constraint_made_lie_so_names_it():
    """Shardy moves a constraint to the operation that computes the array, here a
    `jax.checkpoint`.
    """

    def constrained(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("a", "b")))

    def step(ws, x):
        def loss(ws):
            y = constrained(jnp.cos(x))
            for w in ws:
                y = constrained(
                    jax.checkpoint(lambda y, w: y + jnp.sin(constrained(y @ w)))(y, w)
                )
            return jnp.sum(y**2)

        return jax.grad(loss)(ws)

    found = shardings(
        step, [struct((16, 16), P("b", "a"))] * 2, struct((8, 16), P("a"))
    )
    givers = {
        one.first or one.by for row in found.rows for one in found.missed_axes(row)
    }
    assert any("the constraint at test_shardings.py" in one for one in givers)


def test_a_negated_mean_has_the_rows_of_its_sum():
    """A loss ends in operations of scalars and constants, as this one does."""

    def scores(table, w, tokens):
        return jax.nn.log_softmax(jnp.tanh(table[tokens] @ w) @ table.T)

    def total(table, w, tokens):
        return jnp.take_along_axis(scores(table, w, tokens), tokens[:, None], -1).sum()

    def loss(table, w, tokens):
        return -(total(table, w, tokens) / 32)

    tokens = jax.ShapeDtypeStruct(
        (32,), jnp.int32, sharding=NamedSharding(MESH, P("a"))
    )
    args = struct((64, 16), P("b")), struct((16, 16)), tokens
    expected = shardings(total, *args, compiler="cpu").rows
    rows = shardings(loss, *args, compiler="cpu").rows
    assert "dot" in {row.operation for row in rows}
    assert [(row.shape, row.spec, row.operation) for row in rows] == [
        (row.shape, row.spec, row.operation) for row in expected
    ]
