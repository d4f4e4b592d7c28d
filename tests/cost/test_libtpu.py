"""libtpu's texts about memory, read without libtpu, and what is said where it is not
installed. `tests/house/test_aot.py` asks libtpu itself.
"""

import dataclasses
import errno
import fcntl
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from shardfx import MeshSpec, PathRules, _step, plan
from shardfx._step import libtpu, libtpu_worker, worker
from shardfx.cost import compile_for, estimate, fit
from shardfx.cost._allocations import assigned_memory
from shardfx.errors import MeshError, ProgramError


without_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed"
)
PROGRAM = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %first = f32[16,128]{1,0} custom-call(%x), metadata={op_name="jit(step)/sin"}
  %second = f32[8,128]{1,0} slice(%first), slice={[0:8], [0:128]}
  %copy-start = (f32[8,128]{1,0}, f32[8,128]{1,0}, u32[]) copy-start(%second)
  %copy-done = f32[8,128]{1,0} copy-done(%copy-start)
  ROOT %last = f32[8,128]{1,0} negate(%copy-done), metadata={op_name="jit(step)/neg"}
}
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[8,128]| at ShapeIndex {}:
 value: <0 x @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
allocation 1: size 4096, output shape is |f32[8,128]|, maybe-live-out:
 value: <5 last @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
allocation 2: size 512, constant:
 value: <6 zero @0> (size=512,offset=0): f32[]{:T(128)}
allocation 3: size 16384, preallocated-temp:
 value: <1 first @0> (size=8192,offset=0): f32[16,128]{1,0:T(8,128)}
 value: <2 second @0> (size=4096,offset=8192): f32[8,128]{1,0:T(8,128)}
 value: <3 copy-start{0} @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
 value: <7 gone (phi) @0> (size=8192,offset=0): f32[16,128]{1,0:T(8,128)}
allocation 4: size 4096, color 1, preallocated-temp:
 value: <4 copy-start{1} @1> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)S(1)}
"""
RANGES = """HloLiveRange (max 5):
  InstructionSequence:
    0:x
    1:first
    2:second
    3:copy-start
    4:copy-done
    5:last
  BufferLiveRange:
    x{}:0-1
    first{}:1-2
    gone{}:1-2
    second{}:2-3
    copy-start{0}:3-5
    last{}:5-5
"""
REPORT = """Memory Space: default (color=0)
Total bytes: 25088 (24.5KiB)
  cumulative_size;       size
