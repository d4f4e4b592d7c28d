"""The origins of mesh axes, against a second propagation of the step without the
origin's sharding.
"""

import itertools
import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from shardfx.cost import compile_for, estimate, fit, shardings
from shardfx.errors import UnknownPathError
from shardfx.testing import assert_same_shardings_text, shardings_text


MESH = AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
SIZES = (8, 16)
WHOLE = P()
MARKS = {
    f"test_shardings.py:{number}": text.partition("  # ")[2]
    for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
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
    cases = ("x0", "x1", "x2", "c0", "c1")
    cuts = {name: random_spec(draw, 2) for name in cases}
    for name in ("c0", "c1"):
        if draw.random() < 0.5:
            cuts[name] = P()
    choices = [draw.randrange(6) for _ in range(8)]
    order = [draw.randrange(10**6) for _ in range(16)]

    def step(cuts):
        def run(x0, x1, x2):
            arrays = [x0, x1, x2]
            picks = iter(order)
            for position, choice in enumerate(choices):
                x = arrays[next(picks) % len(arrays)]
                y = arrays[next(picks) % len(arrays)]
                if choice < 2:
                    if x.shape[1] == y.shape[0]:
                        y = y
                    elif x.shape[1] == y.shape[1]:
                        y = y.T
                    else:
                        y = x.T
                    result = x @ y
                elif choice == 2:
                    result = jnp.tanh(x)
                elif choice == 3:
                    result = x.T
                elif choice == 4:
                    result = x - jnp.max(x, axis=1, keepdims=True)
                else:
                    if x.shape == y.shape:
                        result = x + y
                    else:
                        result = x * 2
                if position == 3 and any(cuts["c0"]):
                    result = jax.lax.with_sharding_constraint(  # c0
                        result, NamedSharding(MESH, cuts["c0"])
                    )
                if position == 6 and any(cuts["c1"]):
                    result = jax.lax.with_sharding_constraint(  # c1
                        result, NamedSharding(MESH, cuts["c1"])
                    )
                arrays.append(result)
            return arrays[3:]

        return run

    shapes = [(draw.choice(SIZES), draw.choice(SIZES)) for _ in range(3)]
    return step, shapes, cuts


def laid(step, shapes, cuts):
    """The rows of a step's arrays in the order of the program."""
    args = [struct(shape, cuts[f"x{number}"]) for number, shape in enumerate(shapes)]
    rows = shardings(step(cuts), *args, compiler="cpu").rows
    return sorted(rows, key=lambda row: row.number)


def named(by):
    """The key in `cuts` of the argument or constraint that an origin names."""
    if by.startswith("the constraint at"):
        return MARKS[by.split()[3]]
    return by


@pytest.mark.parametrize("seed", range(12))
def test_an_axis_is_there_as_long_as_its_origin_is(seed):
    """An array loses a mesh axis if the sharding of the axis's origin is removed and
    other shardings stay.
    """
    step, shapes, cuts = a_program(seed)
    rows = laid(step, shapes, cuts)
    origins = itertools.chain.from_iterable(row.origins for row in rows)
    for origin in sorted({named(origin.by) for origin in origins}):
        none = dict.fromkeys(cuts, P())
        only_cut = {name: cuts[name] for name in cuts if name == origin}
        alone = laid(step, shapes, none | only_cut)
        without = laid(step, shapes, cuts | dict.fromkeys(only_cut, P()))
        for row, only, others in zip(rows, alone, without, strict=True):
            expected = (only.operation, only.shape)
            assert (
                (row.operation, row.shape)
                == expected
                == (others.operation, others.shape)
            )
            for cause in row.origins:
                if named(cause.by) == origin:
                    assert cause.axis in axes_of(only) or cause.axis not in axes_of(
                        others
                    ), (seed, row, only, others)


def axes_of(row):
    axes = set()
    for entry in row.spec:
        if isinstance(entry, str):
            axes.add(entry)
        elif entry:
            axes.update(entry)
    return axes


def decoder(constrained, batch_axis="fsdp", batch=16):
    """A decoder under FSDP: one mesh axis shards the parameters and the batch."""
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    width = 64
    hidden = 256

    def cut(shape, *spec, dtype=jnp.float32):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

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


def test_a_part_of_an_axis_replicates_over_the_others():
    def split(x):
        return jnp.reshape(x, (2, 8)) * 2

    table = shardings(split, struct((16,), P("b")))
    (row,) = [row for row in table.rows if row.operation == "reshape"]
    axes = [origin.axis for origin in row.origins]
    assert axes == ["b:(1)2", "b:(2)2"]
    assert row in table.replicated().rows


def test_a_lost_batch_is_mended_by_the_told_constraint():
    table = shardings(*decoder(constrained=False))
    worst = table.replicated().rows[0]
    assert worst.shape == (3, 16, 32, 256)
    assert not worst.origins
    (missed,) = table.missed_axes(worst)
    assert missed.by == "tokens"
    assert missed.first == "params/down"
    assert missed.shape == (16, 32, 64)
    assert missed.spec == P("fsdp", None, None)
    assert missed.line is not None
    assert missed.line.place == LINES["block"]
    assert "constrain(x, P('fsdp', None, None)" in str(table.at(LINES["block"]))
    mended = shardings(*decoder(constrained=True))
    again = next(row for row in mended.rows if row.shape == worst.shape)
    assert again.bytes_per_device * 8 == worst.bytes_per_device
    (origin,) = again.origins
    assert origin.by.startswith(f"the constraint at {LINES['constraint']}")
    wire_bytes = estimate(*decoder(constrained=True)).wire_bytes
    assert wire_bytes < estimate(*decoder(constrained=False)).wire_bytes


def test_shardings_have_rows_of_parameters_and_lines():
    step, *args = decoder(constrained=False)
    table = shardings(step, *args)
    shaped = table.of("params/down").rows
    assert shaped
    for row in shaped:
        assert any(origin.by == "params/down" for origin in row.origins)
    origins = itertools.chain.from_iterable(row.origins for row in shaped)
    assert any(origin.chain for origin in origins)
    of_block = table.at(LINES["block"]).rows
    actual = {row.source and row.source.place for row in of_block}
    assert actual == {LINES["block"]}
    actual = {row.loop and row.loop.place for row in of_block}
    assert actual == {LINES["scan"]}
    loops = {row.loop for row in table.at(LINES["loss"]).rows}
    assert loops == {None}
    with pytest.raises(
        UnknownPathError, match="no array of the step is made at 'x.py:1'"
    ):
        table.at("x.py:1")
    with pytest.raises(UnknownPathError, match="did you mean 'params/down'"):
        table.of("params/dwon")
    sent = table.annotate(estimate(step, *args))
    summed = None
    for row in sent.rows:
        if summed is None and row.source and row.source.place == LINES["block"]:
            summed = row
    assert summed is not None
    assert "summed over fsdp" in summed.note
    assert "from params/down" in summed.note
    assert any("are sharded over it" in conflict for conflict in table.conflicts)
    rows = json.loads(table.to_json())
    assert len(rows) == len(table.rows)
    assert rows[0]["bytes_per_device"] == table.rows[0].bytes_per_device
    assert len(str(table).splitlines()) <= 40
    assert "<pre>" in table._repr_html_()


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="Shardy of JAX 0.9 aborts at this program",
)
def test_shard_maps_keep_their_specs_and_results_are_origins():
    def step(x):
        out_specs = (P("a"), P("a"))
        x = jax.shard_map(
            lambda x: (x * 2, x.sum(1)),
            mesh=MESH,
            in_specs=P("a", None),
            out_specs=out_specs,
        )(x)
        return jnp.tanh(x[0]) + x[1][:, None], jnp.exp(x[0]).T

    out = (None, NamedSharding(MESH, P("b", None)))
    table = shardings(jax.jit(step, out_shardings=out), struct((8, 16)), compiler="cpu")
    origins_by_operation = {row.operation: row.origins for row in table.rows}
    (origin,) = [
        origin for origin in origins_by_operation["tanh"] if origin.axis == "a"
    ]
    assert origin.by.startswith("the constraint at test_shardings.py")
    origins = itertools.chain.from_iterable(row.origins for row in table.rows)
    assert "result 1" in {origin.by for origin in origins}
    assert "multiply" not in origins_by_operation
    assert "inside a `shard_map`" in str(table)


