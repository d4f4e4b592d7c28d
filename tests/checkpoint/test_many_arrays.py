"""Thousands of small arrays are planned together: what they become is what a map makes
of them one by one.
"""

import dataclasses
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import shardfx
from shardfx import From, MeshSpec, PathRules, TreeMap, checkpoint
from shardfx.checkpoint import FileArray


MESH = MeshSpec({"x": 2, "y": 4}).build(jax.devices())
EXPERTS = From("layers.{i}.experts.{j}.w")


def expert_tensors() -> dict[str, np.ndarray]:
    """A matrix for each of 12 experts in each of 4 layers, no two alike."""
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensors = {}
    for layer in range(4):
        for expert in range(12):
            path = f"layers.{layer}.experts.{expert}.w"
            tensors[path] = numbers + 1000 * layer + 100_000 * expert
    return tensors


TENSORS = expert_tensors()
STACKS = {
    "two stacks": EXPERTS.stack("j").stack("i"),
    "experts outside": EXPERTS.stack("i").stack("j"),
    "the last dimension": EXPERTS.stack("j", dim=-1).stack("i"),
    "transposed": EXPERTS.T.stack("j").stack("i"),
    "a matrix": EXPERTS.stack("j").stack("i").reshape(-1, 6),
    "side by side": EXPERTS.stack("j", dim=1).stack("i").merge(2, 2),
    "halves": EXPERTS.split(1, 2, 3).stack("j").stack("i").transpose(0, 1, 3, 2, 4),
    "cast": EXPERTS.cast("bfloat16").stack("j").stack("i"),
}
SPECS = [P(), P("x"), P("y"), P(None, "y"), P(("x", "y")), P("x", "y")]


def plan_of(arrays: Mapping[str, Any], spec: P) -> shardfx.ShardPlan:
    """A plan for arrays or structs of these shapes, all with one spec."""
    structs = {}
    for path, array in arrays.items():
        structs[path] = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return shardfx.plan(structs, MESH, paths=PathRules([("", spec)]))


def assert_equal(loaded: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for path, array in expected.items():
        np.testing.assert_array_equal(np.asarray(loaded[path]), np.asarray(array))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("many") / "model.safetensors")
    save_file(TENSORS, path)
    return path


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_of_many_is_loaded_and_saved_back(name, file, tmp_path):
    tree_map = TreeMap({"w": STACKS[name]})
    stacked = tree_map.apply(TENSORS)
    stack = stacked["w"]
    like = {path: jax.ShapeDtypeStruct((4, 6), np.float32) for path in TENSORS}
    rounded = {}
    for path, tensor in TENSORS.items():
        rounded[path] = tensor.astype(stack.dtype).astype(np.float32)
    for number, spec in enumerate(SPECS):
        decision = shardfx.correct(spec, stack.shape, MeshSpec.of(MESH))
        plan = plan_of(stacked, decision.spec)
        loaded = checkpoint.load(file, plan, tree_map)
        assert_equal(loaded, stacked)

        saved_path = str(tmp_path / f"{number}.safetensors")
        checkpoint.save(saved_path, loaded, plan, map=tree_map.inverse(), like=like)
        saved = load_file(saved_path)
        assert saved.keys() == TENSORS.keys()
        assert_equal(saved, rounded)


def test_parts_of_unequal_kinds_are_bound_one_by_one(file, tmp_path):
    # One expert has another dtype, so the stack is an error that names it.
    tensors: dict[str, Any] = dict(TENSORS)
    tensors["layers.2.experts.7.w"] = tensors["layers.2.experts.7.w"].astype(np.int32)
    path = str(tmp_path / "model.safetensors")
    save_file(tensors, path)
    plan = plan_of({"w": np.zeros((4, 12, 4, 6), np.float32)}, P("x"))
    with pytest.raises(shardfx.errors.MapError, match="different dtypes"):
        checkpoint.load(path, plan, TreeMap({"w": STACKS["two stacks"]}))
    # `at` selects another entry of each, so the parts differ in more than their paths.
    rules = {"w": From("s").at("j").stack("j", count=20)}
    rows = TreeMap(rules)
    stack = np.arange(100.0, dtype=np.float32).reshape(20, 5)
    applied = rows.apply({"s": stack})["w"]
    np.testing.assert_array_equal(applied, stack)


