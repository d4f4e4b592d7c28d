"""Loading and saving through a map give, bit by bit, the arrays that the map makes of
whole arrays.
"""

import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from moves import through_programs
from safetensors.numpy import load_file, save_file

import shardfx
from shardfx import From, MeshSpec, PathRules, TreeMap, checkpoint
from shardfx.errors import CheckpointError, LeafTypeError, MapError


MESH = {"a": 2, "b": 4}
LLAMA = TreeMap(
    {
        "embed": "model.embed.weight",
        "layers/up": From("model.layers.{i}.up.weight").T.stack("i"),
        "layers/qkv": (
            From.concat(
                [
                    From("model.layers.{i}.q.weight"),
                    From("model.layers.{i}.k.weight").repeat(2, unit=2),
                    From("model.layers.{i}.v.weight").repeat(2, unit=2),
                ],
                shards=4,
            ).T.stack("i")
        ),
    }
)


def hugging_face(layers=3, width=16):
    numbers = np.random.default_rng(0)
    array = numbers.normal(size=(32, width)).astype(np.float32)
    files = {"model.embed.weight": array}
    for i in range(layers):
        for name, rows in (("up", 24), ("q", 16), ("k", 4), ("v", 4)):
            array = numbers.normal(size=(rows, width))
            files[f"model.layers.{i}.{name}.weight"] = array.astype(np.float32)
    return files


def planned(whole, *rules):
    structs = {
        path: jax.ShapeDtypeStruct(array.shape, array.dtype)
        for path, array in whole.items()
    }
    mesh = MeshSpec(MESH).build(jax.devices())
    return shardfx.plan(structs, mesh, paths=PathRules([*rules, (".*", ())]))


def equal(tree, whole):
    assert tree.keys() == whole.keys()
    for path, array in whole.items():
        leaf = np.asarray(tree[path])
        assert leaf.dtype == array.dtype, path
        assert leaf.shape == array.shape, path
        assert leaf.tobytes() == array.tobytes(), path


def test_an_exported_checkpoint_is_a_plain_one_of_its_own_layout(tmp_path):
    files = hugging_face()
    tree = LLAMA.apply(files)
    plan = planned(
        tree,
        ("embed", P(("a", "b"))),
        ("up", P(None, "b", "a")),
        ("qkv", P(None, "a", "b")),
    )
    checkpoint.save(
        tmp_path / "out", tree, plan, map=LLAMA.inverse(), like=files, file_bytes=4000
    )
    equal(checkpoint.load(tmp_path / "out", planned(files)), files)
    equal(checkpoint.load(tmp_path / "out", plan, LLAMA), tree)
    index = checkpoint.read_index(tmp_path / "out" / "model.safetensors.index.json")
    # What the loader of Hugging Face's libraries asks of a file before it reads it.
    assert index.metadata == {"format": "pt"}
    with pytest.raises(CheckpointError, match="holds no plan"):
        checkpoint.saved_plan(tmp_path / "out")


def test_each_process_reads_only_what_its_shards_are_made_of(tmp_path, monkeypatch):
    files = hugging_face(width=64)
    save_file(files, tmp_path / "model.safetensors")
    whole = LLAMA.apply(files)
    plan = planned(
        whole, ("layers", P(None, None, ("a", "b"))), ("embed", P(("a", "b")))
    )
    reads = checkpoint.plan_reads(
        checkpoint.read_index(tmp_path), plan.off(), LLAMA, processes=8, gap_bytes=1
    )
    total = sum(array.nbytes for array in whole.values())
    needed_bytes = [process.needed_bytes for process in reads.processes]
    assert needed_bytes == [total // 8] * 8
    assert reads.excess_bytes == 0
    read = []
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda *arguments: read.append(preadv(*arguments)) or read[-1]
    )
    checkpoint.load(tmp_path, plan, LLAMA)
    expected = checkpoint.plan_reads(
        checkpoint.read_index(tmp_path), plan, LLAMA
    ).read_bytes
    assert sum(read) == expected


