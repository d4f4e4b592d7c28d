"""A plan without rules for a batch: how many devices share the rows."""

from typing import Any

import jax
import pytest
from auto_plans import by_code, state_per_device, struct, tokens

import shardfx as sfx
from shardfx import MeshSpec, chips
from shardfx.errors import LeafTypeError, MeshError, RuleError


def test_devices_beyond_the_rows_of_a_batch_share_weights():
    tree = {"up": struct(1024, 4096), "down": struct(4096, 1024)}
    auto_plan = sfx.auto.plan(tree, 256, chip="v5e", batch=tokens(64, 2048))
    assert dict(auto_plan.mesh.shape) == {"data": 64, "tensor": 4}
    assert auto_plan["up"].spec == jax.P(None, "tensor")
    assert auto_plan["down"].spec == jax.P("tensor")
    assert auto_plan.batch.spec == jax.P(("data",))
    assert by_code(auto_plan, tree) == auto_plan.off()
    enough = sfx.auto.plan(tree, 256, chip="v5e", batch=tokens(512, 2048))
    assert dict(enough.mesh.shape) == {"data": 256}
    # A state that is too large is sharded by FSDP too, over the devices with rows.
    wide = {"up": struct(2**15, 2**16)}
    large = sfx.auto.plan(wide, 64, chip="v5e", batch=tokens(16, 2**16))
    assert dict(large.mesh.shape) == {"data": 8, "fsdp": 2, "tensor": 4}
    assert large["up"].spec == jax.P(None, ("tensor", "fsdp"))
    assert large.batch.spec == jax.P(("data", "fsdp"))
    slices = sfx.auto.plan(tree, "tpu:v5e:4x4*2", batch=tokens(8, 2**16))
    assert str(slices.mesh) == "data=8(dcn=2),tensor=4"


@pytest.mark.parametrize(
    ("batch", "mesh"),
    [
        (struct(512, 4096), {"tensor": 8}),
        (tokens(64, 128), {"data": 2, "tensor": 4}),
        ({"x": struct(64, 256, 4096), "scale": struct()}, {"data": 8}),
    ],
    ids=["few", "some", "many"],
)
def test_few_tokens_get_tensor_parallelism(batch: Any, mesh: dict[str, int]):
    """Gradients have as many bytes whatever the tokens, activations fewer for fewer."""
    layers = {"up": struct(4096, 2**14), "down": struct(2**14, 4096)}
    auto_plan = sfx.auto.plan({"layers": layers}, 8, chip="v5p", batch=batch)
    assert dict(auto_plan.mesh.shape) == mesh
    if "tensor" in mesh:
        assert auto_plan["layers/up"].spec == jax.P(None, "tensor")
        assert auto_plan["layers/down"].spec == jax.P("tensor")
        assert "`tensor` shards weights in place of rows" in auto_plan.why
    assert by_code(auto_plan, {"layers": layers}) == auto_plan.off()


def odd_heads(layers: int) -> dict[str, Any]:
    """Layers with 25 heads of 64, which 8 devices do not divide."""
    layer = {
        "q_proj": {"kernel": struct(1600, 1600)},
        "k_proj": {"kernel": struct(1600, 1600)},
        "v_proj": {"kernel": struct(1600, 1600)},
        "o_proj": {"kernel": struct(1600, 1600)},
        "up": struct(1600, 6400),
        "down": struct(6400, 1600),
    }
    return {"layers": [layer] * layers}


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_a_state_that_fits_by_fsdp_fits_with_a_batch_too(rows: int):
    """Heads that tensor parallelism leaves whole are a third of 44 GiB."""
    tree = odd_heads(96)
    limit = chips.find("v5e").usable_hbm_bytes
    assert state_per_device(sfx.auto.plan(tree, 8, chip="v5e")) < limit
    auto_plan = sfx.auto.plan(tree, 8, chip="v5e", batch=tokens(rows, 1))
    assert state_per_device(auto_plan) < limit
    assert auto_plan["layers/0/q_proj/kernel"].bytes_per_device < 4 * 1600**2
    assert by_code(auto_plan, tree) == auto_plan.off()


@pytest.mark.parametrize(
    ("width", "devices", "batch", "mesh"),
    [
        (8192, "tpu:v5e:2x4*2", tokens(64, 1024), "data=2(dcn=2),fsdp=8"),
        (9216, 12, tokens(48, 1024), "fsdp=12"),
    ],
    ids=["slices", "twelve"],
)
def test_fsdp_is_priced_over_the_devices_that_it_needs(
    width: int,
    devices: Any,
    batch: Any,
    mesh: str,
):
    """Between slices, FSDP is slow; eight devices are no divisor of twelve."""
    layer = {"up": struct(width, 4 * width), "down": struct(4 * width, width)}
    tree = {"layers": {str(index): layer for index in range(8)}}
    auto_plan = sfx.auto.plan(tree, devices, chip="v5e", batch=batch)
    assert str(auto_plan.mesh) == mesh


def test_arrays_of_a_batch_with_other_rows_are_told():
    tree = {"up": struct(1024, 4096)}
    batch = {"ids": tokens(64, 2048), "weights": struct(3)}
    auto_plan = sfx.auto.plan(tree, 8, chip="v5e", batch=batch)
    assert dict(auto_plan.mesh.shape) == {"tensor": 8}
    assert "`batch` have 64 and 3 rows, so 1 divide over devices" in auto_plan.why
    alike = {"ids": tokens(64, 2048), "labels": tokens(64, 2048)}
    assert "rows, so" not in sfx.auto.plan(tree, 8, chip="v5e", batch=alike).why


