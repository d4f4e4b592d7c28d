import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import shardfx
from tests.cli.commands import failure, python, run


MAKE = "plan {}:make --mesh"
SIZED = "plan {}:Sized --mesh fsdp=2 --rules weight->None.fsdp"
SLICE = "plan {}:STRUCTS"
FULL = "w->fsdp --target tpu:"
# What one asks for, and what the plan says then.
SHOWN = {
    "path rules": (
        f"{MAKE} fsdp=4,tensor=2 --rules {{}}:PATHS",
        "f32[4096,1024]  fsdp  ",
    ),
    "a pair of rules": (
        f"{MAKE} fsdp=4,tensor=2 --rules {{}}:PAIR",
        "f32[4096,1024]  tensor,fsdp  ",
    ),
    "a function of rules": (
        f"{MAKE} fsdp=4,tensor=2 --rules {{}}:rules",
        "f32[4096,1024]  tensor,fsdp  ",
    ),
    "text": (
        f"{MAKE} fsdp=4,tensor=2 --rules 'bias->replicate, weight->None.tensor+fsdp'",
        "  -,tensor+fsdp  ",
    ),
    "names on fields": (
        "plan {}:Dense --mesh fsdp=4,tensor=2 --rules {}:AXES",
        "f32[64,256]  fsdp,tensor",
    ),
    "a mode": (
        "plan {}:Dense --mesh fsdp=4,tensor=2 --rules {}:AXES --mode decode",
        "f32[64,256]  -,tensor",
    ),
    "arguments": (f"{SIZED} --kwargs 'depth=4, width=8'", "f32[4,8]"),
    "arguments without rules": (
        "plan {}:Sized --devices 2 --kwargs 'depth=4, width=8'",
        "f32[4,8]",
    ),
    "spaces and a sign": (
        f"{SIZED} --kwargs ' width = 16 , scale=-1e-3 ,'",
        "f32[2,16]",
    ),
    "an argument `key`": (
        "plan {}:seeded --kwargs 'depth=4, key=6' --mesh fsdp=2 --rules weight->fsdp",
        "f32[4,6]",
    ),
    "5,000 digits": (
        "plan {}:digits --mesh fsdp=2 --rules .*->fsdp --width 80",
        "2 arrays, 64 B",
    ),
    "32 devices": (
        f"{SLICE} --mesh data=-1,fsdp=4 --rules w->fsdp --devices 32",
        "on mesh data=8,fsdp=4 (32 ",
    ),
    "v5p": (
        f"{SLICE} --mesh data=-1,fsdp=16,tensor=8 --rules {FULL}v5p:8x8x8",
        "data=4,fsdp=16,tensor=8 (512 ",
    ),
    "order": (
        f"{SLICE} --mesh data=-1,fsdp=4 --rules {FULL}v5p:2x2x2",
        "On tpu:v5p:2x2x2: 8 devices, ordered",
    ),
}


@pytest.mark.parametrize("case", SHOWN)
def test_a_plan_shows_what_was_asked_for(case, module, capsys):
    words, shown = SHOWN[case]
    output = run(*shlex.split(words.replace("{}", module)))
    assert output == 0
    assert shown in capsys.readouterr().out