def test_blocks_of_fp8_are_scaled_on_the_way(tmp_path):
    numbers = np.random.default_rng(1)
    files = {
        "w": numbers.normal(size=(300, 264)).astype(jnp.float8_e4m3fn),
        "s": numbers.uniform(size=(3, 3)).astype(np.float32),
    }
    dequantised = TreeMap(
        {"w": From("w").scale("s", block=(128, 128)).cast("bfloat16").T}
    )
    save_file(files, tmp_path / "model.safetensors")
    whole = dequantised.apply(files)
    for rules in ((("w", P("b", "a")),), (("w", P("a")),), ()):
        equal(checkpoint.load(tmp_path, planned(whole, *rules), dequantised), whole)
    reads = checkpoint.plan_reads(
        checkpoint.read_index(tmp_path), planned(whole).off(), dequantised
    )
    assert reads.needed_bytes >= sum(array.nbytes for array in files.values())
    wide = {"w": whole["w"].astype(np.float32)}
    loaded = checkpoint.load(
        tmp_path, planned(wide, ("w", P("a"))), dequantised, dtype="plan"
    )
    equal(loaded, wide)


def test_elements_that_alternate_are_taken_apart_in_memory(tmp_path):
    values = np.arange(64 * 2000, dtype=np.float32).reshape(64, 2000)
    files = {"gate_up": values}
    save_file(files, tmp_path / "model.safetensors")
    rules = {
        name: From("gate_up").split(1, -1, 2).at(part, dim=2)
        for part, name in enumerate(("gate", "up"))
    }
    halves = TreeMap(rules)
    gate_up = files["gate_up"][:, 1::2]
    whole = {"gate": files["gate_up"][:, ::2], "up": gate_up}
    loaded = checkpoint.load(tmp_path, planned(whole, (".*", P("a", "b"))), halves)
    equal(loaded, whole)


def test_constants_are_loaded_cast_and_saved(tmp_path):
    files = {"w": np.linspace(-3, 3, 64, dtype=np.float32).reshape(8, 8)}
    save_file(files, tmp_path / "model.safetensors")
    rules = {
        "steps": From.constant(7, (8,), "int32"),
        "padded": From("w").pad_to(16, dim=1, value=2),
    }
    constants = TreeMap(rules)
    whole = constants.apply(files)
    loaded = checkpoint.load(tmp_path, planned(whole, (".*", P("b"))), constants)
    equal(loaded, whole)
    wide = whole | {"padded": whole["padded"].astype(np.float16)}
    loaded = checkpoint.load(tmp_path, planned(wide), constants, dtype=jnp.float16)
    equal(loaded, wide)
    checkpoint.save(tmp_path / "out", files, map=constants)
    equal(load_file(tmp_path / "out" / "model.safetensors"), whole)


def test_a_map_casts_to_what_a_file_can_hold(tmp_path):
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    whole = {"w": values}
    plan = planned(whole)
    tree = shardfx.shard(whole, plan)
    # The format has no name for four bits; it is in the file's metadata.
    tree_map = TreeMap({"w": From("w").cast("int4")})
    checkpoint.save(
        tmp_path / "four.safetensors",
        tree,
        plan,
        map=tree_map,
    )
    four = {"w": whole["w"].astype(jnp.int4)}
    equal(checkpoint.load(tmp_path / "four.safetensors", planned(four)), four)
    with pytest.raises(
        LeafTypeError, match="`w` is complex128, which safetensors cannot hold; cast it"
    ):
        checkpoint.save(
            tmp_path / "no.safetensors",
            tree,
            plan,
            map=TreeMap({"w": From("w").cast("complex128")}),
        )
    assert not (tmp_path / "no.safetensors").exists()


def test_keys_are_stacked_whole(tmp_path):
    keys = {
        "k.0": jax.random.split(jax.random.key(0), 4),
        "k.1": jax.random.split(jax.random.key(1), 4),
    }
    mesh = MeshSpec(MESH).build(jax.devices())
    rules = PathRules([(".*", ())])
    sharding_plan = shardfx.plan(keys, mesh, paths=rules)
    checkpoint.save(tmp_path / "keys", keys, sharding_plan)
    rules = {"k": From("k.{i}").stack("i").T}
    stacked = TreeMap(rules)
    struct = jax.ShapeDtypeStruct((4, 2), keys["k.0"].dtype)
    rules = PathRules([(".*", P("b", "a"))])
    plan = shardfx.plan({"k": struct}, mesh, paths=rules)
    loaded_keys: Any = checkpoint.load(tmp_path / "keys", plan, stacked)["k"]
    key_data = jax.random.key_data(keys["k.0"])
    expected = jnp.stack([key_data, jax.random.key_data(keys["k.1"])]).transpose(
        1, 0, 2
    )
    np.testing.assert_array_equal(
        np.asarray(jax.random.key_data(loaded_keys)), np.asarray(expected)
    )
    checkpoint.save(
        tmp_path / "again", {"k": loaded_keys}, plan, map=stacked.inverse(), like=keys
    )
    rules = PathRules([(".*", ())])
    sharding_plan = shardfx.plan(keys, mesh, paths=rules)
    again = checkpoint.load(tmp_path / "again", sharding_plan)
    for path, key_array in keys.items():
        assert again[path].dtype == key_array.dtype
        key_data = jax.random.key_data(again[path])
        np.testing.assert_array_equal(key_data, jax.random.key_data(key_array))


