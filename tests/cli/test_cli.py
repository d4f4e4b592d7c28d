import itertools
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import shardfx
from shardfx.__main__ import main
from shardfx._cli._load import rule_set_names
from shardfx._cli.group import _VERBS


ROOT = Path(__file__).parents[2]
NUMBERS = itertools.count()
VERBS = tuple(_VERBS)
MODEL = """
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from shardfx import AxisRules, PathRules, field, fsdp

def make(key):
    return eqx.nn.MLP(1024, 1024, 4096, 2, key=key)

def huge():
    return {"w": jnp.zeros((1 << 20, 1 << 20))}

def many():
    return {f"a_{i}_w": jnp.zeros((4, i + 1)) for i in range(3000)}

class Dense(eqx.Module):
    weight: jax.Array = field(names=("embed", "mlp"))

    def __init__(self, size=64, *, key):
        self.weight = jax.random.normal(key, (size, 4 * size))

def configured(config, depth, *, key):
    return make(key)

def failing():
    return jnp.zeros((2, 3)) @ jnp.zeros((2, 3))

def calls_back(path, leaf):
    return P({}[path])

class Sized(eqx.Module):
    weight: jax.Array

    def __init__(self, width, depth=2, scale=1.0, *, key):
        self.weight = jax.random.normal(key, (depth, width)) * scale

def seeded(depth, key):
    return {"weight": jnp.zeros((depth, key))}

nested = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
for _ in range(1100):
    nested = {"a": nested}
escapes = {name: jax.ShapeDtypeStruct((8,), jnp.float32) for name in ("red\\x1b[31m", "line\\nbreak", "\\udc80")}
digits = {f"a.{n * 5000}.w": jax.ShapeDtypeStruct((8,), jnp.float32) for n in "89"}
STRUCTS = {"w": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)}
PATHS = PathRules([("bias", P()), ("weight", fsdp("fsdp"))])
NAMED = PathRules([("bias", P()), ("weight", ("mlp", "embed"))])
AXES = AxisRules([("mlp", "tensor"), ("embed", "fsdp")], modes={"decode": [("embed", None)]})
PAIR = (AXES, NAMED)
CALLABLE = PathRules([(".*", calls_back)])

def rules():
    return NAMED, AXES

def failing_rules():
    return {}["missing"]

def number():
    return 3

OPTIMIZER = optax.adam(1e-3)

def optimizer():
    return OPTIMIZER

def needs_more(rate):
    return OPTIMIZER
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module, in the current directory, that holds MODEL; each test has
    its own.
    """
    name = f"cli_model_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def run(*arguments):
    """The exit code of the command line."""
    return main(arguments)


def failure(capsys, *arguments):
    """The one line on stderr of a command that fails with exit code 2."""
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    return err.strip()


MAKE, SIZED, SLICE = (
    "plan {}:make --mesh",
    "plan {}:Sized --mesh fsdp=2 --rules weight->None.fsdp",
    "plan {}:STRUCTS",
)
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
    assert run(*shlex.split(words.replace("{}", module))) == 0
    assert shown in capsys.readouterr().out


def python(code, folder=ROOT, **flags):
    """The result of code that runs in a separate process, in which `main` is the
    command line.
    """
    code = f"import sys\nfrom shardfx.__main__ import main\n{textwrap.dedent(code)}"
    words = [sys.executable, "-c", "import sys; exec(sys.argv[1])", code]
    return subprocess.run(
        words,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=flags or None,
    )


def test_nothing_is_allocated_and_no_backend_starts(module, tmp_path):
    code = f"""
        from jax._src import xla_bridge
        code = main(["plan", "{module}:huge", "--mesh", "fsdp=4096", "--rules", "w->fsdp"])
        sys.exit(code or xla_bridge.backends_are_initialized())
    """
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4.0 TiB" in done.stdout and "1.0 GiB per device" in done.stdout


