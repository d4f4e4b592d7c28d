"""Checkpoints in stores, on servers of S3 and of Google's kind: every format is read,
by few requests, and every fault has an error.
"""

import itertools as it
import json
import urllib.parse

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _servers import ACCESS_KEY, SECRET_KEY
from _stores import eformer, orbax, zarr
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from safetensors.numpy import save, save_file

import shardfx
from shardfx import From, PathRules, TreeMap, checkpoint
from shardfx.checkpoint import _object_faults as object_faults
from shardfx.errors import CheckpointError


RNG = np.random.default_rng(0)


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()), ("x",))


def arrays(count=6):
    return {
        f"l.{number}": RNG.normal(size=(16, 8 + 8 * number)).astype(np.float32)
        for number in range(count)
    }


def put_set(server, path, files):
    """Writes sets of arrays as safetensors files with an index."""
    weight_map = {}
    for number, tensors in enumerate(files):
        name = f"model-{number}.safetensors"
        server.put(f"{path}/{name}", save(tensors))
        weight_map |= dict.fromkeys(tensors, name)
    index = {"weight_map": weight_map}
    server.put(f"{path}/model.safetensors.index.json", json.dumps(index).encode())


def planned(index, mesh, rule):
    structs = checkpoint.structs(index)
    rules = PathRules([(".*", rule)])
    return shardfx.plan(structs, mesh, paths=rules)


def require_equal(loaded, tensors):
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert np.array_equal(np.asarray(loaded[name]), value), name


@pytest.mark.parametrize("rule", [P("x"), P(None, "x"), P()], ids=str)
def test_a_set_of_files_is_loaded_under_any_plan(server, mesh, rule):
    tensors = arrays()
    first = dict(list(tensors.items())[:2])
    rest = dict(list(tensors.items())[2:])
    put_set(server, f"set/{rule}", [first, rest])
    place = server.place(f"set/{rule}")
    index = checkpoint.read_index(place)
    assert index.format == "safetensors"
    assert "endpoint" not in str(index)
    sharding_plan = planned(index, mesh, rule)
    require_equal(checkpoint.load(place, sharding_plan), tensors)
    require_equal(checkpoint.load(index, sharding_plan), tensors)
    half = checkpoint.load(place, sharding_plan, dtype=jnp.bfloat16)
    assert half["l.1"].dtype == jnp.bfloat16
    assert np.allclose(np.asarray(half["l.1"], np.float32), tensors["l.1"], rtol=0.01)


def test_maps_and_specs_reach_into_stores(server, mesh):
    tensors = {f"l.{number}.w": RNG.normal(size=(8, 16)) for number in range(4)}
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    server.put("map/model.safetensors", save(tensors))
    struct = jax.ShapeDtypeStruct(
        (4, 16, 8), np.float32, sharding=NamedSharding(mesh, P(None, "x"))
    )
    rules = {"w": From("l.{i}.w").T.stack("i")}
    stacked = TreeMap(rules)
    for place in (server.place("map/model.safetensors"), server.spec("map/")):
        loaded = checkpoint.load(place, {"w": struct}, stacked)
        expected = np.stack([tensors[f"l.{number}.w"].T for number in range(4)])
        assert np.array_equal(np.asarray(loaded["w"]), expected)


def write_zarr(folder, value):
    zarr(folder, "w", value, chunks=(4, 8))


def write_zarr3(folder, value):
    zarr(folder, "w", value, chunks=(4, 8), driver="zarr3")


def write_database(folder, value):
    zarr(folder, "w", value, chunks=(4, 8), ocdbt=True)


def write_eformer(folder, value):
    zarr(folder, "w", value, chunks=(4, 8))
    eformer(folder, arrays=[{"path": "w", "shape": [8, 16], "dtype": "float32"}])


def write_orbax(folder, value):
    orbax(folder / "state", {"w": value})
    for file in [*(folder / "state").iterdir()]:
        file.rename(folder / file.name)


def write_flax(folder, value):
    from flax.serialization import msgpack_serialize

    (folder / "model.msgpack").write_bytes(msgpack_serialize({"w": value}))


