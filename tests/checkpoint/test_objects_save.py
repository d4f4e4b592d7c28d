"""Saves to stores: an index makes a step exist, and whoever is killed, late or beside
another leaves whole steps.
"""

import dataclasses
import json
import subprocess
import sys
import textwrap
import time
import urllib.parse

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _servers import SECRET_KEY, make_gcs_bucket, proxied
from jax.sharding import Mesh, PartitionSpec as P
from safetensors.numpy import load

import shardfx
from shardfx import PathRules, checkpoint
from shardfx.checkpoint import _object_saves as saving
from shardfx.errors import CheckpointError
from tests.cli.commands import run


INDEX = "model.safetensors.index.json"


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()), ("x",))


def state_of(mesh, value=0.0):
    values = jnp.arange(128.0).reshape(8, 16) + value
    keys = jax.random.split(jax.random.key(3), 8)
    array = jnp.zeros((0, 3), jnp.bfloat16)
    tree = {
        "w": jnp.full((16, 8), value),
        "columns": values,
        "packed": jnp.arange(-8, 8, dtype=jnp.int4),
        "key": jax.random.key(7),
        "keys": keys,
        "empty": array,
        "scalar": jnp.array(value, jnp.bfloat16),
        "step": int(value),
    }
    rules = [("w|keys", P("x")), ("columns", P(None, "x")), (".*", P())]
    sharding_plan = shardfx.plan(tree, mesh, paths=PathRules(rules))
    return shardfx.shard(tree, sharding_plan), sharding_plan


def require_same(loaded, tree):
    for name, value in tree.items():
        if name == "step":
            assert loaded["step"] == value
            continue
        assert loaded[name].dtype == value.dtype
        assert loaded[name].shape == value.shape
        bits = [leaf for leaf in (loaded[name], value)]
        if name.startswith("key"):
            bits = [jax.random.key_data(leaf) for leaf in bits]
        actual = np.asarray(bits[0]).tobytes()
        assert actual == np.asarray(bits[1]).tobytes(), name


def test_a_plan_is_read_without_the_right_to_list(behind_proxy, mesh):
    """Without it, S3 denies objects that are missing, too."""
    server, proxy = behind_proxy
    tree, sharding_plan = state_of(mesh, 5.0)
    place = server.place("unlisted-plan")
    checkpoint.save(place, tree, sharding_plan)
    held = server.keys("unlisted-plan/")
    denied = (403, "<Error><Code>AccessDenied</Code></Error>")

    def fault(method, path, number):
        is_held = any(path.endswith(f"unlisted-plan/{key}") for key in held)
        return None if is_held else denied

    proxy.fault = fault
    assert checkpoint.saved_plan(place).digest == sharding_plan.digest


@pytest.mark.parametrize("file_bytes", [None, 100], ids=["whole", "in parts"])
def test_a_state_comes_back(server, mesh, file_bytes, tmp_path):
    tree, sharding_plan = state_of(mesh, 5.0)
    name = f"state-{file_bytes}"
    place = server.place(name)
    checkpoint.save(place, tree, sharding_plan, file_bytes=file_bytes)
    require_same(checkpoint.load(place, sharding_plan), tree)
    require_same(checkpoint.load(place, tree), tree)
    assert checkpoint.saved_plan(place).digest == sharding_plan.digest
    index = checkpoint.read_index(place)
    # Each array is stored once, however it lies.
    expected = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree))
    assert index.bytes_total == expected
    rules = PathRules([(".*", P())])
    rows = shardfx.plan(checkpoint.structs(index), mesh, paths=rules, unused="allow")
    other = checkpoint.load(place, rows, unread="allow")
    assert np.array_equal(np.asarray(other["columns"]), np.asarray(tree["columns"]))
    reads = checkpoint.plan_reads(index, sharding_plan, unread="allow")
    assert reads.needed_bytes == reads.read_bytes
    # What was copied to a disk is a checkpoint, too.
    for key in server.keys(f"{name}/"):
        file = tmp_path / key
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(server.store().read(f"{name}/{key}").result().value)
    require_same(checkpoint.load(tmp_path, sharding_plan), tree)
    assert checkpoint.saved_plan(tmp_path).digest == sharding_plan.digest
    with pytest.raises(
        CheckpointError, match="exists, and nothing was changed; save to"
    ):
        checkpoint.save(place, tree, sharding_plan)
    with pytest.raises(CheckpointError, match="is no size of an object"):
        checkpoint.save(place, tree, sharding_plan, file_bytes=6 * 2**30)