Memory Space: vmem (color=1)
Total bytes: 4096 (4.0KiB)
"""
TEXTS = _step.TpuTexts(
    scheduled=PROGRAM,
    assignment=ASSIGNMENT,
    ranges=RANGES,
    report=REPORT,
    out_of_memory="",
)


def read(texts=TEXTS, count=1, *, is_tupled=False):
    module = _step.parse_hlo(texts.scheduled)
    return assigned_memory(texts, module, count, is_tupled=is_tupled)


def test_memory_is_what_libtpu_assigns():
    memory = read()
    assert memory.peak_bytes == 25088
    assert memory.on_chip_bytes == 4096
    assert memory.arguments == (4096,)
    assert memory.results == (4096,)
    # `first` and `second` live at once. Two states of one array take its place once.
    assert [array.bytes for array in memory.arrays] == [8192, 4096]
    assert memory.arrays[0].op_name == "jit(step)/sin"
    assert memory.gap_bytes == 16384 - 12288
    assert memory.temporary_bytes == 16384 + 512


@pytest.mark.parametrize("type_text", ["(f32[2]{0}, s32[])", "token[]"])
def test_a_value_that_is_no_array_is_shown_as_its_bytes(type_text):
    value = "(size=4096,offset=8192): f32[8,128]{1,0:T(8,128)}"
    assert value in ASSIGNMENT
    other = ASSIGNMENT.replace(value, f"(size=4096,offset=8192): {type_text}")
    first, second = read(TEXTS._replace(assignment=other)).arrays
    assert str(first.buffer) == "f32[16,128]"
    assert str(second.buffer) == "u8[4096]"


def test_a_tuple_of_arguments_is_taken_apart():
    tupled = ASSIGNMENT.replace("at ShapeIndex {}", "at ShapeIndex {2}")
    memory = read(TEXTS._replace(assignment=tupled), 4, is_tupled=True)
    assert memory.arguments == (0, 0, 4096, 0)


@pytest.mark.parametrize("end", [300, 700, len(ASSIGNMENT) - 200])
def test_texts_that_are_cut_off_are_no_answer(end):
    with pytest.raises(ProgramError, match="contradict each other.*disk.*is full"):
        read(TEXTS._replace(assignment=ASSIGNMENT[:end]))
    with pytest.raises(ProgramError, match="contradict each other"):
        read(TEXTS._replace(report=""))


def made():
    mesh = MeshSpec({"data": 8})
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    return plan(x, mesh, paths=PathRules.parse(".*->data")).structs


@without_libtpu
def test_without_libtpu_an_estimate_is_foreseen():
    sent = estimate(jnp.sum, made())
    assert sent.basis == "foreseen"
    assert sent.wire_bytes > 0
    assert "\nForeseen: expect " in str(sent)
    assert "measured steps.\n" in str(sent)
    assert "libtpu is not installed: `pip install 'shardfx[aot]'`" in str(sent)
    match = re.search(r"expect (\d+) B to (\d+) B\.", str(sent))
    assert match is not None
    least, most = map(int, match.groups())
    assert 0 < least < sent.wire_bytes <= most
    gpu = estimate(jnp.sum, made(), compiler="gpu")
    assert gpu.basis == "foreseen"
    assert "the compiler for GPUs may send" in str(gpu)
    cpu = estimate(jnp.sum, made(), compiler="cpu")
    assert cpu.basis == "compiled"
    assert cpu.notes == ()
    nothing = estimate(jnp.sin, made())
    assert str(nothing).startswith("no traffic")
    assert nothing.basis == "foreseen"


def test_temporaries_that_fit_on_chip_may_take_no_memory():
    fitted = fit(jnp.sum, made(), chip="h100")
    assert fitted.basis == "foreseen"
    exact_rows = [row for row in fitted.rows if row.exact]
    exact_bytes = sum(row.bytes for row in exact_rows)

    def least_bytes(temporary_bytes):
        temporaries = dataclasses.replace(
            exact_rows[0], bytes=temporary_bytes, exact=False
        )
        rows = (*exact_rows, temporaries)
        least, _ = dataclasses.replace(fitted, rows=rows).expected_bytes
        return least

    assert least_bytes(2**20) == exact_bytes
    assert least_bytes(2**30) > exact_bytes


@without_libtpu
def test_without_libtpu_the_page_says_what_to_install():
    found = fit(jnp.sum, made(), chip="v5e")
    assert found.basis == "foreseen"
    assert not found.out_of_memory
    assert "libtpu is not installed: `pip install 'shardfx[aot]'`" in str(found)
    with pytest.raises(MeshError, match=r"pip install 'shardfx\[aot\]'"):
        compile_for(jnp.sum, made(), target="tpu:v5e:2x4")


def test_a_chip_is_named_by_its_slice():
    for compiler in ("tpu", "tpu:v5p", "tpu:v5p:2x2x2"):
        estimated = estimate(jnp.sum, made(), compiler=compiler)
        (row,) = estimated.rows
        assert row.kind == "all-reduce"
        assert row.axes == ("data",)


def test_an_answer_that_is_cut_off_is_an_error(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "sys.stdin.buffer.readline()\n"
        'print(json.dumps({"sizes": [9], "error": ""}))\n'
        'print("half", end="")\n'
    )
    folder = tmp_path / "own"
    folder.mkdir()
    worker = libtpu.Worker([str(program)], str(folder))
    texts, error = worker.ask(b"", {})
    assert texts == []
    assert "its answer is cut off" in error
    assert not worker.is_alive
    assert not folder.exists()


def test_folders_of_killed_processes_are_removed(tmp_path):
    folders = {name: tmp_path / f"shardfx-libtpu-{name}" for name in "abcd"}
    for folder in (*folders.values(), tmp_path / "another-a"):
        folder.mkdir()
        (folder / "stderr").touch()
        if folder != folders["b"]:
            os.utime(folder, (time.time() - 100, time.time() - 100))
    lock = os.open(folders["c"], os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    own_lock = libtpu_worker._locked(str(folders["d"]))
    libtpu_worker._remove_abandoned(str(folders["d"]))
    os.close(lock)
    os.close(own_lock)
    # "b" is new, "c" is locked, "d" is the process's own.
    names = sorted(path.name[-1] for path in tmp_path.iterdir())
    assert names == ["a", "b", "c", "d"]
    assert not folders["a"].exists()


def test_a_full_disk_is_named(monkeypatch):
    """libtpu compiles to the end, and its files are empty."""
    monkeypatch.setattr(libtpu.importlib.metadata, "version", lambda _: "0.0.1")
    message = r"libtpu 0\.0\.1 writes no \*.*memory-usage.* has .* left.*set TMPDIR"
    texts = [b"text", b"", b"", b""]
    with pytest.raises(ProgramError, match=message):
        libtpu._tpu_texts(texts, "", _step.TpuSlice("v5e:2x2"))


def test_a_child_without_a_folder_ends_with_an_error(tmp_path):
    """Its parent alone goes on."""
    program = (
        "import sys\n"
        f"sys.path.insert(0, {os.path.dirname(libtpu_worker.__file__)!r})\n"
        "import libtpu_worker\n"
        "request = {'last': 'none', 'files': [], 'seconds': 30.0}\n"
        f"folder = {str(tmp_path / 'gone')!r}\n"
        "child = libtpu_worker._started(b'', request, folder)\n"
        "print(libtpu_worker._wait(folder, request, child.words_pipe))\n"
    )
    # Standard input stays open: a parent still waits.
    reading, writing = os.pipe()
    ran = subprocess.run(
        [sys.executable, "-c", program],
        stdin=reading,
        capture_output=True,
        text=True,
        timeout=60,
    )
    os.close(reading)
    os.close(writing)
    assert ran.stdout.count("No such file") == 1, ran.stderr


def test_a_child_is_in_no_group_of_the_user(tmp_path):
    """It is stopped for some time. If a process group with a stopped process loses its
    last parent, the kernel hangs up all of the group.
    """
    program = (
        "import os, sys, time\n"
        f"sys.path.insert(0, {os.path.dirname(libtpu_worker.__file__)!r})\n"
        "import libtpu_worker\n"
        "libtpu_worker._devices = lambda *_: print(os.getpgid(0), flush=True)\n"
        "request = {'target': '', 'slices': 1, 'order': []}\n"
        "libtpu_worker._write_chatter_to = lambda *_: None\n"
        f"child = libtpu_worker._started(b'', request, {str(tmp_path)!r})\n"
        "os.waitpid(child.id, 0)\n"
        "print(child.id, os.getpgid(0))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    group, child, group_of_parent = ran.stdout.split()
    assert group == child != group_of_parent, ran.stderr


def test_a_full_disk_of_xlas_is_named(monkeypatch):
    def full(module, request):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/shardfx-a")

    answer = io.BytesIO()
    encoded = json.dumps({"size": 0}).encode() + b"\n"
    request = io.BytesIO(encoded)
    monkeypatch.setattr(worker, "_answer", full)
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker.sys, "stdin", SimpleNamespace(buffer=request))
    monkeypatch.setattr(worker.sys, "stdout", SimpleNamespace(buffer=answer))
    worker.main()
    line = json.loads(answer.getvalue())
    assert line["sizes"] == []
    assert "No space left" in line["error"]