WRITERS = [
    write_zarr,
    write_zarr3,
    write_database,
    write_eformer,
    write_orbax,
    write_flax,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_each_format_is_loaded_from_a_store(server, mesh, tmp_path, write):
    value = np.arange(128, dtype=np.float32).reshape(8, 16)
    write(tmp_path, value)
    server.put_directory(f"formats/{write.__name__}", tmp_path)
    place = server.place(f"formats/{write.__name__}")
    local = checkpoint.read_index(tmp_path)
    remote = checkpoint.read_index(place)
    assert remote.format == local.format
    assert [entry.path for entry in remote.entries] == ["w"]
    struct = jax.ShapeDtypeStruct(
        (8, 16), np.float32, sharding=NamedSharding(mesh, P(None, "x"))
    )
    loaded = checkpoint.load(place, {"w": struct})
    assert np.array_equal(np.asarray(loaded["w"]), value)
    assert "token" not in str(remote)
    assert SECRET_KEY not in repr(remote)


def test_headers_of_many_files_take_two_round_trips(behind_proxy):
    server, proxy = behind_proxy
    put_set(server, "many", [{f"a.{i}": np.ones(4, np.float32)} for i in range(20)])
    proxy.clear()
    assert len(checkpoint.read_index(server.place("many"))) == 20
    paths = [path for _, path, _ in proxy.seen]
    # 32 bytes and the header of each file.
    assert sum(path.endswith(".safetensors") for path in paths) == 40
    assert sum("list-type" in path for path in paths) == 1


def test_a_set_is_read_without_the_right_to_list(behind_proxy):
    server, proxy = behind_proxy
    put_set(server, "unlisted", [{"a": np.ones(4, np.float32)}])
    denied = (403, "<Error><Code>AccessDenied</Code></Error>")
    proxy.fault = lambda method, path, number: denied if "list-type" in path else None
    assert list(checkpoint.read_index(server.place("unlisted"))) == ["a"]
    with pytest.raises(CheckpointError, match="s3:ListBucket"):
        checkpoint.read_index(server.place("nothing"))


def test_neighbours_are_one_request(behind_proxy, mesh):
    server, proxy = behind_proxy
    tensors = {f"l.{i:02}": np.full((64, 64), i, np.float32) for i in range(40)}
    server.put("near/model.safetensors", save(tensors))
    index = checkpoint.read_index(server.place("near"))
    sharding_plan = planned(index, mesh, P("x"))
    proxy.clear()
    require_equal(checkpoint.load(index, sharding_plan), tensors)
    ranges = [text for _, _, text in proxy.seen if text]
    # Beside it, the byte behind the last tensor is asked for.
    assert len(ranges) == 2
    bounds = [map(int, text.removeprefix("bytes=").split("-")) for text in ranges]
    lengths = [last + 1 - first for first, last in bounds]
    assert sorted(lengths) == [1, 40 * 64 * 64 * 4]


def test_reads_near_the_end_of_an_object(server):
    server.put("ends/model.safetensors", save(arrays(1)))
    place = checkpoint.read_index(server.place("ends")).place
    for size in (0, 1, 4097):
        data = bytes(range(251)) * 17
        data = data[:size]
        server.put(f"ends/{size}", data)
        with place.opened(place.inside(str(size))) as file:
            assert file.known_size is None
            for count, offset in [(10, 2), (1, 0), (1, size), (5000, 0), (0, 9000)]:
                assert file.read(count, offset) == data[offset : offset + count]
            if size:
                assert file.tail(size) == data
                assert file.tail(1) == data[-1:]
                assert len(file.tail(size + 1)) <= size


STATUSES = {
    "denied": (
        (
            403,
            "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
        ),
        "lack the right `s3:GetObject`: allow it, or log in again",
    ),
    "key": (
        (
            403,
            "<Error><Code>InvalidAccessKeyId</Code><Message>The key"
            f" {ACCESS_KEY} does not exist</Message></Error>",
        ),
        "the credentials are not accepted: log in again",
    ),
    "region": (
        (
            400,
            "<Error><Code>AuthorizationHeaderMalformed</Code><Message>the region"
            " 'us-east-1' is wrong; expecting 'eu-west-3'</Message>"
            "<Region>eu-west-3</Region></Error>",
        ),
        "another region than the request: name the region, .*region=eu-west-3",
    ),
}


@pytest.mark.parametrize("kind", STATUSES)
def test_what_the_store_refuses_has_a_message(behind_proxy, kind):
    server, proxy = behind_proxy
    answer, text = STATUSES[kind]
    proxy.fault = lambda method, path, number: answer
    with pytest.raises(CheckpointError, match=text) as caught:
        checkpoint.read_index(server.place("refused"))
    message = str(caught.value)
    assert "s3://bucket/refused/model.safetensors.index.json" in message
    assert ACCESS_KEY not in message
    assert SECRET_KEY not in message


def test_credentials_that_are_not_there_have_a_message(s3, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    spec = s3.spec("x/") | {"aws_credentials": {"type": "environment"}}
    text = "no credentials were found: log in again .*, or set AWS_PROFILE, or AWS_ACC"
    with pytest.raises(CheckpointError, match=text):
        checkpoint.read_index(spec)


def test_nobody_at_the_endpoint_has_a_message():
    # TensorStore repeats such a request for 20 seconds.
    text = "CURL error Could not connect to server: port 1 [curl_code='7']"
    error = object_faults.fault("s3", "'s3://bucket/x'", "reading", ValueError(text))
    shown = "failed, with 'Could not connect to server: port 1'; no server answers"
    assert str(error).startswith(f"reading 's3://bucket/x' {shown}")
    assert str(error).endswith("proxy.")


def test_faults_that_pass_are_repeated(behind_proxy, mesh):
    server, proxy = behind_proxy
    tensors = arrays()
    server.put("flaky/model.safetensors", save(tensors))
    index = checkpoint.read_index(server.place("flaky"))
    sharding_plan = planned(index, mesh, P("x"))
    for fault in ((503, "<Error><Code>SlowDown</Code></Error>"), "reset", "short"):
        proxy.clear()
        proxy.fault = lambda method, path, number, fault=fault: (
            fault if number == 0 else None
        )
        require_equal(checkpoint.load(index, sharding_plan), tensors)
        assert len(proxy.seen) > 1


def test_a_store_that_stalls_is_an_error_in_time(behind_proxy, mesh):
    server, proxy = behind_proxy
    server.put("stall/model.safetensors", save(arrays()))
    index = checkpoint.read_index(server.place("stall"))
    proxy.fault = lambda method, path, number: "stall"
    text = (
        r"reading 's3://bucket/stall/model.safetensors' at .* made no progress for 0.3"
    )
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(index, planned(index, mesh, P()), timeout_seconds=0.3)


def test_chunks_that_stall_are_an_error_in_time(behind_proxy, mesh, tmp_path):
    server, proxy = behind_proxy
    write_zarr(tmp_path, np.ones((8, 16), np.float32))
    server.put_directory("slow", tmp_path)
    index = checkpoint.read_index(server.place("slow"))
    sharding_plan = planned(index, mesh, P())
    looks = it.count(1)

    def stall_after_the_look(method, path, number):
        # The first read compares, and the second is TensorStore's.
        return "stall" if "zarray" in path and next(looks) > 1 else None

    proxy.fault = stall_after_the_look
    with pytest.raises(
        CheckpointError, match="array w' got no answer in time; the sto"
    ):
        checkpoint.load(index, sharding_plan, timeout_seconds=0.3)
    proxy.fault = lambda method, path, number: "stall" if "zarray" in path else None
    with pytest.raises(CheckpointError, match="w/.zarray' at .* made no progress for"):
        checkpoint.load(index, sharding_plan, timeout_seconds=0.3)


def test_an_object_that_changes_between_two_reads(server, mesh):
    server.put("changing/model.safetensors", save(arrays()))
    index = checkpoint.read_index(server.place("changing"))
    sharding_plan = planned(index, mesh, P("x"))
    tensors = arrays()
    server.put("changing/model.safetensors", save(tensors))
    with pytest.raises(CheckpointError, match="was replaced since its header was read"):
        checkpoint.load(index, sharding_plan)
    # A path is read again from its header on.
    require_equal(checkpoint.load(server.place("changing"), sharding_plan), tensors)


def test_a_database_that_is_replaced_after_its_index(server, mesh, tmp_path):
    value = np.arange(128, dtype=np.float32).reshape(8, 16)
    write_database(tmp_path / "old", value)
    server.put_directory("database", tmp_path / "old")
    index = checkpoint.read_index(server.place("database"))
    sharding_plan = planned(index, mesh, P("x"))
    require_equal(checkpoint.load(index, sharding_plan), {"w": value})
    write_database(tmp_path / "new", 2 * value)
    server.put_directory("database", tmp_path / "new")
    with pytest.raises(CheckpointError, match="was replaced since its header was read"):
        checkpoint.load(index, sharding_plan)
    loaded = checkpoint.load(server.place("database"), sharding_plan)
    require_equal(loaded, {"w": 2 * value})


def test_chunks_that_change_while_they_are_read(behind_proxy, mesh, tmp_path):
    server, proxy = behind_proxy
    value = np.ones((8, 16), np.float32)
    write_database(tmp_path / "old", value)
    write_database(tmp_path / "new", 2 * value)
    server.put_directory("beside", tmp_path / "old")
    index = checkpoint.read_index(server.place("beside"))
    sharding_plan = planned(index, mesh, P())
    manifests = it.count(1)

    def replace_after_the_look(method, path, number):
        # The first read compares, and the second is TensorStore's.
        if path.endswith("manifest.ocdbt") and next(manifests) == 2:
            server.put_directory("beside", tmp_path / "new")

    proxy.fault = replace_after_the_look
    with pytest.raises(CheckpointError, match="was replaced since its header was read"):
        checkpoint.load(index, sharding_plan)


def test_a_truncated_object(server, mesh):
    data = save(arrays())
    server.put("cut/model.safetensors", data[:-100])
    index = checkpoint.read_index(server.place("cut"))
    with pytest.raises(
        CheckpointError, match=r"ends before byte \d+, within array 'l.5'"
    ):
        checkpoint.load(index, planned(index, mesh, P("x")))
    server.put("cut/model.safetensors", data[:50])
    with pytest.raises(CheckpointError, match="claims a header of"):
        checkpoint.read_index(server.place("cut"))


def test_an_object_that_goes_on_behind_its_tensors(server, mesh):
    data = save(arrays())
    for surplus_bytes in (1, 1000):
        server.put("long/model.safetensors", data + bytes(surplus_bytes))
        index = checkpoint.read_index(server.place("long"))
        text = f"goes on behind its last tensor, which ends at byte {len(data)}; it is"
        with pytest.raises(CheckpointError, match=text):
            checkpoint.load(index, planned(index, mesh, P("x")))
    # A tensor whose size is unknown may be there.
    header = b'{"w":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},'
    header += b'"six":{"dtype":"F6_E2M3","shape":[8],"data_offsets":[32,38]}}'
    data = len(header).to_bytes(8, "little") + header + bytes(38)
    server.put("later/model.safetensors", data)
    struct = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P()))
    place = server.place("later")
    loaded = checkpoint.load(place, {"w": struct}, unread="allow")["w"]
    assert not loaded.any()


