"""What a training state holds besides float arrays: PRNG keys, Python's numbers,
NumPy's 64-bit integers.
"""

import enum
import json

import hypothesis as hyp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _stores import orbax, zarr
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import shardfx
from shardfx import PathRules, TreeMap, checkpoint
from shardfx.errors import CheckpointError, LeafTypeError, MapError, PlanMismatchError


REPLICATE = PathRules.parse(".*->replicate")


@pytest.fixture(scope="module")
def mesh():
    devices = np.array(jax.devices()).reshape(2, 4)
    return Mesh(devices, ("a", "b"))


def planned(tree, mesh, rules=REPLICATE):
    plan = shardfx.plan(tree, mesh, paths=rules)
    return shardfx.shard(tree, plan), plan


def bits(keys):
    return np.asarray(jax.random.key_data(keys))


# PRNG keys


@pytest.mark.parametrize("name", ["x.safetensors", "step"])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_come_back_as_keys(tmp_path, mesh, impl, name):
    keys = jax.random.split(jax.random.key(1, impl=impl), (8, 3))
    tree = {
        "one": jax.random.key(7, impl=impl),
        "many": keys,
        "none": jax.random.split(jax.random.key(1, impl=impl), 0),
        "w": jnp.arange(16.0),
    }
    arrays, plan = planned(tree, mesh, PathRules.parse("many->b, w->a, .*->replicate"))
    checkpoint.save(tmp_path / name, arrays, plan)
    loaded = checkpoint.load(tmp_path / name, plan)
    for key in ("one", "many", "none"):
        assert loaded[key].dtype == tree[key].dtype
        # JAX itself fills up the spec of an array of keys.
        assert loaded[key].sharding == arrays[key].sharding
        assert np.array_equal(bits(loaded[key]), bits(tree[key]))
    array = jax.random.normal(loaded["one"])
    assert array == jax.random.normal(tree["one"])
    again = checkpoint.load(tmp_path / name, arrays)
    assert again["many"].sharding == arrays["many"].sharding
    # The file holds nothing that its own library could not read.
    if name.endswith(".safetensors"):
        file = tmp_path / name
    else:
        file = tmp_path / name / "model.safetensors"
    assert np.array_equal(load_file(file)["many"], bits(tree["many"]))


def test_keys_are_planned_from_a_checkpoint_and_loaded(tmp_path, mesh):
    keys = [jax.random.split(jax.random.key(i), 4) for i in range(2)]
    tree = {
        "key": jax.random.key(3),
        "layers": keys,
    }
    checkpoint.save(tmp_path / "step", *planned(tree, mesh))
    index = checkpoint.read_index(tmp_path / "step")
    assert index["layers/0"].shape == (4,)
    assert index["layers/0"].dtype == tree["key"].dtype
    assert index["layers/0"].nbytes == 32
    devices = np.array(jax.devices()[:4])
    other = Mesh(devices, ("x",))
    plan = shardfx.plan(
        checkpoint.structs(index),
        other,
        paths=PathRules.parse("layers->x, key->replicate"),
    )
    loaded = checkpoint.load(index, plan)["layers"]["1"]
    assert loaded.sharding.spec == P("x")
    assert np.array_equal(bits(loaded), bits(tree["layers"][1]))
    reads = checkpoint.plan_reads(index, plan)
    assert reads.needed_bytes == 8 + 2 * 32
    assert reads.read_bytes == 8 + 2 * 32
    sharding = SingleDeviceSharding(jax.devices()[5])
    alone = jax.ShapeDtypeStruct((), tree["key"].dtype, sharding=sharding)
    actual = checkpoint.load(index, {"key": alone}, unread="allow")["key"].devices()
    assert actual == {jax.devices()[5]}


