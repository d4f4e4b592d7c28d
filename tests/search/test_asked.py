"""What a search is asked for, and what it says while it goes on."""

import jax
import jax.numpy as jnp
import pytest
from _devices import chips
from models import Struct, f32, mlp_step
from parts_of_search import search_options

from shardfx.auto import Limits, search
from shardfx.errors import LeafTypeError, MeshError, RuleError, SpecError


MODEL = mlp_step(64, 256, 512)
V5E = {"devices": 8, "chip": "v5e"}


def test_slices_in_the_text():
    two = search_options("tpu:v5p:4x4x4*2", None)
    assert two.total == 128
    assert two.slices == 2
    assert two.targets == 2
    assert two.target == "tpu:v5p:4x4x4"
    assert two == search_options("tpu:v5p:4x4x4*2", None, 2)
    asked = search_options("tpu:v5p:4x4x4", None)
    assert asked.total == 64
    assert asked.slices == 1
    assert asked.targets == 1
    assert search_options("cpu:4*2", None).total == 8
    assert search_options("v5e-8", None).extents == (2, 4)
    assert search_options("v5e-8", None).target == "tpu:v5e:2x4"
    assert search_options("v4-32", None).total == 16
    assert search_options("v4-32*2", None).total == 32
    assert search_options(32, "v5p").extents == (2, 4, 4)
    assert search_options(32, "v5p", 2).extents == (2, 2, 4)
    assert search_options("tpu:v5p:2x2x8", None).extents == (2, 2, 8)


def test_jax_devices_say_how_many_slices_they_are_in():
    devices = chips((4, 4, 1, 1), kind="TPU v5 lite", slices=2)
    both = search_options(devices, None)
    assert both.total == 32
    assert both.slices == 2
    assert both.extents == (4, 4)
    assert both.targets == 1
    assert search_options(devices[:16], None).slices == 1
    # Slices of unequal numbers of devices are one network.
    assert search_options(devices[:24], None).slices == 1
    assert search_options(jax.devices(), None).slices == 1
    # The caller may know more.
    for slices in (1, 2, 4):
        assert search_options(devices, None, slices).slices == slices


LIMITED = {**V5E, "limits": Limits(always=("batch",))}


@pytest.mark.parametrize(
    ("model", "options", "kind", "message"),
    [
        (MODEL, {"devices": "tpu:v5p:4x4x4*0"}, MeshError, r"'tpu:v5p:4x4x4\*0'"),
        (
            MODEL,
            {"devices": "tpu:v5p:4x4x4*2", "slices": 4},
            MeshError,
            "has 2 slices, and `slices=4`; leave `slices` ",
        ),
        (
            MODEL,
            {"devices": "tpu:v5e:32x32"},
            MeshError,
            "slice 'tpu:v5e:32x32' has 1,024 chips, and a pod of v5e is",
        ),
        (
            MODEL,
            {"devices": 7.5},
            MeshError,
            "`devices=7.5` is neither a number, a slice nor devices; write",
        ),
        (
            MODEL,
            {"devices": 8},
            MeshError,
            r"`devices=8` does not say which chip; add one, as `chip=\"v5e\"`",
        ),
        (
            MODEL,
            {"devices": 0},
            MeshError,
            "`devices=0` is neither a number, a slice nor devices; write",
        ),
        (
            MODEL,
            {"devices": []},
            MeshError,
            r"`devices=\[\]` is neither .*, or `devices=jax.devices\(\)`",
        ),
        (
            MODEL,
            {**V5E, "slices": 3},
            MeshError,
            "`slices=3` does not divide 8 devices",
        ),
        (MODEL, {**V5E, "devices": 1}, MeshError, "one device needs no plan"),
        (
            MODEL,
            {**V5E, "keep": 0},
            RuleError,
            "`keep=0` and `closely=12` must be numbers of candidates, 1 or more",
        ),
        (
            MODEL,
            {**V5E, "closely": 0},
            RuleError,
            "`keep=5` and `closely=0` must be numbers of candidates",
        ),
        (
            MODEL,
            {**V5E, "verify": True},
            RuleError,
            '`verify=True` must be "compile", "run" or None; write',
        ),
        (
            MODEL,
            {**V5E, "devices": 64, "verify": "compile"},
            MeshError,
            "needs 64 devices, and there are 8; emulate",
        ),
        (
            MODEL,
            {**V5E, "devices": 7},
            SpecError,
            "no mesh of 7 devices divides the step's dimensions within the limi",
        ),
        (
            (lambda x: x, (64, 128)),
            V5E,
            LeafTypeError,
            r"the arguments of the step hold no arrays \(tuple\); pass arr",
        ),
        (
            (lambda x: x + 1, f32()),
            V5E,
            SpecError,
            "pad one, or use another number of devices",
        ),
        (
            mlp_step(2, 2, 2),
            {**V5E, "devices": 4096},
            SpecError,
            "no mesh of 4096 devices divides the step's dimensio",
        ),
        (
            mlp_step(64, 256, 3),
            LIMITED,
            SpecError,
            "'batch' sharded, and no mesh axis of 8 .* divides its size 3; pad",
        ),
    ],
)
def test_what_cannot_be_asked_for(model, options, kind, message):
    with pytest.raises(kind, match=message):
        search(*model, **{"chip": None, **options})


def test_an_error_of_the_step_says_what_it_was_called_for():
    with pytest.raises(TypeError) as caught:
        search(lambda p, x: p["up"] @ x, *MODEL[1:], **V5E)
    (note,) = [
        note
        for note in caught.value.__notes__
        if "`search` traced the step with arguments of these" in note
    ]
    assert "bf16[64,256]" in note
    assert "bf16[512,64]" in note


def test_progress_keys_and_slices():
    """Each key of a batch goes with its row; the axis that spans the slices is in the
    mesh, and progress counts.
    """
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 16))
    said: list[str] = []

    def step(w, keys, x):
        def row(key, x):
            return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0) @ w

        return jax.vmap(row)(keys, x)

    search_result = search(
        step,
        f32(64, 128),
        keys,
        Struct((16, 64), "float32"),
        devices="cpu:4*2",
        effort="least",
        progress=said.append,
    )
    best = search_result[0]
    assert best.mesh.size == 8
    assert max(best.mesh.dcn_sizes) == 2
    assert said[:2] == [
        "propagating axis assignments through the step",
        "estimating meshes of 8 devices",
    ]
    assert said[2].startswith("partitioned candidate 1: ")