def test_other_libraries_read_whole_arrays(s3, mesh):
    tree = {f"l.{number}": jnp.full((8, 4), number) for number in range(4)}
    checkpoint.save(s3.place("plain"), tree, file_bytes=300)
    index = json.loads(s3.store().read(f"plain/{INDEX}").result().value)
    for name, file in index["weight_map"].items():
        tensors = load(s3.store().read(f"plain/{file}").result().value)
        assert np.array_equal(tensors[name], np.asarray(tree[name]))


def test_one_object_is_one_file(server, mesh):
    values = jnp.arange(64.0).reshape(4, 4, 4)
    tree = {"w": values}
    place = server.place("one/model.safetensors")
    checkpoint.save(place, tree)
    loaded = checkpoint.load(place, tree)["w"]
    assert np.array_equal(loaded, tree["w"])
    with pytest.raises(CheckpointError, match="changed; pass `overwrite=True` to repl"):
        checkpoint.save(place, tree)
    checkpoint.save(place, {"w": tree["w"] + 1}, overwrite=True)
    loaded = checkpoint.load(place, tree)["w"]
    assert np.array_equal(loaded, tree["w"] + 1)


def test_of_two_savers_the_later_is_told(s3, mesh, monkeypatch):
    tree, sharding_plan = state_of(mesh)
    place = s3.place("twice")
    commit = saving.ObjectSave.commit
    other = []

    def later(save, texts):
        if not other:
            other.append(True)
            tree_of_other, _ = state_of(mesh, 9.0)
            checkpoint.save(place, tree_of_other, sharding_plan)
        return commit(save, texts)

    monkeypatch.setattr(saving.ObjectSave, "commit", later)
    with pytest.raises(
        CheckpointError, match="appeared while this was saving, from ano"
    ):
        checkpoint.save(place, tree, sharding_plan)
    require_same(checkpoint.load(place, sharding_plan), state_of(mesh, 9.0)[0])
    # The later one took its data away.
    data = {key.partition("/")[0] for key in s3.keys("twice/")}
    assert len(data) == 2
    assert not checkpoint.left_over(place, older_than_seconds=0)


def test_the_index_is_written_with_a_condition(behind_proxy, mesh):
    """The proxy lets another saver be faster between the look and the write."""
    server, proxy = behind_proxy
    other = []

    def fault(method, path, number):
        if method == "PUT" and INDEX in path and not other:
            other.append(True)
            server.put(f"race/{INDEX}", b"{}")
        return None

    proxy.fault = fault
    with pytest.raises(
        CheckpointError, match="appeared while this was saving, from ano"
    ):
        checkpoint.save(server.place("race"), {"w": jnp.ones(4)})
    assert server.store().read(f"race/{INDEX}").result().value == b"{}"


@pytest.fixture
def strict_gcs(gcs, monkeypatch):
    """The GCS server behind a proxy that writes new objects under the condition that
    there is none, as Google does; the server alone ignores it.
    """
    there = set()
    # TensorStore asks for the address of Google's API once for each bucket that is open
    # in the process.
    strict_gcs = dataclasses.replace(gcs, bucket="strict")
    make_gcs_bucket(strict_gcs)
    with proxied(strict_gcs) as (server, proxy):

        def fault(method, path, number):
            if method != "POST":
                return None
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)
            (name,) = query["name"]
            if query.get("ifGenerationMatch") == ["0"] and name in there:
                return 412, '{"error": {"code": 412}}'
            there.add(name)
            return None

        proxy.fault = fault
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", proxy.endpoint)
        yield server, proxy, fault


def test_google_gets_the_condition_too(strict_gcs, mesh):
    server, proxy, fault = strict_gcs
    place = server.place("condition")
    tree = {"w": jnp.arange(4.0)}
    checkpoint.save(place, tree)
    (post,) = [
        path for method, path, _ in proxy.seen if method == "POST" and INDEX in path
    ]
    assert "ifGenerationMatch=0" in post
    with pytest.raises(CheckpointError, match="exists, and nothing was changed"):
        checkpoint.save(place, tree)

    # Another saver is faster between the look and the write.
    other = []

    def later(method, path, number):
        if method == "POST" and INDEX in path and not other:
            other.append(True)
            server.put(f"raced/{INDEX}", b"{}")
        return fault(method, path, number)

    proxy.fault = later
    with pytest.raises(
        CheckpointError, match="appeared while this was saving, from ano"
    ):
        checkpoint.save(server.place("raced"), tree)
    assert server.keys("raced/") == [INDEX]
    assert server.store().read(f"raced/{INDEX}").result().value == b"{}"