def test_keys_become_neither_other_keys_nor_integers(tmp_path, mesh):
    kinds = {"threefry": jax.random.key(0), "rbg": jax.random.key(0, impl="rbg")}
    kinds["raw"] = jax.random.key_data(kinds["threefry"])
    plans = {}
    for name, value in kinds.items():
        arrays, plans[name] = planned({"k": value}, mesh)
        checkpoint.save(tmp_path / name, arrays, plans[name])
    other = "'k' holds PRNG keys of rbg, but the plan has keys of threefry2x32;"
    neither = "of PRNG keys and integers one does not become the other"
    for path, plan_name, text in (
        ("rbg", "threefry", other),
        ("raw", "rbg", neither),
        ("rbg", "raw", neither),
    ):
        for dtype in (None, "plan"):
            with pytest.raises(CheckpointError, match=text):
                checkpoint.load(tmp_path / path, plans[plan_name], dtype=dtype)


@pytest.mark.parametrize("kind", ["key<rbg>", "key<nothing>", "key<", 3])
def test_what_a_header_calls_keys_must_have_their_shape(tmp_path, kind):
    array = np.ones((3, 2), np.uint32)
    encoded = json.dumps({"k": kind})
    save_file(
        {"k": array},
        tmp_path / "x.safetensors",
        {"shardfx.dtypes": encoded},
    )
    entry = checkpoint.read_index(tmp_path)["k"]
    assert entry.shape == (3, 2)
    assert entry.dtype == np.dtype(np.uint32)


# Python's numbers


class Speed(enum.IntEnum):
    fast = 1


NUMBERS = [
    5,
    -3,
    0,
    True,
    False,
    2**70,
    -(2**70),
    0.1,
    -0.0,
    1e300,
    1 + 2j,
    complex(-0.0, 1e-9),
]
NUMBERS += [float("inf"), float("nan")]


@pytest.mark.parametrize("name", ["x.safetensors", "step"])
def test_numbers_of_a_state_are_saved(tmp_path, mesh, name):
    numbers = {f"{number:02}": value for number, value in enumerate(NUMBERS)}
    state = {
        "w": jnp.arange(8.0),
        "numbers": numbers,
        "speed": Speed.fast,
        "f": jax.nn.gelu,
    }
    arrays, plan = planned(state, mesh)
    checkpoint.save(tmp_path / name, arrays, plan)
    fresh = arrays | {"numbers": dict.fromkeys(numbers, 0)}  # pyright: ignore[reportOperatorIssue]
    for asked in (plan, fresh):
        loaded = checkpoint.load(tmp_path / name, asked)
        assert repr(loaded["numbers"]) == repr(numbers)
    # A plan has nothing that could be kept, a tree has.
    assert loaded["speed"] is Speed.fast
    assert loaded["f"] is jax.nn.gelu
    assert checkpoint.load(tmp_path / name, plan)["f"] is None


def test_a_bool_is_0_or_1_in_the_file(tmp_path, mesh):
    for value in (0, 1, 5, -1, 0.5):
        array = np.array([1, value], np.float32 if value == 0.5 else np.int32)
        checkpoint.save(tmp_path / "c.safetensors", {"n": array}, overwrite=True)
        plan = shardfx.plan({"n": jnp.ones(2, bool)}, mesh, unmatched="replicate")
        if value in (0, 1):
            loaded = checkpoint.load(tmp_path / "c.safetensors", plan, dtype="plan")
            assert loaded["n"].tolist() == [True, bool(value)]
            continue
        with pytest.raises(CheckpointError, match="which is no number of bool"):
            checkpoint.load(tmp_path / "c.safetensors", plan, dtype="plan")


