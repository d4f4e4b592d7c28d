# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingImports=false
"""What public reports and a first day ran into with files and rules, each as it was
reported, with the answer that it must give now.
"""

import json
import pathlib
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import shardfx as sfx
from shardfx import TreeMap, checkpoint
from shardfx.errors import (
    CheckpointError,
    MapError,
    PlanMismatchError,
    SpecError,
)
from shardfx.interop import huggingface
from shardfx.presets import maps
from tests._stores import orbax, zarr
from tests.house.reported import Report, fails, listing, struct


REPORTS: list[Report] = []
reported = listing(REPORTS)

MESH = sfx.MeshSpec({"x": 8}).build(jax.devices())
FT = sfx.MeshSpec({"fsdp": 4, "tensor": 2})
STATES = "checkpoint/test_checkpoint_states.py"
FOREIGN = "checkpoint/test_foreign_files.py"
ALIGNING = "plan/test_aligning.py"


# F1: a number in the plan, an array in the file.


def train_state():
    """A TrainState of Flax after one step, and the plan of one that starts."""
    from flax.training.train_state import TrainState

    params = {"w": jnp.ones((8, 8))}
    optimizer = optax.adam(1e-3)

    def create(params):
        return TrainState.create(apply_fn=None, params=params, tx=optimizer)

    rules = sfx.PathRules([("w", P("x"))])
    plan = sfx.follow(create, sfx.plan(params, MESH, paths=rules))
    state = jax.jit(lambda s: s.apply_gradients(grads=s.params))(create(params))
    return state, plan, create(params)


@reported("public F1", f"{STATES}::test_a_counter_that_became_an_array_comes_back")
def the_step_of_a_train_state(folder):
    state, plan, _ = train_state()
    for name in ("c", "c.safetensors"):
        checkpoint.save(folder / name, state)
        assert checkpoint.load(folder / name, plan).step == 1


@reported("public F1", f"{STATES}::test_a_counter_that_became_an_array_comes_back")
def the_step_of_a_managed_train_state(folder):
    state, plan, _ = train_state()
    with checkpoint.Manager(folder / "m") as manager:
        manager.save(3, state)
    assert manager.load(plan).step == 1


@reported("public F1", f"{STATES}::test_a_step_of_another_library")
def the_step_of_orbax(folder):
    plan = sfx.plan({"w": jnp.ones(8), "step": 0}, MESH, unmatched="replicate")
    orbax(folder / "o", {"w": np.ones(8, np.float32), "step": 17})
    step = checkpoint.load(folder / "o", plan)["step"]
    assert step == 17
    assert type(step) is int


@reported("public F1", f"{STATES}::test_a_step_of_another_library")
def a_scalar_of_64_bits(folder):
    plan = sfx.plan({"w": jnp.ones(8), "step": 0}, MESH, unmatched="replicate")
    file = folder / "x.safetensors"
    save_file({"w": np.ones(8, np.float32), "step": np.array(2**40)}, file)
    assert checkpoint.load(file, plan)["step"] == 2**40


@reported("public F1", "checkpoint/test_file_law.py")
def a_matrix_where_the_plan_has_a_number(folder):
    plan = sfx.plan({"w": jnp.ones(8), "step": 0}, MESH, unmatched="replicate")
    checkpoint.save(folder / "c", {"w": jnp.ones(8), "step": jnp.ones((4, 4))})
    with fails(CheckpointError, "a Python number in the plan, and the checkpoint has"):
        checkpoint.load(folder / "c", plan)


@reported("public F1", f"{STATES}::test_a_function_uses_nothing")
def a_function_where_the_file_has_an_array(folder):
    tree = {"w": jnp.ones(8), "mod": {"act": jnp.ones((4, 4))}}
    checkpoint.save(folder / "c", tree)
    with fails(CheckpointError, "which nothing would use"):
        checkpoint.load(folder / "c", {"w": jnp.ones(8), "mod": {"act": jnp.tanh}})


@reported("public F1", f"{STATES}::test_numbers_go_through_maps")
def numbers_through_a_map(folder):
    checkpoint.save(folder / "c", {"w": jnp.ones(8), "step": 5})
    plan = sfx.plan({"v": jnp.ones(8), "at": 0}, MESH, unmatched="replicate")
    loaded = checkpoint.load(folder / "c", plan, TreeMap({"v": "w", "at": "step"}))
    assert loaded["at"] == 5