def test_many_small_arrays_keep_their_bytes(tmp_path):
    dtypes = [np.float32, np.int8, jnp.bfloat16, np.bool_, jnp.int4, np.uint16]
    rng = np.random.default_rng(0)
    tree = {}
    for number in range(120):
        shape = [(), (3,), (2, 0), (2, 5), (1, 1, 4)][number % 5]
        values = rng.integers(0, 2, shape).astype(dtypes[number % 6])
        kind = number % 3
        if kind == 1:
            values = jnp.asarray(values)
        elif kind == 2:
            values = np.asfortranarray(values)
        tree[f"w{number}"] = values
    tree["key"] = jax.random.split(jax.random.key(1), 3)
    path = str(tmp_path / "model.safetensors")
    checkpoint.save(path, tree)
    rules = PathRules([(".*", P())])
    plan = shardfx.plan(tree, MESH, paths=rules)
    loaded = checkpoint.load(path, plan)
    for name, values in tree.items():
        assert loaded[name].dtype == values.dtype
        if name != "key":
            np.testing.assert_array_equal(np.asarray(loaded[name]), np.asarray(values))
    keys = jax.random.key_data(loaded["key"])
    key_data = jax.random.key_data(tree["key"])
    np.testing.assert_array_equal(keys, key_data)


@pytest.mark.parametrize("odd", [True, 1.0, "1", [1], -1, 2**63])
def test_a_shape_that_looks_like_one_before_is_checked(odd, tmp_path):
    # The checks of a dtype and a shape are done once, for equal texts alone.
    row = '{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    text = json.dumps([odd])
    bad = row.replace("[1]", text)
    header = '{"a":' + row % (0, 1) + ',"b":' + bad % (1, 2) + "}"
    data = header.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + b"\1\2")
    with pytest.raises(shardfx.errors.CheckpointError):
        checkpoint.read_index(path)


CANONICAL = (
    '{"__metadata__":{"format":"pt","n":"\\u00e9"},'
    '"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
    '"b \u00e9":{"dtype":"U8","shape":[],"data_offsets":[24,25]},'
    '"c":{"dtype":"BF16","shape":[0,7],"data_offsets":[25,25]},'
    '"d":{"dtype":"F4","shape":[2],"data_offsets":[25,26]},'
    '"e":{"dtype":"F32","shape":[1],"data_offsets":[26,30]}}  '
)
TOKENS = [*'{}[]",:0123456789\\ -.', "a", "b", "F32", "shape", "\n", "\x7f", "\ud7ff"]


def index_of(text: str, file: Path) -> checkpoint.Index | None:
    """The index of a file with this header and 30 bytes; `None` if it is refused."""
    data = text.encode()
    file.write_bytes(len(data).to_bytes(8, "little") + data + bytes(30))
    try:
        return checkpoint.read_index(file)
    except shardfx.errors.CheckpointError:
        return None


def arrays_and_metadata(index: checkpoint.Index | None, header_bytes: int) -> object:
    """What a header says, with positions in the buffer."""
    if index is None:
        return None
    arrays = []
    for entry in index.entries:
        assert isinstance(entry, FileArray)
        offset = entry.offset - 8 - header_bytes
        arrays.append((entry.path, entry.shape, entry.dtype, entry.stored, offset))
    return arrays, dict(index.metadata)


def both_ways(text: str, file: Path) -> list[object]:
    """What a header says as a table, and parsed member by member, as any header is that
    does not begin with its brace; `None` if it is refused.
    """
    results = []
    for header in (text, f" {text}"):
        header_bytes = len(header.encode())
        results.append(arrays_and_metadata(index_of(header, file), header_bytes))
    return results


def test_a_header_as_a_table_is_as_parsed(tmp_path):
    file = tmp_path / "model.safetensors"
    index = index_of(CANONICAL, file)
    spaced_index = index_of(f" {CANONICAL}", file)
    assert index is not None and spaced_index is not None
    # Only a table makes its entries when they are asked for.
    assert not isinstance(index.entries, tuple)
    assert isinstance(spaced_index.entries, tuple)
    assert [array.path for array in index.entries] == ["a", "b \u00e9", "c", "d", "e"]
    assert index.entries[1:3] == tuple(index.entries)[1:3]
    by_table, parsed = both_ways(CANONICAL, file)
    assert by_table == parsed
    rng = random.Random(0)
    refused = 0
    for _ in range(600):
        text = CANONICAL
        for _ in range(rng.randint(1, 2)):
            start = rng.randrange(len(text))
            stop = start + rng.choice([0, 0, 1, 1, 2, 40])
            text = text[:start] + rng.choice([*TOKENS, ""]) + text[stop:]
        by_table, parsed = both_ways(text, file)
        assert by_table == parsed, text
        refused += parsed is None
    assert 200 < refused < 600


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y")])
def test_rows_with_gaps_between_them_are_read(spec, tmp_path):
    # Of every three arrays one goes to each stack, and one to none; one stack is cast.
    tensors = {}
    for number in range(64):
        values = np.arange(48, dtype=np.float32).reshape(4, 12) + 100 * number
        tensors[f"{number}.a"] = values
        tensors[f"{number}.b"] = -values[:, :4]
        tensors[f"{number}.c"] = values
    path = str(tmp_path / "model.safetensors")
    save_file(tensors, path)
    rules = {
        "a": From("{i}.a").stack("i"),
        "b": From("{i}.b").stack("i"),
        "cast": From("{i}.b").cast("bfloat16").stack("i"),
    }
    tree_map = TreeMap(rules, drop=["{i}.c"])
    stacked = tree_map.apply(tensors)
    loaded = checkpoint.load(path, plan_of(stacked, spec), tree_map)
    assert_equal(loaded, stacked)