def test_a_number_that_the_checkpoint_lacks(tmp_path, mesh):
    arrays, plan = planned({"w": jnp.arange(8.0), "step": 5}, mesh)
    assert isinstance(arrays, dict)
    checkpoint.save(tmp_path / "step", arrays, plan)
    foreign = {"w": np.ones(8, np.float32), "epoch": np.array([3])}
    save_file(foreign, tmp_path / "x.safetensors")
    for name, tree, text in (
        (
            "step",
            arrays | {"epoch": 0},
            "leaf `epoch`: it is 0 here, and the checkpoint has no number there;",
        ),
        (
            "step",
            {"v": arrays["w"], "w": 0},
            r"leaf `w`: it is 0 here, and the checkpoint has the array float32\[8\]",
        ),
        (
            "step",
            arrays | {"step": jnp.array(5)},
            "`step`: the checkpoint has a Python number there, and no array; g",
        ),
        (
            "x.safetensors",
            arrays | {"epoch": 0},
            r"the array int64\[1\] there, which is no int; plan an array, `jax.Sh",
        ),
    ):
        with pytest.raises(CheckpointError, match=text):
            checkpoint.load(tmp_path / name, tree)
    checkpoint.save(tmp_path / "arrays", {"w": arrays["w"]}, plan)
    with pytest.raises(CheckpointError, match="`step`: it is a Python number in the"):
        checkpoint.load(tmp_path / "arrays", plan)
    # A file of other origin has no numbers: those of the tree stay.
    loaded = checkpoint.load(
        tmp_path / "x.safetensors", arrays | {"step": 1}, unread="allow"
    )
    step = loaded["step"]
    assert step == 1


@pytest.mark.parametrize(
    "text",
    ["[]", '{"step": 5}', '{"step": ["int", "x"]}', '{"step": ["bool", "1"]}', "{"],
)
def test_numbers_that_are_none(tmp_path, mesh, text):
    save_file(
        {"w": np.ones(8, np.float32)},
        tmp_path / "x.safetensors",
        {"shardfx.numbers": text},
    )
    with pytest.raises(
        CheckpointError,
        match="must map paths to numbers|has no number for 'step'|no valid JSON",
    ):
        checkpoint.load(
            tmp_path / "x.safetensors", planned({"w": jnp.ones(8)}, mesh)[1]
        )


DAMAGED_KEYS = {
    "another letter": "shardfx.nunbers",
    "a lost letter": "shardfx.number",
    "another beginning": "Xhardfx.numbers",
    "control characters": "shardfx.\0\0mbers",
    "all of it": "?",
}


@pytest.mark.parametrize("kind", DAMAGED_KEYS)
def test_a_damaged_key_of_numbers_is_said(tmp_path, mesh, kind):
    tree, plan = planned({"w": jnp.ones(8), "step": 7}, mesh)
    path = tmp_path / "x.safetensors"
    checkpoint.save(path, tree, plan)
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert metadata["shardfx.numbers"] == '{"step":["int","7"]}'
    metadata[DAMAGED_KEYS[kind]] = metadata.pop("shardfx.numbers")
    if kind != "all of it":
        del metadata["shardfx.plan"]
    save_file({"w": np.ones(8, np.float32)}, path, metadata)
    for target in (plan, tree):
        with pytest.raises(CheckpointError, match=r"has no `shardfx.numbers`.*damaged"):
            checkpoint.load(path, target)


def test_files_with_other_numbers_are_of_other_saves(tmp_path, mesh):
    arrays = {"a": np.ones(8, np.float32), "b": np.ones(8, np.float32)}
    files = {}
    for name, step in (("a", 7), ("b", 8)):
        files[name] = f"{name}.safetensors"
        numbers = {"shardfx.numbers": f'{{"step":["int","{step}"]}}'}
        save_file({name: arrays[name]}, tmp_path / files[name], numbers)
    text = json.dumps({"metadata": {}, "weight_map": files})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="two files .* have other Python numbers"):
        checkpoint.load(tmp_path, arrays | {"step": 0})


@pytest.mark.parametrize(
    "tree, message",
    [
        (
            {"half \ud800": 7},
            r"leaf `half \\ud800`: its path holds half of a character",
        ),
        ({"a": {"b": 1}, "a/b": 2}, "two leaves have the path `a/b`"),
    ],
)
def test_numbers_that_could_not_be_read_are_not_saved(tmp_path, mesh, tree, message):
    tree, plan = planned({"w": jnp.ones(8), **tree}, mesh)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path / "x", tree, plan)
    assert list(tmp_path.iterdir()) == []


# What cannot be given back


