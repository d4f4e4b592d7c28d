"""Loading and saving through a map: bitwise what the map makes of whole arrays."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file, save_file

import shardfx
from shardfx import CheckpointError, From, LeafTypeError, MapError, MeshSpec, PathRules, TreeMap, checkpoint


MESH = {"a": 2, "b": 4}
LLAMA = TreeMap(
    {
        "embed": "model.embed.weight",
        "layers/up": From("model.layers.{i}.up.weight").T.stack("i"),
        "layers/qkv": From.concat(
            [
                From("model.layers.{i}.q.weight"),
                From("model.layers.{i}.k.weight").repeat(2, unit=2),
                From("model.layers.{i}.v.weight").repeat(2, unit=2),
            ],
            shards=4,
        ).T.stack("i"),
    }
)


def hugging_face(layers=3, width=16):
    numbers = np.random.default_rng(0)
    files = {"model.embed.weight": numbers.normal(size=(32, width)).astype(np.float32)}
    for i in range(layers):
        for name, rows in (("up", 24), ("q", 16), ("k", 4), ("v", 4)):
            files[f"model.layers.{i}.{name}.weight"] = numbers.normal(size=(rows, width)).astype(np.float32)
    return files


def planned(whole, *rules):
    structs = {path: jax.ShapeDtypeStruct(one.shape, one.dtype) for path, one in whole.items()}
    mesh = MeshSpec(MESH).build(jax.devices())
    return shardfx.plan(structs, mesh, paths=PathRules([*rules, (".*", ())]))


def equal(tree, whole):
    assert tree.keys() == whole.keys()
    for path, one in whole.items():
        found = np.asarray(tree[path])
        assert found.dtype == one.dtype and found.shape == one.shape and found.tobytes() == one.tobytes(), path


RULES = (("embed", jax.P(("a", "b"))), ("up", jax.P(None, "b", "a")), ("qkv", jax.P(None, "a", "b")))


@pytest.mark.parametrize("rules", [RULES, (("layers", jax.P(None, "b")),), ()])
def test_a_layout_is_loaded_into_another_and_saved_back(tmp_path, rules):
    files = hugging_face()
    save_file(files, tmp_path / "model.safetensors")
    whole = LLAMA.apply(files)
    made = planned(whole, *rules)
    tree = checkpoint.load(tmp_path, made, LLAMA)
    equal(tree, whole)
    assert all(tree[path].sharding == made.shardings[path] for path in whole)
    checkpoint.save(tmp_path / "again", tree, made, map=LLAMA.inverse(), like=files)
    again = load_file(tmp_path / "again" / "model.safetensors")
    equal(again, files)


def test_an_exported_checkpoint_is_a_plain_one_of_its_own_layout(tmp_path):
    files = hugging_face()
    tree = LLAMA.apply(files)
    made = planned(tree, *RULES)
    checkpoint.save(tmp_path / "out", shardfx.shard(tree, made), made, map=LLAMA.inverse(), like=files, file_bytes=4000)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert "plan.json" not in names and "model.safetensors.index.json" in names and len(names) > 3
    index = checkpoint.read_index(tmp_path / "out")
    # What the loader of Hugging Face's libraries asks of a file before it reads it.
    assert index.metadata == {"format": "pt"}
    assert {entry.path for entry in index.entries} == files.keys()
    with pytest.raises(CheckpointError, match="missing"):
        checkpoint.saved_plan(tmp_path / "out")


def test_each_process_reads_only_what_its_shards_are_made_of(tmp_path):
    files = hugging_face(width=64)
    save_file(files, tmp_path / "model.safetensors")
    whole = LLAMA.apply(files)
    made = planned(whole, ("layers", jax.P(None, None, ("a", "b"))), ("embed", jax.P(("a", "b"))))
    reads = checkpoint.plan_reads(checkpoint.read_index(tmp_path), made.off(), LLAMA, processes=8, gap_bytes=1)
    total = sum(array.nbytes for array in whole.values())
    assert [one.needed_bytes for one in reads.processes] == [total // 8] * 8 and reads.excess_bytes == 0


def test_a_stack_of_experts_within_layers(tmp_path):
    files = {
        f"l.{i}.experts.{e}.w": np.full((4, 6), 10 * i + e, np.float32) + np.arange(6, dtype=np.float32)
        for i in range(3)
        for e in range(4)
    }
    experts = TreeMap({"w": From("l.{i}.experts.{e}.w").T.stack("e").stack("i")})
    save_file(files, tmp_path / "model.safetensors")
    whole = experts.apply(files)
    assert whole["w"].shape == (3, 4, 6, 4)
    equal(checkpoint.load(tmp_path, planned(whole, ("w", jax.P(None, "b", "a"))), experts), whole)


def test_blocks_of_fp8_are_scaled_on_the_way(tmp_path):
    numbers = np.random.default_rng(1)
    files = {
        "w": numbers.normal(size=(300, 264)).astype(jnp.float8_e4m3fn),
        "s": numbers.uniform(size=(3, 3)).astype(np.float32),
    }
    dequantised = TreeMap({"w": From("w").scale("s", block=(128, 128)).cast("bfloat16").T})
    save_file(files, tmp_path / "model.safetensors")
    whole = dequantised.apply(files)
    for rules in ((("w", jax.P("b", "a")),), (("w", jax.P("a")),), ()):
        equal(checkpoint.load(tmp_path, planned(whole, *rules), dequantised), whole)
    wide = {"w": whole["w"].astype(np.float32)}
    loaded = checkpoint.load(tmp_path, planned(wide, ("w", jax.P("a"))), dequantised, dtype="plan")
    equal(loaded, wide)


def test_elements_that_alternate_are_taken_apart_in_memory(tmp_path):
    files = {"gate_up": np.arange(64 * 2000, dtype=np.float32).reshape(64, 2000)}
    save_file(files, tmp_path / "model.safetensors")
    halves = TreeMap(
        {
            "gate": From("gate_up").split(1, -1, 2).at(0, dim=2),
            "up": From("gate_up").split(1, -1, 2).at(1, dim=2),
        }
    )
    whole = halves.apply(files)
    np.testing.assert_array_equal(whole["up"], files["gate_up"][:, 1::2])
    equal(checkpoint.load(tmp_path, planned(whole, (".*", jax.P("a", "b"))), halves), whole)


def test_a_take_is_a_case_of_a_map(tmp_path):
    files = hugging_face()
    save_file(files, tmp_path / "model.safetensors")
    names = tuple(f"model.layers.{i}.up.weight" for i in range(3))
    whole = {"up": LLAMA.apply(files)["layers/up"]}
    made = planned(whole, ("up", jax.P(None, "b", "a")))
    equal(checkpoint.load(tmp_path, made, rename={"up": checkpoint.Take(names, transpose=(1, 0))}), whole)


def test_casts_and_constants(tmp_path):
    files = {"w": np.linspace(-3, 3, 64, dtype=np.float32).reshape(8, 8)}
    save_file(files, tmp_path / "model.safetensors")
    made = TreeMap(
        {
            "low": From("w").cast("bfloat16"),
            "both": From("w").cast("bfloat16").cast("float32"),
            "steps": From.constant(7, (8,), "int32"),
            "padded": From("w").pad_to(16, dim=1, value=2),
        }
    )
    whole = made.apply(files)
    sharded = planned(whole, (".*", jax.P("b")))
    equal(checkpoint.load(tmp_path, sharded, made), whole)
    wide = {path: one if path == "steps" else one.astype(np.float16) for path, one in whole.items()}
    equal(checkpoint.load(tmp_path, planned(wide), made, dtype=jnp.float16), wide)
    tree = shardfx.shard(whole, sharded)
    lower = TreeMap(
        {
            "w": From("padded").slice(0, 8, dim=1).cast("float16"),
            "c": From.constant(1.5, (2, 2), "float32"),
            "r": From("low").repeat(3, dim=1).cast("float32"),
        },
        drop=["both", "steps"],
    )
    checkpoint.save(tmp_path / "out", tree, sharded, map=lower)
    equal(load_file(tmp_path / "out" / "model.safetensors"), lower.apply(whole))


def test_a_map_casts_to_what_a_file_can_hold(tmp_path):
    whole = {"w": np.arange(8, dtype=np.float32).reshape(2, 4)}
    made = planned(whole)
    tree = shardfx.shard(whole, made)
    # The format has no name for four bits; it is in the file's metadata.
    checkpoint.save(tmp_path / "four.safetensors", tree, made, map=TreeMap({"w": From("w").cast("int4")}))
    four = {"w": whole["w"].astype(jnp.int4)}
    equal(checkpoint.load(tmp_path / "four.safetensors", planned(four)), four)
    with pytest.raises(LeafTypeError, match="`w` is complex128, which safetensors cannot hold; cast it"):
        checkpoint.save(tmp_path / "no.safetensors", tree, made, map=TreeMap({"w": From("w").cast("complex128")}))
    assert not (tmp_path / "no.safetensors").exists()


def test_keys_are_stacked_whole(tmp_path):
    keys = {"k.0": jax.random.split(jax.random.key(0), 4), "k.1": jax.random.split(jax.random.key(1), 4)}
    mesh = MeshSpec(MESH).build(jax.devices())
    checkpoint.save(tmp_path / "keys", keys, shardfx.plan(keys, mesh, paths=PathRules([(".*", ())])))
    stacked = TreeMap({"k": From("k.{i}").stack("i").T})
    struct = jax.ShapeDtypeStruct((4, 2), keys["k.0"].dtype)
    made = shardfx.plan({"k": struct}, mesh, paths=PathRules([(".*", jax.P("b", "a"))]))
    found = checkpoint.load(tmp_path / "keys", made, stacked)["k"]
    expected = jnp.stack([jax.random.key_data(keys["k.0"]), jax.random.key_data(keys["k.1"])]).transpose(1, 0, 2)
    np.testing.assert_array_equal(np.asarray(jax.random.key_data(found)), np.asarray(expected))
    checkpoint.save(tmp_path / "again", {"k": found}, made, map=stacked.inverse(), like=keys)
    again = checkpoint.load(tmp_path / "again", shardfx.plan(keys, mesh, paths=PathRules([(".*", ())])))
    for path, one in keys.items():
        assert again[path].dtype == one.dtype
        np.testing.assert_array_equal(jax.random.key_data(again[path]), jax.random.key_data(one))


def test_all_that_is_wrong_is_said_before_anything_is_read(tmp_path):
    files = hugging_face()
    save_file({**files, "extra.0": files["model.embed.weight"]}, tmp_path / "model.safetensors")
    whole = {**LLAMA.apply(files), "layers/upp": files["model.embed.weight"]}
    whole["embed"] = whole["embed"].T
    with pytest.raises(MapError) as caught:
        checkpoint.load(tmp_path, planned(whole), LLAMA)
    text = str(caught.value)
    assert "in 3 places; nothing was read or moved" in text
    assert "layers/upp: no rule makes it; near the rule for `layers/up`" in text
    assert "torch keeps weights as [out, in]: From('model.embed.weight').T" in text
    assert 'source `extra.0`: nothing is made of it; say so if that is meant: `drop=["extra.0"]`' in text
    made = planned(LLAMA.apply(files))
    with pytest.raises(CheckpointError, match="give `rename` or `map`, not both"):
        checkpoint.load(tmp_path, made, LLAMA, rename={})
    with pytest.raises(MapError, match="does not say what it leads to"):
        checkpoint.save(tmp_path / "x", LLAMA.apply(files), made, map=LLAMA.inverse())
    with pytest.raises(LeafTypeError, match="is scaled, which takes two arrays at a time"):
        scaled = TreeMap({"w": From("layers/up").scale("embed", block=(1, 1, 1))}, drop=["layers/qkv"])
        whole = {"layers/up": np.ones((2, 2, 2), np.float32), "embed": np.ones((2, 2, 2), np.float32)}
        checkpoint.save(tmp_path / "x", whole, planned(whole), map=TreeMap(dict(scaled.steps[0].made)))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn", "complex64"])
def test_dtypes_that_numpy_knows_by_no_name_are_padded_and_turned(tmp_path, dtype):
    arrays = {"w": (np.arange(24).reshape(8, 3) % 5).astype(dtype)}
    made = TreeMap({"x": From("w").T.pad_to(4, dim=0), "y": From("w").repeat(2).split(0, 2, -1)})
    checkpoint.save(tmp_path / "in", shardfx.shard(arrays, planned(arrays)), planned(arrays))
    whole = made.apply(arrays)
    tree = checkpoint.load(tmp_path / "in", planned(whole, ("y", jax.P(None, "b"))), made)
    equal(tree, whole)
    checkpoint.save(tmp_path / "out", tree, planned(whole), map=made.inverse(), like=arrays)
    equal(checkpoint.load(tmp_path / "out", planned(arrays)), arrays)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_loading_with_a_map_is_loading_and_then_mapping(tmp_path_factory, data):
    from maps import maps, written

    made, arrays = written(data.draw(maps(dtypes=("float32", "bfloat16", "int8", "bool"))))
    directory = tmp_path_factory.mktemp("law")
    save_file(arrays, directory / "model.safetensors")
    whole = made.apply(arrays)
    specs = []
    for path, one in whole.items():
        axes = [data.draw(st.sampled_from([None, "a", "b", ("a", "b")])) for _ in one.shape]
        found = shardfx.correct(jax.P(*_once(axes)), one.shape, MeshSpec(MESH)).spec
        specs.append((f"^{path}$", found))
    plan = planned(whole, *specs)
    tree = checkpoint.load(directory, plan, made)
    equal(tree, whole)
    checkpoint.save(directory / "same", tree, plan)
    checkpoint.save(directory / "out", shardfx.shard(arrays, planned(arrays)), planned(arrays), map=made)
    equal(load_file(directory / "out" / "model.safetensors"), whole)


def _once(axes):
    used = set()
    for entry in axes:
        names = (entry,) if isinstance(entry, str) else entry or ()
        yield entry if not used & {*names} else None
        used |= {*names}


def test_a_map_reads_its_json_from_a_file(tmp_path):
    (tmp_path / "map.json").write_text(LLAMA.to_json())
    assert TreeMap.from_json((tmp_path / "map.json").read_text()) == LLAMA
    assert json.loads(LLAMA.to_json())["version"] == 1