def test_a_known_batch_leaves_a_state_more_memory():
    """8 of 15.75 GiB are more than half, and 4,096 tokens a device need little."""
    tree = {"up": struct(4096, 2**16), "down": struct(2**16, 4096)}
    without_batch = sfx.auto.plan(tree, 8, chip="v5e")
    assert dict(without_batch.mesh.shape) == {"data": 4, "fsdp": 2}
    with_batch = sfx.auto.plan(tree, 8, chip="v5e", batch=tokens(64, 512))
    assert dict(with_batch.mesh.shape) == {"data": 8}
    assert "It leaves room for activations" in with_batch.why


def test_tensor_parallelism_shards_between_heads_and_experts():
    heads = sfx.atomic("heads", 96)
    tree = {
        "attn": {
            "q": struct(4096, 4096),
            "k": struct(4096, 1024),
            "o": struct(4096, 4096),
        },
        "fused": {"qkv": {"kernel": struct(4096, 3 * 4096)}},
        "moe": {"router": struct(4096, 8), "up": struct(8, 4096, 2**14)},
        "own": struct(4096, 768),
        "named": {
            "k": struct(4096, 1024),
            "q": struct(4096, 4096),
            "separate": struct(4096, 8, 128),
            "unnamed": struct(4096, 8, 128),
            "layers": struct(3, 4096, 1024),
        },
    }
    names = {
        "named": {
            "k": ("embed", "kv_heads"),
            "q": ("embed", "heads"),
            "separate": ("embed", "heads", "head_dim"),
            "unnamed": ("embed", "heads", None),
            "layers": ("layers", None, "heads"),
        },
        "attn": None,
        "fused": None,
        "moe": None,
        "own": ("embed", heads),
    }
    few_tokens = tokens(8, 16)
    auto_plan = sfx.auto.plan(tree, 8, chip="v5p", batch=few_tokens, names=names)
    assert dict(auto_plan.mesh.shape) == {"tensor": 8}
    expected = {
        "attn/q": (None, "tensor"),
        # Eight shards of 128 elements may split a head of 256.
        "attn/k": (),
        "attn/o": ("tensor",),
        "fused/qkv/kernel": (),
        "moe/up": ("tensor",),
        "own": (None, "tensor"),
        # As above, if no other dimension has the elements of a head.
        "named/k": (),
        "named/q": (None, "tensor"),
        "named/separate": (None, "tensor"),
        "named/unnamed": (None, "tensor"),
        "named/layers": (),
    }
    for path, entries in expected.items():
        assert auto_plan[path].spec == jax.P(*entries), path
    assert auto_plan.batch.spec == jax.P()
    assert by_code(auto_plan, tree) == auto_plan.off()


def test_rows_that_divide_over_no_axis_are_refused():
    tree = {"up": struct(1024, 4096)}
    batch = tokens(3, 2048)
    with pytest.raises(
        MeshError, match="the 3 rows of `batch` do not divide"
    ) as caught:
        sfx.auto.plan(tree, "tpu:v5e:4x4*2", batch=batch)
    assert "over 2 slices, and each has rows; pass a multiple of 2" in str(caught.value)
    with_more_rows = sfx.auto.plan(tree, 16, chip="v5e", batch=tokens(24, 2048))
    assert dict(with_more_rows.mesh.shape) == {"data": 8, "tensor": 2}


def test_rows_divide_over_a_mesh_that_is_given():
    tree = {"up": struct(1024, 4096)}
    mesh = MeshSpec({"data": 2, "fsdp": 4})
    with pytest.raises(
        MeshError, match="the 6 rows of `batch` do not divide"
    ) as caught:
        sfx.auto.plan(tree, mesh, batch=tokens(6, 2048))
    assert "over the 8 devices of mesh data=2,fsdp=4; pass" in str(caught.value)
    divided = sfx.auto.plan(tree, mesh, batch=tokens(16, 2048))
    assert divided.mesh == mesh


@pytest.mark.parametrize("batch", [64, True, {}, struct(), struct(0, 8), "rows"])
def test_a_batch_without_rows_is_refused(batch: Any):
    with pytest.raises(LeafTypeError, match="`batch`, .*, holds no arrays with rows"):
        sfx.auto.plan({"w": struct(8)}, 8, batch=batch)


def test_a_loop_over_the_first_dimension_leaves_rows_in_the_next():
    """Three steps of many rows, which a step scans over."""
    tree = {"up": struct(1024, 4096)}
    batch = {"ids": tokens(3, 2**16), "scale": struct(3)}
    auto_plan = sfx.auto.plan(tree, 8, chip="v5e", batch=batch, batch_dim=1)
    assert dict(auto_plan.mesh.shape) == {"data": 8}
    assert auto_plan.batch.spec == jax.P(None, ("data",))
    of_time = sfx.auto.plan(tree, 8, chip="v5e", batch=batch)
    assert dict(of_time.mesh.shape) == {"tensor": 8}
    with pytest.raises(LeafTypeError, match="no arrays with rows in dimension 2; pass"):
        sfx.auto.plan(tree, 8, batch=tokens(8, 8), batch_dim=2)


@pytest.mark.parametrize("batch", [None, tokens(8, 16)], ids=["without", "with"])
def test_rows_are_not_counted_from_the_last_dimension(batch: Any):
    """A negative dimension sharded the first one, if no batch was given."""
    with pytest.raises(RuleError, match="`batch_dim=-1` is no number of a dimension"):
        sfx.auto.plan({"up": struct(64, 64)}, 8, batch=batch, batch_dim=-1)