def test_a_branch_may_have_the_name_of_the_metadata(tmp_path, mesh):
    nested, plan = planned({"a": {"__metadata__": jnp.ones(8)}}, mesh)
    checkpoint.save(tmp_path / "x", nested, plan)
    loaded = checkpoint.load(tmp_path / "x", plan)["a"]
    assert np.array_equal(loaded["__metadata__"], np.ones(8))


@pytest.mark.parametrize(
    "value",
    [np.int64(5), np.arange(8), np.ones(8), np.uint64(2**40), np.full(8, 2**40)],
)
def test_what_the_plan_could_not_load_is_not_saved(tmp_path, mesh, value):
    tree = {"n": value}
    plan = shardfx.plan(tree, mesh, paths=REPLICATE)
    with pytest.raises(
        LeafTypeError,
        match=r"leaf `n` is \w+64 in NumPy and \w+32 in the plan, .*Save `leaf.astype",
    ):
        checkpoint.save(tmp_path / "x", tree, plan)
    arrays = shardfx.shard({"n": np.asarray(value).astype(plan["n"].dtype)}, plan)
    checkpoint.save(tmp_path / "x", arrays, plan)
    loaded = checkpoint.load(tmp_path / "x", plan)["n"]
    assert np.array_equal(loaded, arrays["n"])


DTYPES = (
    "int64",
    "uint32",
    "int32",
    "int8",
    "float32",
    "bfloat16",
    "int4",
    "float8_e4m3fn",
    "float8_e5m2",
)
EDGES = [
    0,
    7,
    8,
    -8,
    -9,
    127,
    128,
    -128,
    1001,
    1008,
    2**24 + 1,
    2**31 - 1,
    2**31,
    -(2**31),
    -(2**31) - 1,
]
EDGES += [3e9, 1.5, -0.25, 1.001, -1, -7.0, float("nan")]


def is_integer(dtype):
    return jnp.issubdtype(dtype, jnp.integer)


def held(value, dtype):
    """What a dtype makes of a number; None where it has none near it."""
    if not is_integer(dtype):
        return float(np.asarray(value, np.float64).astype(dtype))
    is_in = value == value and jnp.iinfo(dtype).min <= value <= jnp.iinfo(dtype).max
    if is_in and value == int(value):
        return int(value)
    return None


@hyp.settings(max_examples=150, deadline=None)
@hyp.given(
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from(EDGES),
    st.sampled_from([P(), P("b")]),
    st.booleans(),
)
def test_no_integer_changes_its_value(
    tmp_path_factory, mesh, stored, to, value, spec, is_store
):
    stored = jnp.dtype(stored)
    to = jnp.dtype(to)
    value = held(value, stored)
    if value is None or stored in (to, "int4") or to == "int64":
        hyp.reject()
    array = np.zeros((8, 4), stored)
    array[5, 2] = value
    path = tmp_path_factory.mktemp("cast")
    if is_store:
        zarr(path, "n", array, chunks=[8, 2])
    else:
        save_file({"n": array}, path / "x.safetensors")
    struct = jax.ShapeDtypeStruct((8, 4), to, sharding=NamedSharding(mesh, spec))
    structs = {"n": struct}
    if held(value, to) == value or not (is_integer(stored) or is_integer(to)):
        loaded = checkpoint.load(path, structs, dtype="plan")["n"]
        # tensorstore makes a NaN of other bits.
        is_nan = value != value and np.isnan(float(loaded[5, 2]))
        assert is_nan or np.asarray(loaded).tobytes() == array.astype(to).tobytes()
        return
    is_beyond = is_integer(to) and not jnp.iinfo(to).min <= value <= jnp.iinfo(to).max
    if is_beyond:
        complaint = f", and {to} goes from -?[0-9]+ to [0-9]+; plan a wider"
    else:
        complaint = f", which is no number of {to}; plan a d"
    with pytest.raises(CheckpointError, match=f"^array 'n' holds .*{complaint}"):
        checkpoint.load(path, structs, dtype="plan")


