"""What a search is asked for, and what it says while it goes on."""

import jax
import jax.numpy as jnp
import pytest
from models import Struct, f32

from shardfx.auto import search
from shardfx.auto._asked import asked_for
from shardfx.errors import MeshError


def test_slices_in_the_text():
    two = asked_for("tpu:v5p:4x4x4*2", None)
    assert (two.total, two.slices, two.targets, two.target) == (128, 2, 2, "tpu:v5p:4x4x4")
    assert two == asked_for("tpu:v5p:4x4x4*2", None, 2)
    one = asked_for("tpu:v5p:4x4x4", None)
    assert (one.total, one.slices, one.targets) == (64, 1, 1)
    assert asked_for("cpu:4*2", None).total == 8
    with pytest.raises(MeshError, match=r"`devices='tpu:v5p:4x4x4\*0'` does not say how many slices there are"):
        asked_for("tpu:v5p:4x4x4*0", None)
    with pytest.raises(MeshError, match=r"has 2 slices, and `slices=4`; leave `slices` out"):
        asked_for("tpu:v5p:4x4x4*2", None, 4)


def test_slices_as_clouds_call_them():
    assert asked_for("v5e-8", None).extents == (2, 4) and asked_for("v5e-8", None).target == "tpu:v5e:2x4"
    assert asked_for("v4-32", None).total == 16 and asked_for("v4-32*2", None).total == 32
    assert asked_for(32, "v5p").extents == (2, 4, 4) and asked_for(32, "v5p", 2).extents == (2, 2, 4)
    assert asked_for("tpu:v5p:2x2x8", None).extents == (2, 2, 8)


def test_progress_keys_and_slices():
    """Each key of a batch goes with its row; the axis that spans the slices is in the mesh, and progress counts."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 16))
    said: list[str] = []

    def step(w, keys, x):
        def row(key, x):
            return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0) @ w

        return jax.vmap(row)(keys, x)

    best = search(step, f32(64, 128), keys, Struct((16, 64), "float32"), devices="cpu:4*2", progress=said.append)[0]
    assert best.mesh.size == 8 and max(best.mesh.dcn_sizes) == 2
    assert said[:2] == ["laying the step out under assignments", "pricing meshes of 8 devices"]
    assert said[2].startswith("partitioned candidate 1: ")