# F2 and F3: adapters and scales.

_ADAPTERS = {
    "rank 8 of 8 heads": (
        (4096, 8, 128),
        P("fsdp", "tensor"),
        "a",
        (4096, 8),
        P("fsdp"),
    ),
    "rank 64 of 64": (
        (64, 128),
        P("fsdp", "tensor"),
        "b",
        (64, 128),
        P(None, "tensor"),
    ),
    "stacked, rank 64": (
        (8, 64, 128),
        P(None, "fsdp", "tensor"),
        "b",
        (8, 64, 128),
        P(None, None, "tensor"),
    ),
    "a scale of the last two": (
        (512, 16, 128),
        P("fsdp", "tensor"),
        "scale",
        (16, 128),
        P("tensor"),
    ),
    "a scale per head": (
        (512, 16, 128),
        P("fsdp", "tensor"),
        "scale",
        (16,),
        P("tensor"),
    ),
}


@reported("public F2", f"{ALIGNING}::test_adapters_and_scales_go_with_their_base")
def adapters_and_scales(folder):
    for base, spec, kind, shape, expected in _ADAPTERS.values():
        rules = sfx.PathRules([("w$", spec)])
        plan = sfx.plan({"k": {"w": struct(*base)}}, FT, paths=rules)
        leaf = f"lora_{kind}" if kind in "ab" else kind
        # Both adapters of a pair tell the rank, as in a real state.
        pair = {leaf: struct(*shape)}
        if kind == "a":
            pair["lora_b"] = struct(shape[-1], *base[1:])
        if kind == "b":
            pair["lora_a"] = struct(*base[:-1], shape[-2])
        state = sfx.follow(
            lambda _, pair=pair: {"k": pair},
            plan,
            adapters=[("lora_[ab]$", "w")],
            scales=[("scale$", "w")],
            unused="allow",
        )
        assert state[f"k/{leaf}"].spec == expected, (base, kind)


@reported("public F2", f"{ALIGNING}::test_dimensions_that_nothing_tells_have_a_reason")
def an_ambiguous_scale(folder):
    rules = sfx.PathRules([("w$", P("fsdp", "tensor"))])
    plan = sfx.plan({"a": {"w": struct(64, 64)}}, FT, paths=rules)
    scales = [("scale$", "w")]
    state = sfx.follow(lambda _: {"a": {"scale": struct(64)}}, plan, scales=scales)
    assert "may be those numbered (0) or (1)" in str(state["a/scale"].reasons)


@reported("public F3", f"{ALIGNING}::test_a_rule_for_scalars_alone_is_in_use")
def scales_of_rank_0(folder):
    rules = sfx.PathRules([("w$", P("fsdp", "tensor"))])
    plan = sfx.plan({"a": {"w": struct(64, 128)}}, FT, paths=rules)
    scales = [("scale$", "w")]
    state = sfx.follow(lambda _: {"a": {"scale": struct()}}, plan, scales=scales)
    assert state["a/scale"].spec == P()


# F4: exports.

CONFIG = {
    "model_type": "llama",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


def llama(config):
    shapes = {"embed_tokens": (config["vocab_size"], 32), "norm": (32,)}
    sizes = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
    }
    for i in range(config["num_hidden_layers"]):
        for name, shape in sizes.items():
            shapes[f"layers.{i}.{name}"] = shape
    return {f"model.{n}.weight": np.ones(s, np.float32) for n, s in shapes.items()}


@reported(
    "public F4",
    "presets/test_maps_sizes.py::test_an_export_has_the_sizes_of_its_config",
)
def an_export_of_another_size(folder):
    export = maps.maxtext(CONFIG).to(maps.hugging_face(CONFIG))
    changes = (
        {"vocab_size": 64},
        {"num_hidden_layers": 3},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    )
    for change in changes:
        trained = CONFIG | change
        to_mine = maps.hugging_face(trained).to(maps.maxtext(trained))
        mine = to_mine.apply(llama(trained))
        with fails(MapError, "its layout"):
            checkpoint.save(folder / "out", mine, map=export)


# F5: Hugging Face's plans.