def test_all_that_is_wrong_is_said_before_anything_is_read(tmp_path):
    files = hugging_face()
    save_file(
        {**files, "extra.0": files["model.embed.weight"]},
        tmp_path / "model.safetensors",
    )
    whole = {**LLAMA.apply(files), "layers/upp": files["model.embed.weight"]}
    whole["embed"] = whole["embed"].T
    with pytest.raises(MapError) as caught:
        checkpoint.load(tmp_path, planned(whole), LLAMA)
    text = str(caught.value)
    assert "in 3 places; nothing was read or moved" in text
    assert "layers/upp: no rule makes it; near the rule for `layers/up`" in text
    assert "torch keeps weights as [out, in]: From('model.embed.weight').T" in text
    assert (
        "source `extra.0`: nothing is made of it; say so if that is meant:"
        ' `drop=["extra.0"]`' in text
    )
    plan = planned(LLAMA.apply(files))
    with pytest.raises(MapError, match="does not say what its target is"):
        checkpoint.save(tmp_path / "x", LLAMA.apply(files), plan, map=LLAMA.inverse())
    with pytest.raises(
        LeafTypeError, match="is scaled, which takes two arrays at a time"
    ):
        scaled = TreeMap(
            {"w": From("layers/up").scale("embed", block=(1, 1, 1))},
            drop=["layers/qkv"],
        )
        whole = {
            "layers/up": np.ones((2, 2, 2), np.float32),
            "embed": np.ones((2, 2, 2), np.float32),
        }
        tree_map = TreeMap(dict(scaled.steps[0].rules))
        checkpoint.save(
            tmp_path / "x",
            whole,
            planned(whole),
            map=tree_map,
        )
    assert not (tmp_path / "x").exists()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_loading_with_a_map_is_loading_and_then_mapping(tmp_path_factory, data):
    from maps import maps, written

    dtypes = (
        "float32",
        "bfloat16",
        "int8",
        "bool",
        "float8_e5m2",
        "float8_e4m3fn",
        "complex64",
    )
    drawn, arrays = data.draw(maps(dtypes=dtypes))
    if not any(np.iscomplexobj(array) for array in arrays.values()):
        for to in data.draw(
            st.lists(st.sampled_from(["bfloat16", "float32", "int8"]), max_size=2)
        ):
            drawn = {path: recipe.cast(to) for path, recipe in drawn.items()}
    tree_map, arrays = written((drawn, arrays))
    directory = tmp_path_factory.mktemp("law")
    save_file(arrays, directory / "model.safetensors")
    whole = tree_map.apply(arrays)
    specs = []
    for path, array in whole.items():
        axes = [
            data.draw(st.sampled_from([None, "a", "b", ("a", "b")]))
            for _ in array.shape
        ]
        decision = shardfx.correct(P(*_once(axes)), array.shape, MeshSpec(MESH))
        spec = decision.spec
        specs.append((f"^{path}$", spec))
    plan = planned(whole, *specs)
    tree = checkpoint.load(directory, plan, tree_map)
    equal(tree, whole)
    checkpoint.save(directory / "same", tree, plan)
    sharded = shardfx.shard(arrays, planned(arrays))
    checkpoint.save(
        directory / "out",
        sharded,
        planned(arrays),
        map=tree_map,
    )
    equal(checkpoint.load(directory / "out", plan), whole)


def _once(axes):
    used = set()
    for entry in axes:
        if isinstance(entry, str):
            names = (entry,)
        else:
            names = entry or ()
        yield entry if not used & {*names} else None
        used |= {*names}


