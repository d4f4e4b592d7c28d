"""Steps that call one function several times: each call is matched with its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from judging import proved_programs, verdict_of

import shardfx as sfx


MESH = sfx.MeshSpec({"data": 4, "tensor": 2})


def struct(shape, *spec):
    sharding = NamedSharding(MESH.abstract(), P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def recurrent(w, x, reverse=False):
    def cell(hidden, row):
        hidden = jnp.tanh(hidden @ w + row)
        return hidden, hidden

    def scanned(sequence):
        start = jnp.zeros(sequence.shape[-1])
        return lax.scan(cell, start, sequence, reverse=reverse)[1]

    return jax.vmap(scanned)(x)


def two_scans(w, x):
    return recurrent(w, recurrent(w, x))


def three_scans(w, x):
    for _ in range(3):
        x = recurrent(w, x)
    return x


def scans_of_two_lengths(w, x):
    x = recurrent(w, x)
    return recurrent(w, x[:, :8])


def both_directions(w, x):
    for _ in range(2):
        x = recurrent(w, recurrent(w, x, reverse=True))
    return x


def rematerialized_scans(w, x):
    layer = jax.checkpoint(recurrent)
    return layer(w, layer(w, x))


def rematerialized_twice(w, x):
    layer = jax.checkpoint(lambda w, x: x + jnp.tanh(x @ w))
    return jax.checkpoint(lambda w, x: layer(w, layer(w, x)))(w, x)


def one_compiled_layer(w, x):
    layer = jax.jit(recurrent)
    return layer(w, layer(w, x))


def scans_in_scans(w, x):
    def outer(x, _):
        return recurrent(w, x), None

    for _ in range(2):
        x = lax.scan(outer, x, None, length=3)[0]
    return x


def maps(w, x):
    for _ in range(2):
        x = lax.map(lambda rows: jnp.sin(rows) @ w, x)
    return x


def two_bodies(w, x):
    """Two loops with one name that start with the same arrays."""
    total = 0
    for function in (jnp.sin, jnp.cos):

        def cell(hidden, row, function=function):
            return function(hidden @ w + row), None

        start = jnp.zeros((x.shape[0], x.shape[-1]))
        total += lax.scan(cell, start, jnp.swapaxes(x, 0, 1))[0]
    return total


@jax.custom_vjp
def custom(w, x):
    return jnp.tanh(x @ w)


def custom_forward(w, x):
    return custom(w, x), (w, x)


def custom_backward(residuals, cotangent):
    w, x = residuals
    cotangent = cotangent * (1 - jnp.tanh(x @ w) ** 2)
    return jnp.einsum("bti,btj->ij", x, cotangent), cotangent @ w.T


custom.defvjp(custom_forward, custom_backward)


def one_custom_gradient(w, x):
    return custom(w, custom(w, x))


STEPS = [
    two_scans,
    three_scans,
    scans_of_two_lengths,
    both_directions,
    rematerialized_scans,
    rematerialized_twice,
    one_compiled_layer,
    scans_in_scans,
    maps,
    two_bodies,
    one_custom_gradient,
]
LAYOUTS = {"data": (), "tensor": (None, "tensor"), "both": ("data", "tensor")}


def gradient(step):
    return jax.grad(lambda w, x: jnp.sum(step(w, x) ** 2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", STEPS)
def test_steps_that_repeat_a_call_are_proved(step, layout):
    w = struct((32, 32), *LAYOUTS[layout])
    x = struct((8, 16, 32), "data")
    for function in (step, gradient(step)):
        verdict = sfx.testing.verify(function, w, x)
        assert verdict.outcome == "proved", verdict


def test_steps_that_repeat_a_scan_compute_the_same_on_devices():
    mesh = MESH.build(jax.devices()[:8])
    w = np.linspace(-0.1, 0.1, 32 * 32, dtype=np.float32).reshape(32, 32)
    x = np.sin(np.arange(8 * 16 * 32, dtype=np.float32)).reshape(8, 16, 32)
    for step in (two_scans, scans_of_two_lengths, two_bodies):
        placed = (
            jax.device_put(w, NamedSharding(mesh, P(None, "tensor"))),
            jax.device_put(x, NamedSharding(mesh, P("data"))),
        )
        np.testing.assert_allclose(
            jax.jit(step)(*placed), jax.jit(step)(w, x), rtol=2e-4, atol=2e-5
        )


@pytest.fixture(scope="module")
def programs():
    args = (struct((32, 32), None, "tensor"), struct((8, 16, 32), "data"))
    return proved_programs(two_scans, args)


def changed_in_body(text, number, before, after):
    """The text with one change in the body of the loop `number`."""
    bodies = re.findall(r" while\(.*body=(%[\w.\-]+)", text)
    header = re.search(rf"^{re.escape(bodies[number])} \(", text, re.M)
    assert header is not None
    start = header.start()
    end = text.index("\n}", start)
    body, count = re.subn(before, after, text[start:end], count=1)
    assert count == 1, text[start:end]
    return text[:start] + body + text[end:]


EXCHANGED = "{{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}"


def test_a_loop_with_another_condition_has_a_reason(programs):
    text = programs.partitioned.replace("direction=LT", "direction=LE")
    reasons = [cause.reason for cause in verdict_of(programs, text).unjudged]
    assert "a loop whose turns change how its values lie" in reasons


@pytest.mark.parametrize("loop", [0, 1])
@pytest.mark.parametrize(
    "before, after, outcome",
    [
        (r" tanh\(", " sine(", "not judged"),
        (r"constant\(1\)", "constant(2)", "not judged"),
        (
            r"(all-gather\(.*?replica_groups=).*?, dimensions",
            r"\1{{1,0},{3,2},{5,4},{7,6}}, dimensions",
            "not judged",
        ),
        # Rows of other devices.
        (
            r"( +)(%\S+ = (f32\[2,16\]\S*) add\(%\S+, )(%[\w.]+)\)",
            r"\1%other = \3 collective-permute(\4), channel_id=99,"
            rf" source_target_pairs={EXCHANGED}\n\1\2%other)",
            "refuted",
        ),
    ],
)
def test_a_change_in_either_loop_is_not_proved(programs, loop, before, after, outcome):
    text = changed_in_body(programs.partitioned, loop, before, after)
    verdict = verdict_of(programs, text)
    assert verdict.outcome == outcome, verdict
    if outcome == "refuted":
        assert "recurrent" in str(verdict.refutations[0])


def test_a_loop_that_reads_the_array_of_another_is_not_proved(programs):
    text = programs.partitioned
    tuples = re.findall(r" while\((%[\w.\-]+)\)", text)
    rows = []
    arrays = []
    for name in tuples:
        (row,) = re.findall(rf"{re.escape(name)} = .* tuple\(.*", text)
        rows.append(row)
        operands = row.partition(" tuple(")[2].partition(")")[0]
        arrays.append(operands.rpartition(", ")[2])
    row = rows[1]
    swapped = row.replace(arrays[1], arrays[0])
    assert swapped != row
    verdict = verdict_of(programs, text.replace(row, swapped))
    assert verdict.outcome != "proved"