def planned_by_styles(styles, paths):
    tree = {path: struct(256, 64) for path in paths}
    mesh = sfx.MeshSpec({"tensor": 8})
    plan = sfx.plan(
        tree,
        mesh,
        paths=huggingface.rules_of(styles),
        unused="allow",
    )
    return [plan[path].spec for path in paths]


HUGGING = "conformance/test_interop_huggingface.py"


@reported(
    "public F5", f"{HUGGING}::test_embeddings_are_sharded_unless_a_plan_names_them"
)
def embeddings_are_sharded(folder):
    styles = {"layers.*.self_attn.q_proj": "colwise"}
    paths = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]
    assert planned_by_styles(styles, paths) == [P("tensor")] * 2


@reported("public F5", f"{HUGGING}::test_styles_of_the_main_branch")
def styles_of_the_main_branch(folder):
    styles = (
        "rowwise_allreduce",
        "colwise_allgather",
        "vocab_allreduce",
        "colwise_loss_parallel",
        "moe_tp_gate_up_colwise",
        "moe_tp_down_rowwise",
        "moe_experts_allreduce",
        "ep_router",
        "rowwise_reduce_scatter",
        "activation",
    )
    for style in styles:
        huggingface.rules_of({"layers.*.mlp.up_proj": style})


@reported("public F5", f"{HUGGING}::test_the_name_of_a_layer_comes_before_that_of_all")
def the_number_of_a_layer_wins(folder):
    styles = {"layers.*.mlp.up_proj": "colwise", "layers.0.mlp.up_proj": "rowwise"}
    path = "model.layers.0.mlp.up_proj.weight"
    for ordered in (styles, dict(reversed(styles.items()))):
        assert planned_by_styles(ordered, [path]) == [P(None, "tensor")]


# F6 to F8: files that are half known, or of another kind.


def tensors(path, **entries):
    header = {}
    reached = 0
    for name, (dtype, shape, data) in entries.items():
        offsets = [reached, reached + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        reached += len(data)
    text = json.dumps(header).encode()
    rest = b"".join(data for _, _, data in entries.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + rest)


@reported("public F6", f"{FOREIGN}::test_two_elements_in_a_byte")
def four_bits(folder):
    path = folder / "x.safetensors"
    blocks = ("F4", [16, 32], bytes(range(256)))
    tensors(path, blocks=blocks, b=("F32", [1], bytes(4)))
    structs = checkpoint.structs(path)
    assert structs["blocks"].dtype == jnp.float4_e2m1fn
    plan = sfx.plan(structs, MESH, unmatched="replicate")
    assert checkpoint.load(path, plan)["blocks"].shape == (16, 32)
    raw = structs | {"blocks": struct(16, 16, dtype=jnp.uint8)}
    plan = sfx.plan(raw, MESH, unmatched="replicate")
    assert checkpoint.load(path, plan)["blocks"].dtype == jnp.uint8


@reported("public F6", f"{FOREIGN}::test_bytes_of_packed_tensors_by_choice")
def six_bits(folder):
    path = folder / "x.safetensors"
    tensors(path, w=("F6_E2M3", [4, 4], bytes(12)), b=("F32", [1], bytes(4)))
    plan = sfx.plan(checkpoint.structs(path), MESH, unmatched="replicate")
    assert checkpoint.load(path, plan)["b"].shape == (1,)


@reported("public F7", f"{FOREIGN}::test_both_halves_of_t5x")
def both_halves_of_t5x(folder):
    zarr(folder, "target.kernel", np.ones((8, 4), np.float32), chunks=[4, 4])
    spec = {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": {"driver": "file", "path": "target.kernel/"},
        "metadata": {"shape": [8, 4], "chunks": [4, 4]},
    }
    target = {"kernel": spec, "scale": np.ones(4, np.float32)}
    state = {"step": np.int32(7), "param_states": {}}
    content = {"version": 3, "optimizer": {"state": state, "target": target}}
    (folder / "checkpoint").write_bytes(serialization.to_bytes(content))
    index = checkpoint.read_index(folder)
    assert sorted(index) == ["state/step", "target/kernel", "target/scale"]


@reported("public F7", f"{FOREIGN}::test_zip_files_are_told")
def an_unknown_file_beside_arrays(folder):
    zarr(folder, "w", np.ones(4, np.float32), chunks=[4])
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"data")
    with fails(CheckpointError, "holds zarr arrays, and 'pytorch_model.bin'"):
        checkpoint.read_index(folder)


