import contextlib
import fcntl
import importlib
import importlib.util
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.cli.commands import ROOT, failure, run
from tests.cli.verb_files import data


def test_what_verbs_print_as_data(project, capsys):
    strategies = data(capsys, "models")["gpt2"]["strategies"]
    assert strategies == [
        "dp",
        "fsdp",
        "tp",
        "fsdp_tp",
    ]
    limit = {chip["name"] for chip in data(capsys, "chips")}
    assert {"v5p", "h100"} <= limit
    dims = data(
        capsys, "explain llama3-8b model/norm/weight --mesh fsdp=8,tensor=16 --rules tp"
    )["dims"]
    assert dims[0]["size"] == 4096
    assert "seconds" in data(
        capsys, "traffic my_model:train_step --mesh fsdp=8 --how estimate --chip v5p"
    )
    tables = data(capsys, "traffic my_model:train_step --mesh fsdp=8")
    expected = sum(row["wire_bytes"] for row in tables["rows"])
    assert tables["wire_bytes"] == expected > 0
    functions = {row["source"]["function"] for row in tables["rows"]}
    assert functions >= {"loss"}
    tables = data(
        capsys,
        "traffic my_model:train_step --mesh data=2,fsdp=2,tensor=2 --how compare",
    )
    compiled, estimated = (
        sum(row["wire_bytes"] for row in tables[how]["rows"])
        for how in ("compiled", "estimated")
    )
    assert tables["extra_bytes"] == compiled - estimated


def test_a_report_has_the_findings_the_chip_and_the_traffic(project, capsys):
    flags = (
        "--mesh",
        "fsdp=4,tensor=2",
        "--rules",
        "my_model:BOTH",
        "--chip",
        "v5p",
        "--step",
        "my_model:train_step",
    )
    output = run(
        "report",
        "my_model:make",
        *flags,
        "--html",
        "out.html",
        "--json",
        "out.json",
    )
    assert output == 0
    report = json.loads(Path("out.json").read_text())
    assert report["title"] == "my_model:make"
    assert report["chip"]["name"] == "v5p"
    assert report["traffic"]["wire_bytes"] > 0
    assert len(report["rows"]) == 2
    page = Path("out.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "my_model:make" in page


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None,
    reason="libtpu is installed",
)
def test_without_the_tpu_compiler_one_line_says_what_to_install(project, capsys):
    for words in (
        ("traffic", "my_model:train_step"),
        ("fit", "--compile", "--step", "my_model:train_step"),
    ):
        line = failure(capsys, *words, "--mesh", "fsdp=8", "--target", "tpu:v5e:2x4")
        assert "shardfx[aot]" in line


def test_a_checkpoint_is_converted_by_a_map_and_back(project, capsys):
    assert run("convert", "model-dir", "stacked", "--map", "my_model:STACKED") == 0
    out = capsys.readouterr().out
    assert "layers/up" in out
    assert "f32[3,4,8]" in out
    assert "2 arrays, 768 B, written to stacked." in out
    (file,) = Path("stacked").glob("*.safetensors")
    stacked = load_file(file)
    shapes_by_name = {name: array.shape for name, array in stacked.items()}
    expected = {
        "layers/down": (3, 8, 4),
        "layers/up": (3, 4, 8),
    }
    assert shapes_by_name == expected
    assert (stacked["layers/up"][2] == 2).all()
    back = ("--map", "my_model:STACKED", "--inverse", "--like", "model-dir")
    assert run("convert", "stacked", "again.safetensors", *back) == 0
    again = load_file("again.safetensors")
    first = load_file("model-dir/model.safetensors")
    assert sorted(again) == sorted(first)
    for name in first:
        assert (again[name] == first[name]).all()


def test_a_checkpoint_is_cast_and_a_dry_run_writes_nothing(project, capsys):
    flags = ("convert", "model-dir", "small.safetensors", "--dtype", "bfloat16")
    assert run(*flags, "--dry-run", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["written"] is None
    assert summary["bytes"] == 384
    assert not Path("small.safetensors").exists()
    assert run(*flags, "--json") == 0
    capsys.readouterr()
    assert Path("small.safetensors").exists()
    assert run(*flags, "--overwrite") == 0


def test_colours_are_for_terminals_alone():
    """On a terminal of 100 columns: in colours, no line longer than it, and the same
    words as elsewhere.
    """
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    words = [
        sys.executable,
        "-m",
        "shardfx",
        *"plan llama3.2-1b --mesh fsdp=8 --rules fsdp".split(),
    ]
    flags = {**os.environ, "TERM": "xterm-256color"}
    seen = b""
    with subprocess.Popen(
        words,
        cwd=ROOT,
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env=flags,
    ):
        os.close(inner)
        with contextlib.suppress(OSError):  # at its end
            while data := os.read(terminal, 65536):
                seen += data
    assert b"\x1b[" in seen
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen.decode()).replace("\r", "")
    assert max(map(len, plain.splitlines())) <= 100
    assert "146 arrays, 2.3 GiB, on mesh fsdp=8" in plain


def test_clean_lists_and_removes_what_killed_saves_left(capsys, tmp_path):
    partial_save = tmp_path / ".step-1.partial-0123456789abcdef"
    partial_save.mkdir()
    os.utime(partial_save, (1e9, 1e9))
    assert run("clean", str(tmp_path)) == 0
    assert ".step-1.partial-0123456789abcdef" in capsys.readouterr().out
    assert partial_save.exists()
    assert run("clean", str(tmp_path), "--remove", "--json") == 0
    decoded = json.loads(capsys.readouterr().out)[0]
    target = decoded["target"]
    assert target.endswith("step-1")
    assert not partial_save.exists()
    assert run("clean", str(tmp_path)) == 0
    assert capsys.readouterr().out == "nothing is left over\n"