def test_no_words_at_all_show_the_help(capsys):
    assert run() == 0
    out = capsys.readouterr().out
    assert "Usage: shardfx [OPTIONS] COMMAND" in out
    assert max(map(len, out.splitlines())) < 120


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "where, message", [(">/dev/full", "No space left"), (">&-", "")]
)
def test_a_text_that_cannot_be_printed_is_said_so_or_not_missed(
    where, message, module, tmp_path
):
    words = (
        f"{sys.executable} -m shardfx plan {module}:STRUCTS --mesh fsdp=4 --rules"
        f" 'w->fsdp' {where}"
    )
    done = subprocess.run(
        ["sh", "-c", words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert message in done.stderr
    assert done.stderr.count("\n") == bool(message)
    assert done.returncode == (2 if message else 0)
    assert ("bf16[64,32]" in done.stdout) == (not where)


@pytest.mark.parametrize("words", ["plna", "plan no_such_module:make"])
def test_the_exit_code_of_bad_input_needs_no_stderr(words, tmp_path):
    line = f"{sys.executable} -m shardfx {words} 2>&-"
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""


def test_an_interrupt_is_one_line(module, tmp_path, capsys):
    (tmp_path / "cli_interrupted.py").write_text("raise KeyboardInterrupt")
    flags = ("--mesh", "fsdp=4", "--rules", "w->fsdp")
    assert run("plan", "cli_interrupted:make", *flags) == 130
    assert capsys.readouterr() == ("", "\nshardfx: stopped\n")


def test_a_reader_that_has_enough(module, tmp_path):
    code = f"""
        import sys
        from shardfx.__main__ import main
        sys.exit(main(["plan", "{module}:many", "--mesh", "fsdp=4", "--rules", ".*->fsdp", "--json"]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        text=True,
        stdout=pipe,
        stderr=pipe,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait(timeout=120) == 0


@pytest.mark.parametrize("name", ["eformer", "llama", "deepseek_v3", "t5x", "gpt2"])
def test_every_rule_set_is_offered(name, module, capsys):
    run("plan", f"{module}:STRUCTS", "--mesh", "fsdp=4", "--rules", name)
    assert "no ready set has this name" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["infer_mode", "Layout", "models"])
def test_other_names_of_presets_are_no_rule_sets(name, module, capsys):
    assert name in dir(shardfx.presets)
    flags = ("--mesh", "fsdp=4", "--rules", name)
    line = failure(capsys, "plan", f"{module}:STRUCTS", *flags)
    assert "no ready set has this name" in line


def test_the_demo_from_the_command_line():
    flags = (
        "--cpu-devices",
        "4",
        "--axis-types",
        "explicit",
        "--steps",
        "2",
        "--batch",
        "2",
    )
    # A smaller model and short texts: the programs are the same.
    code = f"""
        import functools
        from shardfx._cli import demo
        demo.LAYERS = 2
        demo.HIDDEN = 64
        demo.Run = functools.partial(demo.Run, length=16)
        sys.exit(main({["demo", *flags]}))
    """
    done = python(code)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "batches of 2 x 16" in out
    assert "4 x emulated cpu, as the mesh data=1,fsdp=2,tensor=2" in out
    assert "layers/query" in out
    assert "Explicit axes" in out
    assert " as planned" in out
    assert "NOT as planned" not in out
    assert "tokens/s" in out
    assert "The curves are the same up to rounding." in out


def test_the_demo_that_cannot_run():
    code = """
        wrong = main(["demo", "--mesh", "data=3,fsdp=-1", "--cpu-devices", "8"])
        for name in [name for name in sys.modules if name.startswith(("optax", "shardfx._cli.demo"))]:
            del sys.modules[name]
        sys.modules["optax"] = None
        sys.exit((wrong, main(["demo"])) != (2, 2))
    """
    done = python(code)
    mesh, optax = done.stderr.splitlines()
    assert done.returncode == 0
    assert done.stdout == ""
    assert "does not divide 8 devices" in mesh
    assert (
        optax
        == "shardfx demo: error: the demo needs optax; install it with: pip install"
        " 'shardfx[demo]'"
    )


@pytest.mark.parametrize(
    "mesh, reason",
    [("fsdp=8,tesnor=4", "did you mean 'tensor'?"), ("x=8", "for another name write")],
)
def test_a_mesh_axis_that_no_strategy_uses_is_an_error(mesh, reason, capsys):
    flags = ("llama3-8b", "--kwargs", "layers=1", "--mesh", mesh, "--rules", "fsdp_tp")
    axis = mesh.split(",")[-1].split("=")[0]
    line = failure(capsys, "plan", *flags)
    assert (
        f"has the axis '{axis}', and --rules fsdp_tp uses data, fsdp, tensor; {reason}"
        in line
    )
    assert run("lint", *flags) == 1


def test_a_part_of_the_table_and_another_dtype(capsys):
    flags = ("--kwargs", "layers=2", "--mesh", "fsdp=8,tensor=4", "--rules", "fsdp_tp")
    shown = ("--only", "k_proj|v_proj", "--dtype", "float32")
    assert run("plan", "llama3-8b", *flags, *shown) == 0
    out = capsys.readouterr().out
    assert "self_attn/k_proj/weight" in out
    assert "f32[1024,4096]" in out
    assert "up_proj" not in out
    assert "4 arrays" in out
