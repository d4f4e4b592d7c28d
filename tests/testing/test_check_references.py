"""`check_step` with a `reference`, whose outputs must be those of the step."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx.errors import ProgramError
from shardfx.testing import check_step
from tests.testing.planted import mesh_of


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(jax.devices())


def numbers(mesh):
    return jax.device_put(jnp.arange(8.0) + 1, NamedSharding(mesh, P("d")))


def real_and_imaginary(x):
    return lax.complex(x, x)


OTHER_OUTPUTS = {
    "a dimension more": (
        lambda x: jnp.stack([x, x]),
        lambda x: x,
        r"the output is f32\[2,8\] in the step, and f32\[8\] in the reference",
    ),
    "a dimension less": (
        lambda x: {"loss": jnp.sum(x * 0)},
        lambda x: {"loss": x * 0},
        r"output `loss` is f32\[\] in the step, and f32\[8\] in the reference",
    ),
    "only the real part": (
        lambda x: x,
        real_and_imaginary,
        r"the output is f32\[8\] in the step, and c64\[8\] in the reference",
    ),
    "an imaginary part": (
        real_and_imaginary,
        lambda x: x,
        r"the output is c64\[8\] in the step, and f32\[8\] in the reference",
    ),
    "integers": (
        lambda x: (x, x.astype(jnp.int32)),
        lambda x: (x, x),
        r"output `1` is i32\[8\] in the step, and f32\[8\] in the reference",
    ),
    "an output more": (
        lambda x: (x, x),
        lambda x: (x,),
        r"returns 2 arrays, and the reference 1; output `1` of the step is no output",
    ),
    "an output less": (
        lambda x: x,
        lambda x: (x, x),
        r"returns 1 array, and the reference 2; the output of the step is output `0`",
    ),
    "another key": (
        lambda x: {"a": x},
        lambda x: {"b": x},
        r"output `a` of the step is output `b` of the reference",
    ),
}


@pytest.mark.parametrize(
    "step, reference, message", OTHER_OUTPUTS.values(), ids=OTHER_OUTPUTS
)
def test_a_reference_with_other_outputs_is_an_error(step, reference, message, mesh):
    x = numbers(mesh)
    with pytest.raises(ProgramError, match=message):
        check_step(step, x, reference=reference)


def test_imaginary_parts_are_compared(mesh):
    x = numbers(mesh)
    assert check_step(real_and_imaginary, x, reference=lambda x: lax.complex(x, 1 * x))
    check = check_step(real_and_imaginary, x, reference=lambda x: lax.complex(x, 0 * x))
    assert not check
    assert check.outputs[0].difference == 8.0


def test_a_reference_may_return_wider_floats(mesh):
    x = numbers(mesh)
    narrow = lambda x: jnp.tanh(x).astype(jnp.bfloat16)
    assert check_step(narrow, x, reference=jnp.tanh)
    assert check_step(jnp.tanh, x, reference=narrow)
    assert not check_step(narrow, x, reference=lambda x: jnp.tanh(x) + 1)