def test_a_short_file_names_the_first_array_not_whole(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    index = checkpoint.read_index(path)
    plan = plan_of({"w": np.zeros((4, 12, 4, 6), np.float32)}, P("x"))
    cut_entry = list(index.entries)[20]
    assert isinstance(cut_entry, FileArray)
    path.write_bytes(path.read_bytes()[: cut_entry.offset + 3])
    # The file is opened for the first time after it was cut.
    place: Any = index.place
    index = dataclasses.replace(index, place=dataclasses.replace(place, stamps={}))
    with pytest.raises(shardfx.errors.CheckpointError, match="ends at byte") as error:
        checkpoint.load(index, plan, TreeMap({"w": STACKS["two stacks"]}))
    assert cut_entry.path in str(error.value)


PARTS_OF_ONE_LEAF = {
    "a leaf of all parts": From.concat([From("{i}.w"), From("0.w")]),
    "its first and its own": From.concat([From("0.w"), From("{i}.w")]),
    "two halves of one": From.concat(
        [From("{i}.w").slice(3, 6, dim=1), From("{i}.w").slice(0, 3, dim=1)]
    ),
    "two layers": From.concat([From("{i}.w"), From("{i+1}.w")]),
}


@pytest.mark.parametrize("name", PARTS_OF_ONE_LEAF)
def test_parts_that_share_a_leaf_load_as_numpy_stacks(name, tmp_path):
    # `0.w` and `{i}.w` are one leaf in the first part alone.
    tensors = {
        f"{i}.w": np.arange(24, dtype=np.float32).reshape(4, 6) + 100 * i
        for i in range(21)
    }
    path = str(tmp_path / "model.safetensors")
    save_file(tensors, path)
    stack = PARTS_OF_ONE_LEAF[name].stack("i", count=20)
    tree_map = TreeMap({"w": stack}, rest=["{i}.w"])
    stacked = tree_map.apply(tensors)
    loaded = checkpoint.load(path, plan_of(stacked, P("y")), tree_map)
    assert_equal(loaded, stacked)


def header_of(file: Path) -> str:
    data = file.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")].decode()


def test_a_header_is_the_json_of_its_members(tmp_path):
    shapes = {
        "a": (2, 3),
        'quo"te\\ \n': (0,),
        "é\ud7ff\U0001f600": (),
        "b": (2, 3),
    }
    tree = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    names = sorted(tree)
    # With a map without numbers the metadata has one member, else Python's numbers too.
    tree_map = TreeMap({name: name for name in names})
    for number, map_or_none in enumerate((None, tree_map)):
        file = tmp_path / f"{number}.safetensors"
        checkpoint.save(file, tree, map=map_or_none)
        text = header_of(file)
        content = json.loads(text)
        assert list(content) == ["__metadata__", *names]
        written = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
        assert text.rstrip(" ") == written
        assert len(text.encode()) % 64 == 56
        assert [content[name]["shape"] for name in names] == [
            list(shapes[name]) for name in names
        ]
        reached = 0
        for name in names:
            start, stop = content[name]["data_offsets"]
            assert start == reached and stop == start + tree[name].nbytes
            reached = stop
        assert_equal(load_file(file), tree)
    checkpoint.save(tmp_path / "none.safetensors", {})
    assert list(json.loads(header_of(tmp_path / "none.safetensors"))) == [
        "__metadata__"
    ]


def test_the_arrays_of_a_file_fit_into_its_bytes(tmp_path):
    rng = random.Random(0)
    for number in range(40):
        sizes = [rng.choice([0, 0, 1, 3, 7, 20]) for _ in range(rng.randint(2, 12))]
        tree = {f"{i:02}": np.zeros(size, np.int8) for i, size in enumerate(sizes)}
        directory = tmp_path / str(number)
        checkpoint.save(directory, tree, file_bytes=10)
        groups: list[list[str]] = []
        nbytes = 0
        for name, array in tree.items():
            nbytes += array.nbytes
            if not groups or nbytes > 10:
                groups.append([])
                nbytes = array.nbytes
            groups[-1].append(name)
        files = sorted(directory.glob("*.safetensors"))
        assert [sorted(load_file(file)) for file in files] == groups