FLOATS = [
    np.nan,
    np.inf,
    -np.inf,
    3e9,
    -3e9,
    2.0**31,
    -(2.0**31),
    1e30,
    300.7,
    -1.5,
    7.9,
    -8.9,
    0.5,
    255.9,
    -0.0,
    127,
]
INTEGERS = ("int4", "int8", "int32", "uint4", "uint8", "uint32")


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_floats_become_the_same_integers_everywhere(tmp_path, stored):
    with np.errstate(all="ignore"):
        x = np.array(FLOATS, np.float32).astype(jnp.dtype(stored))
    expected = jax.jit(lambda x: {to: x.astype(to) for to in INTEGERS})(x)
    rules = {}
    whole = {}
    for to, array in jax.tree.map(np.asarray, expected).items():
        # The second is cast on the way to a wider dtype, the third backwards.
        rules |= {
            f"y/{to}": From("x").cast(to),
            f"z/{to}": From("x").cast(to).cast("float32"),
        }
        rules |= {f"t/{to}": From("x").reshape(4, 4).cast(to).T}
        whole |= {
            f"y/{to}": array,
            f"z/{to}": array.astype(np.float32),
            f"t/{to}": array.reshape(4, 4).T,
        }
    cast = TreeMap(rules)
    equal(cast.apply({"x": x}), whole)
    equal(jax.jit(cast.apply)({"x": x}), whole)
    plan = planned(whole, ("z", P("b")))
    source = planned({"x": x}, ("x", P("a")))
    placed = shardfx.shard({"x": x}, source)
    for tree in ({"x": x}, placed):
        equal(shardfx.reshard(tree, plan, map=cast), whole)
    equal(through_programs(placed, plan, map=cast), whole)
    checkpoint.save(tmp_path / "x.safetensors", {"x": x}, source)
    equal(checkpoint.load(tmp_path / "x.safetensors", plan, cast), whole)
    rules: dict[str, From | str] = dict(cast.rules)
    for path in rules:
        if path.startswith("y"):
            rules[path] = "x"
    plain = TreeMap(rules, casts=True)
    equal(checkpoint.load(tmp_path / "x.safetensors", plan, plain), whole)
    checkpoint.save(tmp_path / "y.safetensors", {"x": x}, source, map=cast)
    equal(checkpoint.load(tmp_path / "y.safetensors", plan), whole)


def test_a_number_that_is_needed_several_times_in_a_leaf(tmp_path):
    """Scales of whole tensors are arrays without dimensions."""
    files = {"s": np.array(2.0, np.float32), "t": np.array(3.0, np.float32)}
    save_file(files, tmp_path / "s.safetensors")
    rule = From("s").reshape(1)
    rules = {
        "a": rule.repeat(2),
        "b": From.concat([From(name).reshape(1) for name in ("s", "t", "s")]),
        "c": From.stacked([From("s"), From("s")]).repeat(4),
    }
    repeated = TreeMap(rules)
    whole = repeated.apply(files)
    assert whole["b"].tolist() == [2, 3, 2]
    plan = planned(whole, ("c", P("b")))
    equal(checkpoint.load(tmp_path, plan, repeated), whole)
    needed_bytes = checkpoint.plan_reads(
        checkpoint.read_index(tmp_path), plan.off(), repeated
    ).needed_bytes
    assert needed_bytes > 0


@pytest.mark.parametrize("last", [False, True])
def test_many_small_arrays_of_one_leaf(tmp_path, last):
    """An array of another shape is between them, one is needed twice, and one in part."""
    files = {
        f"l.{i}.e.{e}.{name}": np.full((4, 6), 10 * i + e, np.float32)
        for i, e, name in itertools.product((0, 1), (0, 1), "ab")
    }
    array = np.ones((4, 6), np.float32)
    values = np.arange(48, dtype=np.float32).reshape(8, 6)
    files |= {
        "x.0": array,
        "x.1": values,
    }
    save_file(files, tmp_path / "model.safetensors")
    others = From.stacked([From("x.0"), From("x.1").slice(4, 8)] * 2).reshape(
        2, 2, 4, 6
    )
    experts = (
        From("l.{i}.e.{e}.a")
        .T.stack("e", dim=2 if last else 0)
        .stack("i")
        .cast("bfloat16")
    )
    parts = [From("l.{i}.e.{e}.b").stack("e").stack("i"), others]
    rules = {
        "one": experts,
        "two": From.concat(parts),
    }
    tree_map = TreeMap(rules)
    whole = tree_map.apply(files)
    for spec in (P(None, "a"), P(None, None, "a", None), P()):
        plan = planned(whole, (".*", spec))
        equal(checkpoint.load(tmp_path, plan, tree_map), whole)
        reads = checkpoint.plan_reads(
            checkpoint.read_index(tmp_path),
            plan.off(),
            tree_map,
            processes=8,
            gap_bytes=1,
        )
        assert reads.read_bytes >= reads.needed_bytes