FORM = "is not of the form NAME=VALUE, ..., with numbers, strings in quotes"
BAD_KWARGS = {
    **dict.fromkeys(
        (
            "width",
            "4",
            "**{'width': 4}",
            "width=4)(key=3",
            "width=4; depth=3",
            "width=4, width=4",
        ),
        FORM,
    ),
    **dict.fromkeys((f"width={'9' * 5000}", "width=wide", "width=exit(3)"), FORM),
    "widht=4": "unexpected keyword argument 'widht'",
    "depth=4": "missing 1 required positional argument: 'width'",
    "width='wide'": "TypeError",
}


@pytest.mark.parametrize("kwargs", BAD_KWARGS)
def test_arguments_that_do_not_fit(kwargs, module, capsys):
    flags = ("--kwargs", kwargs, "--mesh", "fsdp=2", "--rules", "w->fsdp")
    assert BAD_KWARGS[kwargs] in failure(capsys, "plan", f"{module}:Sized", *flags)
    assert "--kwargs are for a callable, but" in failure(
        capsys, "plan", f"{module}:STRUCTS", *flags[2:], "--kwargs", "a=4"
    )


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
    assert (
        "\x1b" not in out
        and r"red\x1b[31m  f32[8]" in out
        and r"line\nbreak  " in out
        and r"\udc80  " in out
    )
    assert (
        r"on mesh data\x1b[2J=16 (16 devices)" in out
        and r"mean hops: data\x1b[2J " in out
    )
    assert r"on every device: line\nbreak (32 B), red\x1b[31m" in out


