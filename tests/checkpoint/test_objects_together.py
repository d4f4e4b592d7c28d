"""Several processes save to a store together. When one dies, the others are told in
time, steps that were saved stay whole, and what it wrote is found.
"""

import socket
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from shardfx import checkpoint


SILENT_SECONDS = 2.0
JOB = """
    import os
    import signal
    import sys
    import time

    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from shardfx import checkpoint
    from shardfx.checkpoint import _coordination
    from shardfx.checkpoint._object_saves import ObjectSave
    from shardfx.errors import CheckpointError

    me = int(sys.argv[1])
    port, base, query, silent_seconds = sys.argv[2:]
    jax.config.update("jax_num_cpu_devices", 2)
    service = f"127.0.0.1:{port}"
    # The save itself has to miss a dead process, before JAX does and ends all others.
    jax.distributed.initialize(
        service,
        3,
        me,
        coordinator_bind_address=service,
        heartbeat_timeout_seconds=100,
    )


    def mesh_of(members):
        devices = [device for device in jax.devices() if device.process_index in members]
        return Mesh(np.array(devices), ("x",))


    def save_and_load():
        mesh = mesh_of((0, 1))
        values = np.arange(64, dtype=np.float32).reshape(8, 8)
        specs = {"rows": P("x"), "columns": P(None, "x"), "replicated": P()}
        laid = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        place = lambda part: values[part]
        tree = {
            name: jax.make_array_from_callback((8, 8), sharding, place)
            for name, sharding in laid.items()
        }
        path = f"{base}/step-0?{query}"
        checkpoint.save(path, {**tree, "step": 3})
        turned = {"rows": "columns", "columns": "rows", "replicated": "columns"}
        structs = {
            name: jax.ShapeDtypeStruct((8, 8), np.float32, sharding=laid[other])
            for name, other in turned.items()
        }
        for wanted in (tree, structs):
            loaded = checkpoint.load(path, {**wanted, "step": 0})
            assert loaded["step"] == 3
            for name in tree:
                for shard in loaded[name].addressable_shards:
                    assert np.array_equal(shard.data, values[shard.index]), name
        refused = {"step-0": "exists, and", "one.safetensors": "would be one object"}
        for name, text in refused.items():
            try:
                checkpoint.save(f"{base}/{name}?{query}", tree)
            except CheckpointError as error:
                assert text in str(error), error
            else:
                raise AssertionError(name)
        print("done", flush=True)


    def save(step, members):
        sharding = NamedSharding(mesh_of(members), P("x"))
        values = np.full((8, 8), step, np.float32)
        rows = jax.make_array_from_callback((8, 8), sharding, lambda part: values[part])
        # Each process writes several objects.
        checkpoint.save(f"{base}/step-{step}?{query}", {"rows": rows}, file_bytes=64)


    put = ObjectSave._put


    def put_and_die(self, *arguments):
        put(self, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)


    def save_beside_a_death(step, members, dead):
        if me == dead:
            ObjectSave._put = put_and_die
        begin = time.monotonic()
        try:
            save(step, members)
        except CheckpointError as error:
            seconds = time.monotonic() - begin
            print(f"{step}|{seconds:.1f}|{error}", flush=True)


    if me in (0, 1):
        save_and_load()
    _coordination._SILENT_SECONDS = float(silent_seconds)
    # The first of the savers, which writes the index, dies.
    if me in (1, 2):
        save(1, (1, 2))
        save_beside_a_death(2, (1, 2), dead=1)
    # Another one dies.
    if me in (0, 2):
        save(3, (0, 2))
        save_beside_a_death(4, (0, 2), dead=2)
    # JAX would wait for the dead.
    os._exit(0)
"""


@pytest.fixture(scope="module")
def outputs(s3):
    """What each of three processes printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base, _, query = s3.place("together").partition("?")
    arguments = [str(port), base, query, str(SILENT_SECONDS)]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(JOB), str(number), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    outputs = []
    for number, job in enumerate(jobs):
        with job:
            output, errors = job.communicate(timeout=200)
            assert job.returncode == (0 if number == 0 else -9), errors
            outputs.append(output.splitlines())
    return outputs


@pytest.mark.processes
def test_several_processes_save_and_load_parts(s3, outputs):
    assert outputs[0][0] == outputs[1][0] == "done"
    files = [key.rpartition("/")[2] for key in s3.keys("together/step-0/")]
    # Replicated arrays are written once; rows and columns by both.
    actual = sorted(file for file in files if file.endswith(".safetensors"))
    assert actual == [
        "00000-00000-512.safetensors",
        "00001-00000-256.safetensors",
    ]


@pytest.mark.processes
def test_a_process_that_dies_in_a_save_is_missed(s3, outputs):
    parts = outputs[2][0].split("|")
    first_seconds, first_text = parts[1:]
    parts = outputs[0][1].split("|")
    other_seconds, other_text = parts[1:]
    assert "process 1 gave no sign of life for 2 s while saving to" in first_text
    assert "process 2 gave no sign of life for 2 s while saving to" in other_text
    for text in (first_text, other_text):
        assert "Nothing was changed there; save again with processes that live" in text
    # The silence is at most a round late: `test_coordination` adds the same 9 seconds
    # to the silence of a job.
    for seconds in (first_seconds, other_seconds):
        assert float(seconds) < SILENT_SECONDS + 9

    # The steps that were saved before are whole, and the others are not there.
    place = s3.place("together")
    assert checkpoint.Manager(place).steps() == (0, 1, 3)
    base, _, query = place.partition("?")
    struct = {"rows": jnp.ones((8, 8))}
    for step in (1, 3):
        loaded = checkpoint.load(f"{base}/step-{step}?{query}", struct)
        assert (np.asarray(loaded["rows"]) == step).all()

    # Process 0 removed what was there of step 4. Nobody was left to do so for step 2.
    left = checkpoint.left_over(place, older_than_seconds=0, remove=True)
    targets = [directory.target for directory in left]
    assert any(target.endswith("step-2") for target in targets)
    for directory in left:
        assert directory.nbytes > 0
    assert not checkpoint.left_over(place, older_than_seconds=0)
    names = {key.partition("/")[0] for key in s3.keys("together/")}
    assert names == {"step-0", "step-1", "step-3"}