ADDRESSES = {
    "az://account/x": "of the kind `az`, and checkpoints are read from",
    f"s3://{ACCESS_KEY}:{SECRET_KEY}@bucket/x": "has credentials or parameters in",
    "s3://bucket/x?endpont=http://h": "the parameter 'endpont', and `s3://` addresses",
    "gs://bucket/x?endpoint=http://h": "`gs://` addresses have no parameters",
    "s3:///x": "names no bucket; write `s3://bucket/path`",
    "s3://B_/x": "TensorStore cannot open 's3://B_'",
    "s3:/bucket/x": "`pathlib` makes one slash of the two",
}


@pytest.mark.parametrize("place", ADDRESSES)
def test_an_address_that_is_none(place):
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read_index(place)
    assert ADDRESSES[place] in str(caught.value)
    assert SECRET_KEY not in str(caught.value)


ENDPOINTS = [
    f"http://user:{SECRET_KEY}@127.0.0.1",
    f"http://127.0.0.1/?X-Amz-Signature={SECRET_KEY}",
    f"http://127.0.0.1/#{SECRET_KEY}",
]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_endpoint_with_a_secret_is_refused_and_not_shown(endpoint):
    query = urllib.parse.urlencode({"endpoint": endpoint})
    spec = {"driver": "s3", "bucket": "bucket", "path": "x/", "endpoint": endpoint}
    for place in (f"s3://bucket/x?{query}", spec):
        for call in (
            checkpoint.read_index,
            checkpoint.Manager,
            checkpoint.left_over,
            lambda place: checkpoint.save(place, {"w": jnp.ones(4)}),
        ):
            with pytest.raises(
                CheckpointError, match="has credentials or par"
            ) as error:
                call(place)
            assert SECRET_KEY not in str(error.value)
            assert error.value.__cause__ is None


