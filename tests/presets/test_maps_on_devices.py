"""Maps between real layouts through files and devices: loaded, saved, and moved to an engine step after step."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_models import config_of, equal, files_of, in_blocks, stacked_by_hand, unscaled

import shardfx
from shardfx import MeshSpec, PathRules, checkpoint
from shardfx.presets import maps


def planned(tree, sizes, devices, text):
    structs = {path: jax.ShapeDtypeStruct(one.shape, one.dtype) for path, one in tree.items()}
    return shardfx.plan(structs, MeshSpec(sizes).build(devices), paths=PathRules.parse(text), unused="allow")


ENGINE = (
    "norm->None, o_proj->None.tensor, down_proj->None.tensor, w13->None.tensor, w2->None.None.tensor, "
    "gate.weight->None, .*->tensor"
)
STACKED = (
    "norm->None, bias->None, embedding->tensor, experts->None.None.fsdp.tensor, layers->None.fsdp.tensor, .*->tensor"
)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_a_checkpoint_is_loaded_stacked_and_saved_back(tmp_path, family):
    config = config_of(family)
    files = files_of(family, np.float32)
    save_file(files, tmp_path / "model.safetensors")
    theirs, mine = maps.hugging_face(config), maps.stacked(config).with_sizes(vocab=64)
    whole = theirs.to(mine).apply(files)
    plan = planned(whole, {"fsdp": 2, "tensor": 4}, jax.devices(), STACKED)
    tree = checkpoint.load(tmp_path, plan, theirs.to(mine))
    equal(tree, whole)
    assert {one.sharding for one in tree.values()} == set(plan.shardings.values())
    checkpoint.save(tmp_path / "out", tree, plan, map=mine.to(theirs))
    equal(dict(sorted(load_file(tmp_path / "out" / "model.safetensors").items())), dict(sorted(files.items())))


def test_deepseeks_blocks_are_loaded_as_the_numbers_they_stand_for(tmp_path):
    config = config_of("deepseek_v3")
    files = in_blocks(files_of("deepseek_v3", np.float32), 10)
    save_file(files, tmp_path / "model.safetensors")
    config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [10, 10]}}
    made = maps.hugging_face(config).to(maps.stacked(config))
    expected = stacked_by_hand("deepseek_v3", unscaled(files, 10))
    assert expected["moe_layers/mlp/experts/down"].dtype == ml_dtypes.bfloat16
    plan = planned(expected, {"fsdp": 2, "tensor": 4}, jax.devices(), STACKED)
    equal(checkpoint.load(tmp_path, plan, made), {path: expected[path] for path in plan.shardings})


@pytest.mark.parametrize("family, shards", [("llama", 4), ("qwen3_moe", 2)])
def test_an_engine_gets_a_trainers_weights_step_after_step(family, shards):
    config, files = config_of(family), files_of(family, np.float32)
    trainer, served = maps.stacked(config), maps.engine(config, shards=shards)
    whole = maps.hugging_face(config).to(trainer).apply(files)
    trained = planned(whole, {"fsdp": 2, "tensor": 2}, jax.devices()[:4], STACKED)
    there = trainer.to(served)
    plan = planned(there.apply(whole), {"tensor": shards}, jax.devices()[4 : 4 + shards], ENGINE)
    weights: Any = shardfx.shard(whole, trained)
    moved = {}
    for _ in range(2):
        weights = {path: one * np.float32(1.5) for path, one in weights.items()}
        moved = shardfx.reshard(weights, plan, map=there)
        equal(moved, there.apply({path: np.asarray(one) for path, one in weights.items()}))
        assert all(moved[path].sharding == plan.shardings[path] for path in moved)
    back = shardfx.reshard(moved, trained, map=served.to(trainer))
    equal(back, {path: np.asarray(one) for path, one in weights.items()})
