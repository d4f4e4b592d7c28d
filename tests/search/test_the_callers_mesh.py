"""A step is named, searched, typed and unsharded without the caller's mesh, which is the
context's mesh again afterwards, also behind an error.
"""

import threading

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding, reshard

import shardfx as sfx


STRUCTS = (
    jax.ShapeDtypeStruct((16, 32), "float32"),
    jax.ShapeDtypeStruct((8, 16), "float32"),
)
ARRAYS = jnp.ones((16, 32)), jnp.ones((8, 16))


def step(w, x):
    hidden = jax.nn.relu(x @ reshard(w, P(None, "tensor")))
    return jnp.mean(hidden**2)


def failing(w, x):
    raise ValueError("a mistake of the step")


def searched(step):
    sfx.auto.search(step, *STRUCTS, devices=2, chip="v5e", effort="least")


def named(step):
    sfx.auto.name_axes(step, *STRUCTS)


def unsharded(step):
    sfx.testing.unsharded(step)(*ARRAYS)


def checked(step):
    mesh = jax.sharding.get_mesh()
    sharding = NamedSharding(mesh, P("data"))
    sfx.testing.check_step(step, ARRAYS[0], jax.device_put(ARRAYS[1], sharding))


def typed(step):
    mesh = jax.sharding.get_abstract_mesh()
    sharding = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=sharding)
    sfx.cost.typed(step, STRUCTS[0], x)


CALLS = [searched, named, unsharded, checked, typed]


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 2), ("data", "tensor"))


def require(mesh):
    """The mesh is that of JAX's contexts, and new arrays are on it."""
    assert jax.sharding.get_mesh() == mesh
    assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
    assert len(jnp.ones((4, 4)).sharding.device_set) == mesh.size
    assert jax.typeof(reshard(jnp.ones(4), P("data"))).sharding.spec == P("data")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_callers_mesh_is_there_afterwards(call, mesh):
    with jax.set_mesh(mesh):
        call(step)
        require(mesh)
    assert jax.sharding.get_mesh().empty


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_callers_mesh_is_there_behind_an_error(call, mesh):
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="a mistake of the step"):
            call(failing)
        require(mesh)


def test_other_threads_keep_their_meshes(mesh):
    """The mesh is taken away in the thread that traces a step, and in no other."""
    is_traced = threading.Event()
    is_seen = threading.Event()
    meshes = []

    def waiting(w, x):
        is_traced.set()
        assert is_seen.wait(60)
        return step(w, x)

    def look():
        with jax.set_mesh(mesh):
            assert is_traced.wait(60)
            meshes.append(jax.sharding.get_mesh())
            is_seen.set()

    thread = threading.Thread(target=look)
    thread.start()
    with jax.set_mesh(mesh):
        named(waiting)
    thread.join()
    assert meshes == [mesh]


def test_a_step_sees_its_axes_and_no_device_of_the_mesh(mesh):
    seen = []

    def looking(w, x):
        seen.append(jax.sharding.get_abstract_mesh())
        return step(w, x + jnp.ones((8, 16)))

    with jax.set_mesh(mesh):
        # Under `use_abstract_mesh` alone, the constant would lie on the mesh's devices.
        result = sfx.testing.unsharded(looking)(*ARRAYS)
    assert len(result.sharding.device_set) == 1
    assert seen[0].axis_names == ("data", "tensor")
    assert seen[0].axis_types == (AxisType.Explicit,) * 2
    assert seen[0].size == 1