def test_a_bucket_with_a_secret_is_refused_and_not_shown():
    spec = {"driver": "gcs", "bucket": f"user:{SECRET_KEY}@bucket", "path": "x/"}
    text = "with the driver `gcs` has credentials or parameters in its bucket"
    with pytest.raises(CheckpointError, match=text) as error:
        checkpoint.read_index(spec)
    assert SECRET_KEY not in str(error.value)


def test_nothing_there(server):
    with pytest.raises(CheckpointError, match="no object's key begins with 'none/'"):
        checkpoint.read_index(server.place("none"))
    with pytest.raises(
        CheckpointError,
        match="x.safetensors' at http.* is missing|x.safetensors' is missing",
    ):
        checkpoint.read_index(server.place("none/x.safetensors"))
    if server.kind == "s3":
        # The server of Google's kind lists nothing, where Google has an error.
        elsewhere = server.spec("x/") | {"bucket": "other-bucket"}
        with pytest.raises(CheckpointError, match="there is no such bucket: create it"):
            checkpoint.read_index(elsewhere)
    with pytest.raises(
        CheckpointError, match="the drivers are `s3`, `gcs`, `file` and"
    ):
        checkpoint.read_index({"driver": "http", "base_url": "http://127.0.0.1"})


def test_a_spec_in_memory_and_a_path_as_a_spec(mesh, tmp_path):
    tensors = arrays(2)
    save_file(tensors, tmp_path / "model.safetensors")
    sharding_plan = planned(checkpoint.read_index(tmp_path), mesh, P())
    file = {"driver": "file", "path": f"{tmp_path}/"}
    require_equal(checkpoint.load(file, sharding_plan), tensors)
    require_equal(checkpoint.load(f"file://{tmp_path}", sharding_plan), tensors)