def test_a_function_may_be_named_after_shard_map():
    def my_shard_map_step(x):
        return jnp.tanh(x)

    (row,) = shardings(jax.jit(my_shard_map_step), struct((8, 16)), compiler="cpu").rows
    assert row.operation == "tanh"


def test_layouts_are_those_that_xla_chooses():
    step, *args = decoder(constrained=False)
    rows = shardings(step, *args, compiler="cpu").rows
    products = [row for row in rows if row.operation.startswith("dot")]
    text = compile_for(step, *args, target="cpu").as_text()
    for row in products:
        shard_shape = list(row.shape)
        for dim, entry in enumerate(row.spec):
            if entry:
                shard_shape[dim] //= 8
        part = ",".join(map(str, shard_shape))
        assert f"f32[{part}]" in text, row
    allowed = str(shardings(lambda x: x, struct((8, 8)), compiler="cpu"))
    assert "0 arrays of 0 lines" in allowed


def test_the_peak_of_a_step_says_why_arrays_are_replicated():
    fitted = fit(*decoder(constrained=False), chip="h100")
    whole = next(
        array for array in fitted.peak_arrays if array.what == "f32[3,16,32,256]"
    )
    assert whole.spec == P()
    assert "tokens has it there, and params/down took it first" in whole.why
    assert whole.why in fitted.explain()
    assert fitted.shardings is not None
    table = next(array for array in fitted.peak_arrays if array.what == "params/down")
    assert table.spec == P(None, None, "fsdp")
    assert table.origins[0].by == "params/down"
    mended = fit(*decoder(constrained=True), chip="h100")
    assert not [
        array for array in mended.peak_arrays if array.bytes > 2**17 and array.why
    ]


