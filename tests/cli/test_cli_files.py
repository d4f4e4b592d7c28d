import itertools
import sys

import numpy as np
from safetensors.numpy import save_file

from tests.cli.commands import ROOT, failure, python, run


def test_nothing_is_allocated_and_no_backend_starts(module, tmp_path):
    code = f"""
        from jax._src import xla_bridge
        code = main(["plan", "{module}:huge", "--mesh", "fsdp=4096", "--rules", "w->fsdp"])
        sys.exit(code or xla_bridge.backends_are_initialized())
    """
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4.0 TiB" in done.stdout
    assert "1.0 GiB per device" in done.stdout


def test_names_that_a_terminal_would_obey_are_escaped(module, capsys):
    flags = (
        "--mesh",
        "data\x1b[2J=-1",
        "--rules",
        ".*->replicate",
        "--target",
        "tpu:v5e:4x4",
    )
    assert run("plan", f"{module}:escapes", *flags) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"red\x1b[31m  f32[8]" in out
    assert r"line\nbreak  " in out
    assert r"\udc80  " in out
    assert r"on mesh data\x1b[2J=16 (16 devices)" in out
    assert r"mean hops: data\x1b[2J " in out
    assert r"on every device: line\nbreak (32 B), red\x1b[31m" in out


def test_a_terminal_without_the_characters(module, tmp_path):
    code = f"""
        main(["plan", "{module}:STRUCTS", "--mesh", "\u00e9=2", "--rules", "w->\u00e9"])
        sys.exit(main(["plan", "{module}:\u00e9", "--mesh", "a=2", "--rules", "w->a"]))
    """
    done = python(
        code, tmp_path, PYTHONIOENCODING="ascii:strict", PYTHONPATH=f"{ROOT}", PATH=""
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert r"on mesh \xe9=2" in done.stdout
    assert r"has no `\xe9`" in done.stderr


def test_an_optimizer_is_planned_with_its_model(module, capsys):
    arguments = (
        "plan",
        f"{module}:STRUCTS",
        "--mesh",
        "fsdp=4",
        "--rules",
        "w->fsdp",
        "--optimizer",
    )
    for name in ("OPTIMIZER", "optimizer"):
        assert run(*arguments, f"{module}:{name}") == 0
        lines = capsys.readouterr().out.splitlines()
        parts = [line.split()[0] for line in lines[1:4]]
        assert parts == [
            "model/w",
            "optimizer/0/count",
            "optimizer/0/mu/w",
        ]
        assert (
            "4 arrays, 12.0 KiB, on mesh fsdp=4 (4 devices): 3.0 KiB per device"
            in "\n".join(lines)
        )
    for name in ("optax:adamw", "optax:sgd", "optax:adafactor"):
        assert run(*arguments, name) == 0
        assert "model/w" in capsys.readouterr().out
    assert "it must be an optimizer, with `init`" in failure(
        capsys, *arguments, f"{module}:number"
    )
    assert "needs_more" in failure(capsys, *arguments, f"{module}:needs_more")


def test_a_directory_of_safetensors(tmp_path, monkeypatch, capsys):
    shapes = {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (32, 64),
        "mlp.up_proj": (128, 64),
    }
    arrays = {
        f"model.layers.{layer}.{name}.weight": shapes[name]
        for layer, name in itertools.product(range(3), shapes)
    }
    (tmp_path / "model-dir").mkdir()
    file = tmp_path / "model-dir" / "model.safetensors"
    arrays_by_name = {
        name: np.zeros(shape, np.float16) for name, shape in arrays.items()
    }
    save_file(arrays_by_name, file)
    monkeypatch.chdir(tmp_path)
    arguments = ("plan", "./model-dir", "--mesh", "fsdp=8,tensor=4")
    assert run(*arguments, "--rules", "llama:head_dim=16") == 0
    lines = capsys.readouterr().out.splitlines()
    (key,) = [line for line in lines if "layers.{0..2}.self_attn.k_proj.weight" in line]
    assert key.split()[1:4] == ["3", "f16[32,64]", "-,fsdp"]
    assert "32 elements are 2 units of 16" in "\n".join(lines)
    assert run(*arguments, "--rules", "llama:head_dim=16", "--refine") == 0
    assert "on mesh fsdp=8,tensor_0=2,tensor_1=2" in capsys.readouterr().out
    assert "unexpected keyword argument 'heads'" in failure(
        capsys, *arguments, "--rules", "llama:heads=16"
    )
    assert "not of the form NAME" in failure(
        capsys, *arguments, "--rules", "llama:heads"
    )


def test_a_users_module_may_have_the_name_of_a_rule_set(tmp_path, monkeypatch, capsys):
    text = "from shardfx import PathRules\nRULES = PathRules.parse('.*->fsdp')\n"
    (tmp_path / "llama.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    # A console script does not put the current directory into `sys.path`.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "llama", raising=False)
    assert str(tmp_path) not in sys.path
    arguments = ("plan", "llama3-8b", "--mesh", "fsdp=8", "--rules", "llama:RULES")
    try:
        assert run(*arguments) == 0
    finally:
        sys.modules.pop("llama", None)
    assert "fsdp" in capsys.readouterr().out


def test_min_bytes_unmatched_and_width(module, capsys):
    arguments = ("plan", f"{module}:STRUCTS", "--mesh", "fsdp=4", "--rules")
    assert run(*arguments, "w->fsdp", "--min-bytes", "10000") == 0
    assert "arrays of fewer than 10000 bytes stay whole; lower `min_bytes`" in " ".join(
        capsys.readouterr().out.split()
    )
    assert "pass `--unused allow`" in failure(
        capsys, *arguments, "x->fsdp", "--unmatched", "replicate"
    )
    flags = ("--unmatched", "replicate", "--unused", "allow", "--width", "72")
    assert run(*arguments, "x->fsdp", *flags) == 0
    out = capsys.readouterr().out
    assert "no rule covers the array" in out
    assert max(map(len, out.splitlines())) <= 72