def test_a_terminal_without_the_characters(module, tmp_path):
    code = f"""
        main(["plan", "{module}:STRUCTS", "--mesh", "\u00e9=2", "--rules", "w->\u00e9"])
        sys.exit(main(["plan", "{module}:\u00e9", "--mesh", "a=2", "--rules", "w->a"]))
    """
    done = python(
        code, tmp_path, PYTHONIOENCODING="ascii:strict", PYTHONPATH=f"{ROOT}", PATH=""
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert r"on mesh \xe9=2" in done.stdout and r"has no `\xe9`" in done.stderr


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
        assert [line.split()[0] for line in lines[1:4]] == [
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
        f"model.layers.{i}.{name}.weight": shape
        for i in range(3)
        for name, shape in shapes.items()
    }
    (tmp_path / "model-dir").mkdir()
    file = tmp_path / "model-dir" / "model.safetensors"
    save_file(
        {name: np.zeros(shape, np.float16) for name, shape in arrays.items()}, file
    )
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
    assert "no rule covers the array" in out and max(map(len, out.splitlines())) <= 72


def place(text):
    """How the line of MODEL that holds `text` is named."""
    return f".py, line {MODEL[: MODEL.index(text)].count(chr(10)) + 1}"


BAD = {
    "no such module": (
        ("nowhere:make", "fsdp=4", "w->fsdp"),
        "there is no module `nowhere`",
    ),
    "no such name": (("{}:makes", "fsdp=4", "w->fsdp"), "has no `makes`"),
    "a file": (
        ("{}.py:make", "fsdp=4", "w->fsdp"),
        ".py' is a file; name its module, `cli_model_",
    ),
    "arguments": (
        ("{}:configured", "fsdp=4", "w->fsdp"),
        "missing 2 required positional arguments: 'config' and",
    ),
    "a module alone": (
        ("{}", "fsdp=4", "w->fsdp"),
        ". A model is named as MODULE:CALLABLE, as in `cli_model_",
    ),
    "a name of 1,000 parts": (
        ("a." * 1000 + "a:b", "fsdp=4", "w->fsdp"),
        "failed: RecursionError",
    ),
    "a lone surrogate": (
        ("{}:\udc80", "fsdp=4", "w->fsdp"),
        r":\udc80' is not of the form MODULE:NAME",
    ),
    "an escape code in a name": (
        ("{}:escapes", "fsdp=4", "red->None.fsdp, .*->fsdp"),
        r"leaf `red\x1b[31m`",
    ),
    "a large tree without end": (("{}:nested", "fsdp=4", "w->fsdp"), "RecursionError"),
    "a failing model": (
        ("{}:failing", "fsdp=4", "w->fsdp"),
        f"{place('@')}: TypeError",
    ),
    "unknown size": (("{}:make", "data=-1", "w->fsdp"), "say what fills it"),
    "rules that are none": (
        ("{}:make", "fsdp=4", "{}:number"),
        "it must be PathRules, AxisRules",
    ),
    "failing rules": (
        ("{}:make", "fsdp=4", "{}:failing_rules"),
        f"{place('missing')}: KeyError: 'missing'",
    ),
    "a failing callable": (
        ("{}:make", "fsdp=4", "{}:CALLABLE"),
        "failed for the path 'layers/0/bias'",
    ),
    "a strategy": (
        ("{}:make", "fsdp=4", "fsdp_tp"),
        "is for a published model, as llama3-8b",
    ),
    "Hugging Face's name": (
        ("meta-llama/Llama-3.1-8B", "fsdp=4", "fsdp"),
        "did you mean 'llama3.1-8b'",
    ),
    "advice": (("{}:make", "fsdp=4", "bias->fsdp"), "or pass `--unmatched replicate`"),
    "names without rules": (
        ("{}:make", "fsdp=4", "{}:NAMED"),
        "need rules that say which mesh axes they use",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, module, capsys):
    (model, mesh, rules), message = BAD[case]
    line = failure(
        capsys,
        "plan",
        model.format(module),
        "--mesh",
        mesh,
        "--rules",
        rules.format(module),
    )
    assert line.startswith("shardfx plan: error: ") and message in line


def transcript(text):
    """The words of each command of a text, in which `\\x1b` is the character, and the
    line that follows it.
    """
    pairs = re.findall(r"^\$ (.*)\n(.*)$", text, re.MULTILINE)
    words = [
        shlex.split(command.replace(r"\x1b", "\x1b").replace("DIGITS", "9" * 5000))
        for command, _ in pairs
    ]
    return [
        pytest.param(words_of_command, printed, id=command)
        for words_of_command, (command, printed) in zip(words, pairs, strict=True)
    ]


# A command, and the error that it prints.
FLAGS = transcript(r"""
$ plans
No such command 'plans'
$ plan m:m --rules w->fsdp
Missing option '--mesh'; give one, as in
$ plan llama3-8b
say for which devices: --devices 8 or --target tpu:v5e:4x4 alone, or
$ plan llama3-8b --mesh fsdp=4,tensor=2
`auto.plan` does not know what axis `tensor` is for
$ plan llama3-70b --devices 8
it fits on 64 chips: pass
$ plan llama3-8b --target tpu:v5e
is no slice; write it as
$ plan m:m --mesh fsdp=4 --rules lama
has this name; did you mean 'llama'?
$ plan m:m --mesh a=-1 --rules llama --devices DIGITS
is not a valid integer
$ plan m:m --mesh a=2 --rules llama:head_dim=DIGITS
ValueError: Exceeds the limit
$ plan m:m --mesh a=2 --rules llama --\x1b[31m
--\x1b[31m
$ plan m:m --mesh a=-1 --rules llama --target v5p
'v5p' is no slice; write it as
$ plan m:m --mesh a=-1 --rules llama --target tpu:v5e:4x4 --devices 8
has 16 devices, not 8
$ plan nofile.json --mesh fsdp=2 --rules fsdp
there is no file and no published model 'nofile.json'
$ plan ./model-dir --kwargs depth=4 --mesh fsdp=2 --rules w->fsdp
--kwargs are for a callable or a published model; name one as
$ plan module:make --mesh fsdp=2 --rules fsdp --dtype float32
--dtype is for a published model
$ plan gpt2 --mesh fsdp=2 --rules fsdp --only k_porj
matches no path of the plan
$ plan cut.safetensors --mesh fsdp=8 --rules llama
cut.safetensors
$ plan {}:make --mesh fsdp=4 --rules .*->fsdp(fsdp) --json /nonexistent/plan.json
writing '/nonexistent/plan.json' failed: FileNotFoundError
$ plan {}:STRUCTS --mesh fsdp=5 --rules w->fsdp --strict
`--strict`, and these leaves
""")


@pytest.mark.parametrize("words, message", FLAGS)
def test_bad_flags_are_one_line_and_exit_code_2(words, message, module, capsys):
    Path("cut.safetensors").write_bytes(b"\xff" * 20)
    assert message in failure(capsys, *[word.replace("{}", module) for word in words])


def test_a_module_that_does_not_import(module, tmp_path, capsys):
    for name, text, message in (
        ("syntax", "x = (", "line 1: SyntaxError"),
        ("leaves", "import sys\nsys.exit(3)", "line 2: SystemExit: 3"),
        ("raises", "class Odd(Exception): pass\nraise Odd('no')", "line 2: Odd: no"),
        (
            "needs",
            "import nowhere",
            "line 1: ModuleNotFoundError: No module named 'nowhere'",
        ),
    ):
        (tmp_path / f"cli_{name}.py").write_text(text)
        line = failure(
            capsys, "plan", f"cli_{name}:make", "--mesh", "fsdp=4", "--rules", "w->fsdp"
        )
        assert message in line


def test_no_words_at_all_show_the_help(capsys):
    assert run() == 0
    out = capsys.readouterr().out
    assert (
        "Usage: shardfx [OPTIONS] COMMAND" in out
        and max(map(len, out.splitlines())) < 120
    )


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
        ["sh", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (
        (message in done.stderr)
        and done.stderr.count("\n") == bool(message)
        and done.returncode == (2 if message else 0)
    )
    assert ("bf16[64,32]" in done.stdout) == (not where)


def test_an_interrupt_is_one_line(module, tmp_path, capsys):
    (tmp_path / "cli_interrupted.py").write_text("raise KeyboardInterrupt")
    assert (
        main(["plan", "cli_interrupted:make", "--mesh", "fsdp=4", "--rules", "w->fsdp"])
        == 130
    )
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
        command, cwd=tmp_path, text=True, stdout=pipe, stderr=pipe
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait(timeout=120) == 0


def test_every_rule_set_is_offered():
    names = rule_set_names()
    assert (
        {"eformer", "llama", "deepseek_v3", "t5x", "gpt2"}
        <= set(names)
        <= set(vars(shardfx.presets))
    )
    assert not {"infer_mode", "Layout", "models"} & set(names)


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
    done = python(f"sys.exit(main({['demo', *flags]}))")
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert (
        "4 x emulated cpu, as the mesh data=1,fsdp=2,tensor=2" in out
        and "layers/query" in out
    )
    assert (
        "Explicit axes" in out and " as planned" in out and "NOT as planned" not in out
    )
    assert "tokens/s" in out and "The curves are the same up to rounding." in out


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
    assert (done.returncode, done.stdout) == (
        0,
        "",
    ) and "does not divide 8 devices" in mesh
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
    line, axis = failure(capsys, "plan", *flags), mesh.split(",")[-1].split("=")[0]
    assert (
        f"has the axis '{axis}', and --rules fsdp_tp uses data, fsdp, tensor; {reason}"
        in line
    )
    assert run("lint", *flags) == 1


def test_a_part_of_the_table_and_another_dtype(capsys):
    flags = ("--kwargs", "layers=2", "--mesh", "fsdp=8,tensor=4", "--rules", "fsdp_tp")
    assert (
        main(
            [
                "plan",
                "llama3-8b",
                *flags,
                "--only",
                "k_proj|v_proj",
                "--dtype",
                "float32",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "self_attn/k_proj/weight" in out
        and "f32[1024,4096]" in out
        and "up_proj" not in out
        and "4 arrays" in out
    )