@pytest.mark.parametrize("is_store", [False, True])
def test_no_integer_is_rounded_to_a_complex_number(tmp_path, mesh, is_store):
    struct = jax.ShapeDtypeStruct(
        (8,), jnp.complex64, sharding=NamedSharding(mesh, P())
    )
    for value in (2**24, 2**24 + 1):
        array = np.full(8, value, np.int32)
        path = tmp_path / str(value)
        path.mkdir()
        if is_store:
            zarr(path, "n", array, chunks=[8])
        else:
            save_file({"n": array}, path / "x.safetensors")
        if value == 2**24:
            loaded = checkpoint.load(path, {"n": struct}, dtype="plan")["n"]
            assert loaded.tolist() == [value] * 8
            continue
        with pytest.raises(CheckpointError, match="which is no number of complex64"):
            checkpoint.load(path, {"n": struct}, dtype="plan")


# Numbers that are arrays on one side


def test_a_counter_that_became_an_array_comes_back(tmp_path, mesh):
    tree, plan = planned({"w": jnp.arange(8.0), "step": 0}, mesh)
    assert isinstance(tree, dict)
    state = {**tree, "step": jnp.array(7)}
    checkpoint.save(tmp_path / "by its plan", state, plan)
    checkpoint.save(tmp_path / "alone", state)
    for name in ("by its plan", "alone"):
        for target in (plan, tree, {**tree, "step": 0.5}):
            loaded = checkpoint.load(tmp_path / name, target)
            if isinstance(target, dict):
                kind = type(target["step"])
            else:
                kind = int
            assert type(loaded["step"]) is kind
            assert loaded["step"] == 7
    # By select, it is left out by its name.
    arrays = shardfx.plan(state, mesh, paths=REPLICATE)
    checkpoint.save(tmp_path / "part", state, arrays.select("w"))
    assert list(checkpoint.read_index(tmp_path / "part")) == ["w"]
    step = checkpoint.load(tmp_path / "alone", arrays.select("w"))["step"]
    assert step is None


