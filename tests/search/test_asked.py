"""What a search is asked for, and what it says while it goes on."""

import jax
import jax.numpy as jnp
import pytest
from models import Struct, f32, mlp_step

from shardfx.auto import Limits, search
from shardfx.auto._asked import asked_for
from shardfx.errors import LeafTypeError, MeshError, RuleError, SpecError


MODEL = mlp_step(64, 256, 512)
V5E = {"devices": 8, "chip": "v5e"}


def test_slices_in_the_text():
    two = asked_for("tpu:v5p:4x4x4*2", None)
    assert (two.total, two.slices, two.targets, two.target) == (128, 2, 2, "tpu:v5p:4x4x4")
    assert two == asked_for("tpu:v5p:4x4x4*2", None, 2)
    one = asked_for("tpu:v5p:4x4x4", None)
    assert (one.total, one.slices, one.targets) == (64, 1, 1)
    assert asked_for("cpu:4*2", None).total == 8
    assert asked_for("v5e-8", None).extents == (2, 4) and asked_for("v5e-8", None).target == "tpu:v5e:2x4"
    assert asked_for("v4-32", None).total == 16 and asked_for("v4-32*2", None).total == 32
    assert asked_for(32, "v5p").extents == (2, 4, 4) and asked_for(32, "v5p", 2).extents == (2, 2, 4)
    assert asked_for("tpu:v5p:2x2x8", None).extents == (2, 2, 8)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"devices": "tpu:v5p:4x4x4*0"}, MeshError, r"'tpu:v5p:4x4x4\*0'"),
        ({"devices": "tpu:v5p:4x4x4*2", "slices": 4}, MeshError, "has 2 slices, and `slices=4`; leave `slices` out"),
        ({"devices": "tpu:v5e:32x32"}, MeshError, "slice 'tpu:v5e:32x32' has 1,024 chips, and a pod of v5e is 16x16"),
        ({"devices": 7.5}, MeshError, "`devices=7.5` is neither a number, a slice nor devices; write"),
        ({"devices": 8}, MeshError, r"`devices=8` does not say which chip; add one, as `chip=\"v5e\"`"),
        ({"devices": 0}, MeshError, "`devices=0` is neither a number, a slice nor devices; write"),
        ({"devices": []}, MeshError, r"`devices=\[\]` is neither .*, or `devices=jax.devices\(\)`"),
        ({**V5E, "slices": 3}, MeshError, "`slices=3` does not divide 8 devices"),
        ({**V5E, "devices": 1}, MeshError, "one device needs no plan"),
        ({**V5E, "keep": 0}, RuleError, "`keep=0` is no number of candidates; give 1 or more"),
        ({**V5E, "closely": 0}, RuleError, "`closely=0` is no number of candidates; give 1 or more"),
        ({**V5E, "verify": True}, RuleError, '`verify=True` is not "compile" or "run"; write'),
        ({**V5E, "verify": "quick"}, RuleError, '`verify=\'quick\'` is not "compile" or "run"'),
        ({**V5E, "devices": 64, "verify": "compile"}, MeshError, 'y="compile"` needs 64 devices, and there are 8; emu'),
        ({**V5E, "devices": 7}, SpecError, "no mesh of 7 devices divides the step's dimensions within the limits"),
    ],
)
def test_what_cannot_be_asked_for(options, kind, message):
    with pytest.raises(kind, match=message):
        search(*MODEL, **{"chip": None, **options})


def test_steps_that_cannot_be_searched():
    with pytest.raises(LeafTypeError, match=r"the arguments of the step hold no arrays \(tuple\); pass arrays, or str"):
        search(lambda x: x, (64, 128), **V5E)
    with pytest.raises(SpecError, match="pad one, or use another number of devices"):
        search(lambda x: x + 1, f32(), **V5E)
    with pytest.raises(SpecError, match="no mesh of 4096 devices divides the step's dimensions within the limits"):
        search(*mlp_step(2, 2, 2), devices=4096, chip="v5e")
    with pytest.raises(
        SpecError, match="`limits` wants 'batch' cut, and no mesh axis of 8 devices .* cuts its size 3; pad"
    ):
        search(*mlp_step(64, 256, 3), **V5E, limits=Limits(always=("batch",)))
    with pytest.raises(TypeError) as caught:
        search(lambda p, x: p["up"] @ x, *MODEL[1:], **V5E)
    (note,) = [note for note in caught.value.__notes__ if "`search` traced the step with arguments of these" in note]
    assert "bf16[64,256]" in note and "bf16[512,64]" in note


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