def test_a_missing_constraint_is_told_with_its_savings():
    def trained(**how):
        step, params, tokens = decoder(**how, batch=64)
        out_shardings = jax.tree.map(lambda param: param.sharding, params)
        return (
            jax.jit(step, out_shardings=out_shardings),
            params,
            tokens,
        )

    def constraints(fitted):
        words = "constrain the activations"
        return [change for change in fitted.changes if change.what.startswith(words)]

    args = trained(constrained=False)
    mended = trained(constrained=True)
    before = fit(*args, chip="h100")
    after = fit(*mended, chip="h100")
    (change,) = constraints(before)
    words = (
        "constrain(x, P('fsdp', None, None), plan) for the f32[64,32,64] of"
        " test_shardings"
    )
    assert change.how.startswith(words)
    assert [source.place for source in change.sources] == [LINES["block"]]
    assert change.peak_bytes == pytest.approx(after.peak_bytes, rel=0.05)
    assert after.peak_bytes < 0.6 * before.peak_bytes
    for claim, step_args in ((before.peak_bytes, args), (change.peak_bytes, mended)):
        needed_bytes = compile_for(*step_args, target="cpu").memory.needed_bytes
        expected = pytest.approx(needed_bytes, rel=0.2)
        assert claim == expected
    assert not constraints(after)
    replicated = trained(constrained=False, batch_axis=None)
    assert not constraints(fit(*replicated, chip="h100"))


def test_a_golden_text_of_layouts_changes_with_them_alone(tmp_path):
    before = shardings(*decoder(constrained=False))
    after = shardings(*decoder(constrained=True))
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

    table = shardings(
        step, [struct((16, 16), P("b", "a"))] * 2, struct((8, 16), P("a"))
    )
    givers = set()
    for row in table.rows:
        for missed in table.missed_axes(row):
            givers.add(missed.first or missed.by)
    assert any("the constraint at test_shardings.py" in giver for giver in givers)


def test_a_negated_mean_has_the_rows_of_its_sum():
    """A loss ends in operations of scalars and constants, as this one does."""

    def scores(table, w, tokens):
        return jax.nn.log_softmax(jnp.tanh(table[tokens] @ w) @ table.T)

    def total(table, w, tokens):
        return jnp.take_along_axis(scores(table, w, tokens), tokens[:, None], -1).sum()

    def loss(table, w, tokens):
        return -(total(table, w, tokens) / 32)

    sharding = NamedSharding(MESH, P("a"))
    tokens = jax.ShapeDtypeStruct((32,), jnp.int32, sharding=sharding)
    args = struct((64, 16), P("b")), struct((16, 16)), tokens
    expected = shardings(total, *args, compiler="cpu").rows
    rows = shardings(loss, *args, compiler="cpu").rows
    assert "dot" in {row.operation for row in rows}
    actual = [(row.shape, row.spec, row.operation) for row in rows]
    assert actual == [(row.shape, row.spec, row.operation) for row in expected]
