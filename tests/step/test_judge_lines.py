"""The lines that a verdict names are of the program that it judges."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from judging import programs_of, verdict_of

import shardfx as sfx
from shardfx._step.judge.origins import origin_of
from tests.programs import parse_hlo


MESH = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2}).abstract()


def struct(shape, *spec):
    sharding = NamedSharding(MESH, P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


ROWS = struct((16, 32), ("data", "fsdp"))
STACK = struct((3, 16, 32), None, ("data", "fsdp"))
WEIGHTS = struct((3, 32, 32), None, "tensor", "fsdp")


def layer(x, w):
    return x + jnp.tanh(x @ w), None


def joined(x, row):
    return jnp.logaddexp(x, row), None


def earlier_model(x, stack):
    return lax.scan(joined, x, stack)[0]


def earlier_step(x, stack):
    return earlier_model(x, stack)


def later_step(x, stack):
    return lax.scan(joined, x, stack)[0]


def layers_of_earlier_step(x, weights):
    return lax.scan(layer, x, weights)[0]


def layers_of_later_step(x, weights):
    return lax.scan(layer, x, weights)[0]


@pytest.fixture
def nothing_traced():
    """JAX keeps what tests before this one traced."""
    jax.clear_caches()


FORMS = {
    "a function": lambda step: step,
    "jax.jit": jax.jit,
    "filter_jit": sfx.filter_jit,
}


@pytest.mark.parametrize("form", FORMS)
def test_what_an_earlier_step_traced_has_lines_of_this_step(form):
    assert sfx.testing.verify(earlier_step, ROWS, STACK)
    programs = programs_of(FORMS[form](later_step), (ROWS, STACK))
    module = parse_hlo(programs.partitioned)
    functions: set[str] = set()
    for computation in module.computations.values():
        for instruction in computation.values():
            origin = origin_of(module.frames(instruction))
            for frame in (origin.source, origin.caller):
                if frame is not None:
                    functions.add(frame.function)
    assert functions == {"later_step", "joined"}


def test_a_refutation_names_the_line_of_the_step_too():
    for step in (layers_of_earlier_step, layers_of_later_step):
        (refutation,) = sfx.testing.verify(step, ROWS, WEIGHTS).refutations
        assert refutation.source is not None
        assert refutation.source.function == "layer"
        assert refutation.caller is not None
        assert refutation.caller.function == step.__name__
        assert refutation.first_traced is None
        caller = f"{refutation.caller.place} {step.__name__}"
        assert f"layer, called from {caller}: add joins" in str(refutation)


@pytest.mark.usefixtures("nothing_traced")
def test_a_cause_says_that_an_earlier_step_traced_its_operation():
    assert sfx.testing.verify(earlier_step, ROWS, STACK)
    programs = programs_of(later_step, (ROWS, STACK))
    squeeze = re.search(
        r"( +)(%[\w.]+ = f32\[4,32\]\S*) reshape\((%[\w.\-]+)\), (metadata=\{.*\})",
        programs.partitioned,
    )
    assert squeeze is not None
    # A sum of rows and of another device's rows, at the place of the loop's slice.
    indent, result, row, metadata = squeeze.groups()
    changed = (
        f"{indent}%moved = f32[1,4,32]{{2,1,0}} collective-permute({row}),"
        " channel_id=99, source_target_pairs="
        "{{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}\n"
        f"{indent}%sum = f32[1,4,32]{{2,1,0}} add({row}, %moved), {metadata}\n"
        f"{indent}{result} reshape(%sum), {metadata}"
    )
    text = programs.partitioned.replace(squeeze[0], changed)
    cause = verdict_of(programs, text).unjudged[0]
    assert cause.operation == "%sum (add)"
    assert cause.source is not None
    assert cause.source.function == "later_step"
    assert cause.caller is None
    # JAX 0.9 does not keep the lines of the first call.
    assert (cause.first_traced is None) == (jax.__version_info__ < (0, 10))
    if cause.first_traced is not None:
        assert cause.first_traced.function == "earlier_model"
        place = cause.first_traced.place
        assert f"later_step, first traced at {place} earlier_model: " in str(cause)