def test_an_answer_that_is_lost_is_no_other_saver(behind_proxy, mesh):
    server, proxy = behind_proxy
    lost = []

    def fault(method, path, number):
        if method == "PUT" and INDEX in path and not lost:
            lost.append(True)
            return "lost"
        return None

    proxy.fault = fault
    tree = {"w": jnp.arange(4.0)}
    checkpoint.save(server.place("lost"), tree)
    assert lost
    loaded = checkpoint.load(server.place("lost"), tree)["w"]
    assert np.array_equal(loaded, tree["w"])


SAVES = """
    import sys
    import jax, jax.numpy as jnp
    from shardfx import checkpoint
    print("ready", flush=True)
    for step in range(1000):
        tree = {"a": jnp.full((64, 64), step), "b": jnp.full((64, 64), step)}
        checkpoint.save(f"{sys.argv[1]}/step-{step}?{sys.argv[2]}", tree, file_bytes=4096)
        print(step, flush=True)
"""


def test_a_killed_saver_leaves_whole_steps_and_what_clean_finds(s3):
    base, _, query = s3.place("killed").partition("?")
    command = [sys.executable, "-c", textwrap.dedent(SAVES), base, query]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as saver:
        assert saver.stdout is not None
        while saver.stdout.readline().strip() != "0":
            assert saver.poll() is None
        # The next step has begun when some of its data is there.
        begun = "step-1/data"
        while not [key for key in s3.keys("killed/") if key.startswith(begun)]:
            time.sleep(0.005)
        saver.kill()
    names = {key.partition("/")[0] for key in s3.keys("killed/") if INDEX in key}
    struct = {name: jnp.zeros((64, 64), int) for name in "ab"}
    for name in sorted(names):
        loaded = checkpoint.load(f"{base}/{name}?{query}", struct)
        number = int(name.removeprefix("step-"))
        assert (np.asarray(loaded["a"]) == number).all()
        assert (np.asarray(loaded["b"]) == number).all()
    place = s3.place("killed")
    removed = checkpoint.left_over(place, older_than_seconds=0, remove=True)
    assert not checkpoint.left_over(place, older_than_seconds=3600)
    for remainder in removed:
        assert remainder.nbytes > 0
        assert remainder.target.startswith("s3://bucket/killed/step-")
    assert not checkpoint.left_over(place, older_than_seconds=0)
    for name in names:
        checkpoint.load(f"{base}/{name}?{query}", struct)


def test_the_data_of_a_killed_save_is_no_step_of_a_run(server):
    server.put("begun/step-3/data-1700000000-3c41fada2f299120/0-1-8.safetensors", b"")
    text = (
        "the data of a save that has not ended, or was killed: take an earlier step."
        " `shardfx clean .*://bucket/begun/step-3 --remove`"
    )
    with pytest.raises(CheckpointError, match=text):
        checkpoint.read_index(server.place("begun/step-3"))
    (remainder,) = checkpoint.left_over(server.place("begun/step-3"))
    assert remainder.target.endswith("begun/step-3")


def test_a_manager_keeps_steps_in_a_store(server, mesh):
    tree, sharding_plan = state_of(mesh)
    with checkpoint.Manager(server.place("run"), keep=2) as manager:
        assert manager.latest() is None
        assert manager.steps() == ()
        for step in range(1, 5):
            manager.save(step, {**tree, "step": step}, sharding_plan)
    assert manager.steps() == (3, 4)
    assert manager.latest() == 4
    assert manager.load(tree)["step"] == 4
    assert manager.load(tree, 3)["step"] == 3
    actual = {key.partition("/")[0] for key in server.keys("run/")}
    assert actual == {
        "step-3",
        "step-4",
    }
    with pytest.raises(CheckpointError, match=r"has no step 1; it has 3, 4\."):
        manager.load(tree, 1)
    again = checkpoint.Manager(server.place("run"))
    assert again.latest() == 4
    assert "endpoint" not in again.directory
    again.close()