KINDS = {
    "model.safetensors": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
        "git lfs pull",
    ),
    "model.gguf": (b"GGUF\x03\0\0\0" + bytes(64), "GGUF"),
    "empty.safetensors": (b"", "empty file"),
    "weights.npz": (b"PK\x03\x04" + bytes(64), "zip file"),
    "pytorch_model.bin": (b"PK\x03\x04" + bytes(64), "zip file"),
}


@reported("public F8", f"{FOREIGN}::test_other_kinds_of_files_are_told")
def files_of_another_kind(folder):
    for name, (data, text) in KINDS.items():
        kind = folder / pathlib.Path(name).stem
        kind.mkdir(exist_ok=True)
        (kind / name).write_bytes(data)
        for where in (kind / name, kind):
            with fails(CheckpointError, text):
                checkpoint.read_index(where)
        (kind / name).unlink()


@reported("public F8", f"{FOREIGN}::test_files_of_flax")
def a_file_of_flax(folder):
    path = folder / "flax_model.msgpack"
    path.write_bytes(serialization.to_bytes({"w": np.ones(4, np.float32)}))
    assert list(checkpoint.read_index(path)) == ["w"]


# F9: small ones.


@reported("public F9", "checkpoint/test_checkpoint_states.py::test_no_integer_changes")
def a_cast_to_a_bool(folder):
    checkpoint.save(folder / "c", {"n": jnp.array([5], jnp.int32)})
    plan = sfx.plan({"n": jnp.array([True])}, MESH, unmatched="replicate")
    with fails(CheckpointError, "n"):
        checkpoint.load(folder / "c", plan, dtype="plan")


@reported("public F9", "checkpoint/test_checkpoint_load.py")
def a_cast_that_overflows(folder):
    """Infinite, as in JAX: a cast rounds floats, and never integers."""
    checkpoint.save(folder / "c", {"n": jnp.array([1e6])})
    plan = sfx.plan({"n": jnp.zeros(1, jnp.float16)}, MESH, unmatched="replicate")
    assert checkpoint.load(folder / "c", plan, dtype="plan")["n"][0] == jnp.inf


@reported("public F9", f"{STATES}::test_an_unfinished_step_of_orbax")
def an_unfinished_step_of_orbax(folder):
    orbax(folder / "1", {"w": np.ones(8, np.float32)})
    (folder / "1").rename(folder / "1.orbax-checkpoint-tmp")
    with fails(CheckpointError, "orbax-checkpoint-tmp"):
        checkpoint.read_index(folder / "1.orbax-checkpoint-tmp")


@reported("public F9", "convert/test_map_laws.py")
def an_exact_path_beside_a_wildcard(folder):
    constant = sfx.From.constant(0.0, (2,), "float32")
    tree_map = TreeMap({"{p*}": "{p*}", "last_batch": constant})
    with fails(MapError, "two rules make it, `{p*}` and `last_batch`"):
        tree_map.apply({"w": jnp.ones(4), "last_batch": jnp.ones(2)})


@reported("public F9", "presets/test_hf_presets.py")
def tables_for_newer_models(folder):
    names = ("gpt_oss", "qwen3_next", "gemma3n", "llama4", "olmo2", "phi3", "glm4_moe")
    for name in (*names, "t5"):
        assert getattr(sfx.presets, name)()
    for name in ("llama4-scout", "gpt-oss-20b", "qwen3-next-80b"):
        assert any(name in known for known in sfx.presets.models.names()), name


@reported("public F9", "arrays/test_place_and_constrain.py")
def ids_of_64_bits(folder):
    ids = np.array([2**40] * 8)
    plan = sfx.plan({"ids": struct(8, dtype=jnp.int32)}, MESH, unmatched="replicate")
    with fails((PlanMismatchError, SpecError, ValueError), "int64"):
        sfx.shard({"ids": ids}, plan)


# A first day: B9, and what the moves met in files.


