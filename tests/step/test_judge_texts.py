"""The judge of programs that a compiler made in a run of its own, or finished."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx._step import judged_text
from shardfx.errors import LeafTypeError, MeshError


SIZES = (2, 2, 2)
AXES = ("data", "fsdp", "tensor")
ROWS = P(("data", "fsdp"))


@pytest.fixture(scope="module")
def mesh():
    devices = np.array(jax.devices()[:8]).reshape(SIZES)
    return Mesh(devices, AXES)


def struct(mesh, shape, spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def mlp(x, into, out):
    return x + jax.nn.relu(x @ into) @ out


def block(x, w):
    return x + jnp.tanh(x @ w)


def two_blocks(x, w):
    return block(block(x, w), w)


def arguments(mesh):
    return (
        struct(mesh, (16, 32), ROWS),
        struct(mesh, (32, 64), P("fsdp", "tensor")),
        struct(mesh, (64, 32), P("tensor", "fsdp")),
    )


def finished(step, *args):
    return jax.jit(step).lower(*args).compile()


def test_finished_programs_are_proved_and_refuted(mesh):
    args = arguments(mesh)
    compiled = finished(mlp, *args)
    verdict = sfx.testing.verify(mlp, *args, compiled=compiled)
    assert verdict.outcome == "proved", verdict
    assert verdict.program == "the finished program"
    text = compiled.as_text()
    assert text is not None
    again = sfx.testing.verify(mlp, *args, compiled=text)
    if "sharding=" in text:
        assert again == verdict
    else:
        # JAX 0.12 leaves the shardings of arguments out of the text.
        assert again.outcome == "not judged"
        assert "whose sharding the program does not say" in str(again)

    pair = (args[0], struct(mesh, (32, 32), P("tensor", "fsdp")))
    compiled = finished(two_blocks, *pair)
    verdict = sfx.testing.verify(two_blocks, *pair, compiled=compiled)
    assert verdict.outcome == "refuted"
    source = verdict.refutations[0].source
    assert source is not None
    assert source.function == "block"


def test_a_program_of_another_step_is_never_proved(mesh):
    args = arguments(mesh)
    compiled = finished(lambda x, into, out: mlp(x, into, 2 * out), *args)
    verdict = sfx.testing.verify(mlp, *args, compiled=compiled)
    assert verdict.outcome == "not judged"


def test_arguments_that_lie_otherwise_are_not_judged(mesh):
    args = arguments(mesh)
    other = (struct(mesh, (16, 32), P(("fsdp", "data"))), *args[1:])
    verdict = sfx.testing.verify(mlp, *args, compiled=finished(mlp, *other))
    assert verdict.outcome == "not judged"
    assert "lies otherwise than the step's" in str(verdict)
    without = finished(lambda x, into: jnp.sum(x @ into), *args[:2])
    verdict = sfx.testing.verify(mlp, *args, compiled=without)
    assert verdict.outcome == "not judged"
    assert "the program takes 2 arrays, and the step 3" in str(verdict)


def test_what_is_no_finished_program_of_the_step_is_an_error(mesh):
    args = arguments(mesh)
    with pytest.raises(LeafTypeError, match=r"pass `jax.jit\(step\).lower"):
        sfx.testing.verify(mlp, *args, compiled=mlp)  # type: ignore[arg-type]
    devices = np.array(jax.devices()[:4]).reshape(1, 2, 2)
    four = Mesh(devices, AXES)
    with pytest.raises(MeshError, match="is for 4 devices, and the step's mesh has 8"):
        sfx.testing.verify(mlp, *args, compiled=finished(mlp, *arguments(four)))


WHOLE = """HloModule whole, num_partitions=2

ENTRY %main (x: f32[4,4], y: f32[4,4]) -> f32[4,4] {{
  %x = f32[4,4]{{1,0}} parameter(0), sharding={{devices=[2,1]<=[2]}}
  %y = f32[4,4]{{1,0}} parameter(1), sharding={{devices=[1,2]<=[2]}}
{rest}
}}
"""
PART = """HloModule part, num_partitions=2

ENTRY %main (x: f32[2,4], y: f32[4,2]) -> f32[2,4] {{
  %x = f32[2,4]{{1,0}} parameter(0), sharding={{devices=[2,1]<=[2]}}
  %y = f32[4,2]{{1,0}} parameter(1), sharding={{devices=[1,2]<=[2]}}
{rest}
}}
"""
TURNED = (
    "  %t = f32[4,4]{1,0} transpose(%y), dimensions={1,0}\n"
    "  ROOT %sum = f32[4,4]{1,0} add(%x, %t), sharding={devices=[2,1]<=[2]}"
)


@pytest.mark.parametrize(
    "layout, outcome", [("{0,1}", "proved"), ("{1,0}", "not judged")]
)
def test_a_bitcast_is_read_by_its_layouts(layout, outcome):
    # In memory, `f32[4,2]{1,0}` is `f32[2,4]{0,1}` transposed.
    bitcast = (
        f"  %t = f32[2,4]{layout} bitcast(%y)\n"
        "  ROOT %sum = f32[2,4]{1,0} add(%x, %t)"
    )
    whole = WHOLE.format(rest=TURNED)
    text = PART.format(rest=bitcast)
    assert judged_text(whole, text, "a text").outcome == outcome


def scaled(name, factor):
    return (
        f"  %{name}.c = f32[] constant({factor})\n"
        f"  %{name}.b = f32[{{rows}},4]{{{{1,0}}}} broadcast(%{name}.c), dimensions={{{{}}}}\n"
    )


@pytest.mark.parametrize(
    "factor, outcome",
    [("0.75", "proved"), ("0.5", "not judged"), ("-0.75", "not judged")],
)
def test_constants_may_be_multiplied_by_the_compiler(factor, outcome):
    metadata = ', metadata={{op_name="jit(f)/mul"}}'
    steps = (
        scaled("a", "3")
        + scaled("d", "4")
        + "  %m = f32[{rows},4]{{1,0}} multiply(%x, %a.b)"
        + metadata
        + "\n  ROOT %q = f32[{rows},4]{{1,0}} divide(%m, %d.b)"
        + metadata
        + ", sharding={{devices=[2,1]<=[2]}}"
    )
    once = scaled("a", factor) + (
        "  ROOT %m = f32[{rows},4]{{1,0}} multiply(%x, %a.b)" + metadata
    )
    whole = WHOLE.format(rest=steps.format(rows=4))
    text = PART.format(rest=once.format(rows=2))
    assert judged_text(whole, text, "a text").outcome == outcome


def test_a_program_with_another_number_of_results_is_not_judged():
    both = (
        "  %t = f32[2,4]{0,1} bitcast(%y)\n"
        "  %sum = f32[2,4]{1,0} add(%x, %t)\n"
        "  ROOT %both = (f32[2,4]{1,0}, f32[2,4]{1,0}) tuple(%sum, %x)"
    )
    whole = WHOLE.format(rest=TURNED)
    verdict = judged_text(whole, PART.format(rest=both), "a text")
    assert verdict.outcome == "not judged"
    assert "the program returns 2 arrays, and the step 1" in str(verdict)