def test_a_step_of_another_library(tmp_path, mesh):
    tree, plan = planned({"w": jnp.arange(8.0), "step": 0}, mesh)
    assert isinstance(tree, dict)
    orbax(tmp_path / "orbax", {"w": np.arange(8, dtype=np.float32), "step": 17})
    file = {"w": np.arange(8, dtype=np.float32), "step": np.array(17)}
    save_file(file, tmp_path / "x.safetensors")
    for name in ("orbax", "x.safetensors"):
        for target in (plan, tree):
            loaded = checkpoint.load(tmp_path / name, target)
            assert type(loaded["step"]) is int
            assert loaded["step"] == 17
        reads = checkpoint.plan_reads(checkpoint.read_index(tmp_path / name), plan)
        assert reads.needed_bytes == 8 * 4 + 8
    save_file({**file, "step": np.array(2**53 + 1)}, tmp_path / "x.safetensors")
    text = "it is 0.5 here, and the checkpoint has 9007199254740993 there, which no fl"
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path / "x.safetensors", {**tree, "step": 0.5})
    save_file({**file, "step": np.array(True)}, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(
        (tmp_path / "x.safetensors").read_bytes()[:-1] + b"\2"
    )
    with pytest.raises(CheckpointError, match="neither 0 nor 1; the file is damaged"):
        checkpoint.load(tmp_path / "x.safetensors", plan)


@pytest.mark.parametrize("step", [5, np.float32(5), np.ones((4, 4), np.float32)])
def test_a_function_uses_nothing(tmp_path, mesh, step):
    checkpoint.save(tmp_path / "x", {"w": jnp.arange(8.0), "step": step})
    tree, plan = planned({"w": jnp.arange(8.0), "step": jax.nn.gelu}, mesh)
    assert isinstance(tree, dict)
    for target in (plan, tree):
        with pytest.raises(CheckpointError, match="which nothing would use; plan the"):
            checkpoint.load(tmp_path / "x", target)
        loaded = checkpoint.load(tmp_path / "x", target, unread="allow")
        assert loaded["step"] is (jax.nn.gelu if target is tree else None)
        both = TreeMap({"{p*}": "{p*}"})
        with pytest.raises(MapError, match="source `step`: nothing is made of it"):
            checkpoint.load(tmp_path / "x", target, both)
        loaded = checkpoint.load(tmp_path / "x", target, both, unread="allow")
        assert loaded["w"].shape == (8,)
    with pytest.raises(CheckpointError, match="has 1 .*in no leaf of the plan: 'step'"):
        checkpoint.load(tmp_path / "x", {"w": tree["w"]})


def test_numbers_go_through_maps(tmp_path, mesh):
    source = {"w": jnp.arange(8.0), "loop": {"step": 5, "rate": 0.1}}
    checkpoint.save(tmp_path / "x", source)
    tree, plan = planned({"v": jnp.zeros(8), "at": 0, "f": jax.nn.gelu}, mesh)
    rules = {"v": "w", "at": "loop/step"}
    renamed = TreeMap(rules, drop=["loop/rate"])
    rules = {"w": "v", "loop/step": "at"}
    tree_map = TreeMap(rules, rest=["f"])
    back = tree_map.inverse()
    less = {"w": source["w"], "loop": {"step": 5}}
    checkpoint.save(tmp_path / "less", less)
    moved = [
        checkpoint.load(tmp_path / "x", plan, renamed),
        checkpoint.load(tmp_path / "x", tree, renamed),
        checkpoint.load(tmp_path / "less", plan, back),
        back.apply(less, tree),
        shardfx.reshard(less, plan, map=back),
        shardfx.reshard(source, plan, map=renamed.then(TreeMap({"{p*}": "{p*}"}))),
        renamed.apply(source, tree),
        renamed.apply(source),
    ]
    for loaded in moved:
        assert loaded["at"] == 5
        assert (loaded["v"] == source["w"]).all()
    planned_too = shardfx.plan(source, mesh, paths=REPLICATE)
    assert shardfx.plan_reshard(planned_too, plan, map=renamed).wire_bytes == 0
    twice = TreeMap({"{p*}": "{p*}"}).then(renamed)
    assert twice.apply(source, tree)["at"] == 5
    checkpoint.save(tmp_path / "y", source, map=renamed)
    again = checkpoint.load(tmp_path / "y", {"v": tree["v"], "at": 0})
    assert again["at"] == 5
    with pytest.raises(MapError, match="source `loop/rate`: nothing is made of it"):
        checkpoint.load(tmp_path / "x", plan, TreeMap({"v": "w", "at": "loop/step"}))
    array = {"v": tree["v"], "at": jnp.zeros(())}
    text = "leaf `at` would be made of 'loop/step', which is the Python number 5 in"
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path / "x", array, renamed, dtype="plan")


def test_a_part_and_its_whole_name_join(tmp_path, mesh):
    model, plan = planned({"w": jnp.arange(8.0), "b": jnp.zeros(8)}, mesh)
    state = {"model": model, "step": jnp.array(1)}
    text = r"below `model` in the tree: .*`ShardPlan.join\(model=plan, ...\)`"
    with pytest.raises(PlanMismatchError, match=text):
        checkpoint.save(tmp_path / "x", state, plan)
    checkpoint.save(tmp_path / "x", state)
    text = r'load `ShardPlan.join\(model=plan\)` with `unread="allow"`'
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path / "x", plan)
    joined = shardfx.ShardPlan.join(model=plan)
    loaded = checkpoint.load(tmp_path / "x", joined, unread="allow")
    assert (loaded["model"]["w"] == model["w"]).all()


def test_an_unfinished_step_of_orbax(tmp_path):
    tree = {"w": np.ones(8, np.float32)}
    orbax(tmp_path / "1", tree)
    (tmp_path / "1").rename(tmp_path / "1.orbax-checkpoint-tmp")
    with pytest.raises(CheckpointError, match="not finished, .* rename it to '1'"):
        checkpoint.read_index(tmp_path / "1.orbax-checkpoint-tmp")