@reported("first day B9", f"{ALIGNING}::test_placeholders_and_constants_have_nothing")
def placeholders_have_nothing_to_shard(folder):
    params = {"w": struct(256, 512), "b": struct(16)}
    rules = sfx.PathRules([("w$", P("fsdp", "tensor")), ("b", P("fsdp"))])
    plan = sfx.plan(params, FT, paths=rules)
    for optimizer in (optax.adafactor(1e-3), optax.contrib.muon(1e-3)):
        for leaf in sfx.follow(optimizer.init, plan).leaves:
            assert not any("no rule covers" in str(why) for why in leaf.reasons)


@reported("moves F6", "checkpoint/test_manager.py::test_a_step_that_nobody_would_find")
def a_step_counted_in_floats(folder):
    with checkpoint.Manager(folder, keep=1) as manager:
        for step in (np.float32(100), -1, "x"):
            with fails(CheckpointError, "a step is a whole number"):
                manager.save(step, {"w": jnp.ones(4)})


@reported("moves F6", "checkpoint/test_manager.py::test_a_closed_manager_says_so")
def a_manager_that_is_closed(folder):
    with fails(CheckpointError, "is no number of steps"):
        checkpoint.Manager(folder, keep=1.5)  # pyright: ignore[reportArgumentType]
    with checkpoint.Manager(folder) as manager:
        manager.save(1, {"w": jnp.ones(4)})
    with fails(CheckpointError, "is closed"):
        manager.save(2, {"w": jnp.ones(4)})


@reported("moves F6", "checkpoint/test_manager.py::test_steps_are_whole_numbers_of_any")
def directories_that_are_no_steps(folder):
    with checkpoint.Manager(folder) as manager:
        manager.save(83, {"w": jnp.ones(4)})
    for name in ("step-99999", "step-0007"):
        (folder / name).mkdir()
    assert manager.steps() == (83,)


@reported("moves F11", f"{FOREIGN}::test_shapes_that_numpy_cannot_hold")
def a_shape_that_overflows(folder):
    tensors(folder / "x.safetensors", w=("F32", [0, 2**62, 2**62], b""))
    with fails(CheckpointError, "must have a product below"):
        checkpoint.read_index(folder / "x.safetensors")


@reported("moves F12", "checkpoint/test_manager.py::test_a_disk_that_fills_while_it_is")
def a_full_disk_names_the_path(folder):
    """By the test: a walk fills no disk."""


@reported("first day, part 1", "house/test_mistakes.py")
def a_path_that_exists(folder):
    file = folder / "c.safetensors"
    checkpoint.save(file, {"w": jnp.ones(4)})
    with fails(CheckpointError, "overwrite=True"):
        checkpoint.save(file, {"w": jnp.ones(4)})


@reported("full disks and steps", "house/test_first_day.py")
def a_joint_tree_under_the_plan_of_a_model(folder):
    model = {"w": jnp.ones((8, 8))}
    plan = sfx.plan(model, MESH, unmatched="replicate")
    with fails(PlanMismatchError, "ShardPlan.join"):
        checkpoint.save(folder / "c", {"model": model, "opt": model}, plan)
    checkpoint.save(folder / "c", {"model": model, "opt": model})
    with fails(CheckpointError, "ShardPlan.join"):
        checkpoint.load(folder / "c", plan)


@reported("asked and not got", "plan/test_asked_and_not_got.py")
def skipped_dimensions_have_a_reason(folder):
    tree = {"scale": struct(2**26)}
    rules = sfx.PathRules([(".*", sfx.fsdp("d", skip_dims=0))])
    mesh = sfx.MeshSpec({"d": 4})
    assert sfx.plan(tree, mesh, paths=rules)["scale"].reasons
    with fails(SpecError, "not sharded as asked"):
        sfx.plan(tree, mesh, paths=rules, strict=True)


@reported("asked and not got", "plan/test_asked_and_not_got.py")
def stacked_vectors_have_a_reason(folder):
    class Layers(eqx.Module):
        w: jax.ShapeDtypeStruct = sfx.field(stacked=("layers",))

    rules = sfx.PathRules([(".*", sfx.fsdp("d"))])
    axes = sfx.AxisRules([("layers", None)])
    mesh = sfx.MeshSpec({"d": 4})
    plan = sfx.plan(Layers(struct(64)), mesh, paths=rules, axes=axes)
    assert plan["w"].reasons