def test_a_save_that_stalls_is_told_in_time(behind_proxy, mesh):
    server, proxy = behind_proxy
    proxy.fault = lambda method, path, number: "stall" if method == "PUT" else None
    begin = time.monotonic()
    with checkpoint.Manager(server.place("stalls"), timeout_seconds=0.5) as manager:
        manager.save(1, {"w": jnp.ones(4)})
        with pytest.raises(
            CheckpointError, match="writing .* made no progress for 0.5 s"
        ):
            manager.wait()
        assert time.monotonic() - begin < 5
        proxy.clear()
        manager.save(2, {"w": jnp.ones(4)})
        manager.wait()
        assert manager.steps() == (2,)


def test_a_store_that_refuses_a_save(behind_proxy, mesh):
    server, proxy = behind_proxy
    denied = (403, "<Error><Code>AccessDenied</Code></Error>")
    proxy.fault = lambda method, path, number: denied if method == "PUT" else None
    with pytest.raises(
        CheckpointError, match="lack the right `s3:PutObject`"
    ) as caught:
        checkpoint.save(server.place("refuses"), {"w": jnp.ones(4)})
    assert SECRET_KEY not in str(caught.value)
    assert not server.keys("refuses/")


def test_data_that_was_cleaned_away_is_no_step(s3, mesh, monkeypatch):
    tree, sharding_plan = state_of(mesh)
    place = s3.place("cleaned")
    commit = saving.ObjectSave.commit

    def cleaned(save, texts):
        checkpoint.left_over(place, older_than_seconds=0, remove=True)
        return commit(save, texts)

    monkeypatch.setattr(saving.ObjectSave, "commit", cleaned)
    with pytest.raises(
        CheckpointError, match="was removed while the save was under way"
    ):
        checkpoint.save(place, tree, sharding_plan)
    assert not s3.keys("cleaned/")


def test_a_listing_that_lags_hides_no_object(s3, mesh, monkeypatch):
    monkeypatch.setattr(saving.ObjectPlace, "keys_below", lambda place, path: ())
    tree, sharding_plan = state_of(mesh)
    with checkpoint.Manager(s3.place("lags"), keep=1) as manager:
        for step in (1, 2):
            manager.save(step, {**tree, "step": step}, sharding_plan)
            manager.wait()
        assert manager.steps() == (2,)
        assert manager.latest() == 2
        assert manager.load(tree)["step"] == 2


def test_an_object_above_the_limit_of_stores_is_refused(s3, mesh, monkeypatch):
    monkeypatch.setattr(saving, "_MOST_OBJECT_BYTES", 1000)
    tree = {"w": jnp.zeros((20, 20)), "v": jnp.zeros(4)}
    with pytest.raises(CheckpointError, match="up to 1000 bytes; save to a directory"):
        checkpoint.save(s3.place("large.safetensors"), tree)
    assert not s3.keys("large")
    checkpoint.save(s3.place("large"), tree, file_bytes=1000)
    loaded = checkpoint.load(s3.place("large"), tree)
    assert not np.asarray(loaded["w"]).any()


def test_parts_that_do_not_make_up_an_array(s3, mesh):
    checkpoint.save(s3.place("mixed"), {"w": jnp.arange(64.0)}, file_bytes=64)
    text = s3.store().read(f"mixed/{INDEX}").result().value
    index = json.loads(text)
    files = index["metadata"]["shardfx.files"]
    index["metadata"]["shardfx.files"] = files[:-1]
    s3.put(f"mixed/{INDEX}", json.dumps(index).encode())
    with pytest.raises(CheckpointError, match="its parts overlap, or some are missing"):
        checkpoint.read_index(s3.place("mixed"))
    index["metadata"]["shardfx.files"] = [*files, "data-0-0/none.safetensors"]
    s3.put(f"mixed/{INDEX}", json.dumps(index).encode())
    with pytest.raises(CheckpointError, match="none.safetensors' at .* is missing"):
        checkpoint.read_index(s3.place("mixed"))


def test_the_command_line_takes_addresses(s3, mesh, capsys):
    tree, _ = state_of(mesh)
    source = s3.place("cli/from")
    target = s3.place("cli/to")
    checkpoint.save(source, {"w": tree["w"]})
    assert run("convert", source, target) == 0
    loaded = checkpoint.load(target, {"w": tree["w"]})["w"]
    assert np.array_equal(loaded, tree["w"])
    assert run("plan", target, "--mesh", "x=8", "--rules", "w->x") == 0
    capsys.readouterr()
    assert run("clean", target, "--older-than", "0") == 0
    assert "nothing is left over" in capsys.readouterr().out