def test_a_limit_that_is_too_small(server, mesh):
    server.put("limit/model.safetensors", save(arrays()))
    index = checkpoint.read_index(server.place("limit"))
    with pytest.raises(CheckpointError, match="`read_limit_bytes=100` is less than"):
        checkpoint.load(index, planned(index, mesh, P()), read_limit_bytes=100)


@pytest.mark.parametrize("mebibytes", [15, 16.5, 24, 33])
def test_requests_over_pieces_of_8_mebibytes(behind_proxy, mesh, mebibytes):
    """With the request behind the last tensor."""
    server, proxy = behind_proxy
    nbytes = int(mebibytes * 2**20)
    tensors = {"w": np.arange(nbytes, dtype=np.uint8)}
    server.put(f"pieces/{mebibytes}/model.safetensors", save(tensors))
    index = checkpoint.read_index(server.place(f"pieces/{mebibytes}"))
    sharding_plan = planned(index, mesh, P())
    proxy.clear()
    require_equal(checkpoint.load(index, sharding_plan), tensors)
    bounds = [
        [int(text) for text in ranges.removeprefix("bytes=").split("-")]
        for _, _, ranges in proxy.seen
    ]
    lengths = [last + 1 - first for first, last in bounds]
    assert sum(lengths) == nbytes + 1
    assert len(lengths) / (nbytes / 2**23) <= 1.1
    assert max(lengths) <= 24 * 2**20


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
def test_planned_reads_of_many_arrays_are_those_of_a_load(behind_proxy, mesh, spec):
    server, proxy = behind_proxy
    small = np.zeros((8, 16), np.float32)
    tensors = {f"l.{number:03}": small + number for number in range(200)}
    # In the file it separates arrays by more than a gap that is read along.
    tensors["l.100"] = np.zeros((8, 2**14), np.float32)
    server.put(f"planned/{spec}/model.safetensors", save(tensors))
    index = checkpoint.read_index(server.place(f"planned/{spec}"))
    sharding_plan = planned(index, mesh, spec).select("l.0|l.15|l.19")
    reads = checkpoint.plan_reads(index, sharding_plan, unread="allow")
    proxy.clear()
    checkpoint.load(index, sharding_plan, unread="allow")
    bounds = [
        [int(text) for text in ranges.removeprefix("bytes=").split("-")]
        for _, _, ranges in proxy.seen
    ]
    lengths = [last + 1 - first for first, last in bounds if last > first]
    (process,) = reads.processes
    assert process.reads == len(lengths) == 2
    assert process.read_bytes == sum(lengths)
    assert process.needed_bytes == 120 * small.nbytes


def test_the_host_of_a_files_url_is_this_machine(mesh, tmp_path):
    tensors = arrays(2)
    save_file(tensors, tmp_path / "model.safetensors")
    sharding_plan = planned(checkpoint.read_index(tmp_path), mesh, P())
    loaded = checkpoint.load(f"file://localhost{tmp_path}", sharding_plan)
    require_equal(loaded, tensors)
    for place in (f"file://other{tmp_path}", "file://run/step-1"):
        host = place[7:].partition("/")[0]
        with pytest.raises(
            CheckpointError, match=f"names the host '{host}', and files"
        ):
            checkpoint.load(place, sharding_plan)
