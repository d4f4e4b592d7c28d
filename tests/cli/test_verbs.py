import contextlib
import fcntl
import importlib
import importlib.util
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import click
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_cli import ROOT, VERBS, failure, python, run, transcript

import shardfx
from shardfx import ShardPlan
from shardfx._cli._screen import data_of
from shardfx._cli.group import _VERBS, shardfx_


PAGE = (ROOT / "docs" / "cli.md").read_text()
# What the examples of the help name, beside what is on the page.
MORE = """
OPTIMIZER = optax.adamw(1e-3)
BY_HAND = AxisRules([("batch", "rows"), ("mlp", "columns")])
"""


def write_files(folder, added=""):
    """The page's model, and its checkpoint of three layers."""
    (folder / "my_model.py").write_text(
        "".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
        + added
    )
    (folder / "model-dir").mkdir()
    shapes = {"up": (8, 4), "down": (4, 8)}
    arrays = {
        f"layer_{i}.{name}": np.full(shape, i, np.float32)
        for i in range(3)
        for name, shape in shapes.items()
    }
    save_file(arrays, folder / "model-dir" / "model.safetensors")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A directory with all files that the examples name."""
    write_files(tmp_path, MORE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    jax.devices()  # those of the tests, not as many as a verb would start
    yield tmp_path
    sys.modules.pop("my_model", None)


def command_of(name):
    command = shardfx_.get_command(click.Context(shardfx_), name)
    assert command is not None
    return command


def test_the_list_of_verbs_says_what_each_says_of_itself():
    assert all(
        command_of(name).get_short_help_str(200) == text
        for name, (_, text) in _VERBS.items()
    )


def test_no_verb_needs_no_jax():
    code = """
        for words in (["--help"], ["--version"], ["no-such-verb"]):
            main(words)
            assert "jax" not in sys.modules
    """
    done = python(code)
    assert done.returncode == 0, done.stderr


def examples(name):
    epilog = command_of(name).epilog or ""
    return [
        line.strip()
        for line in epilog.splitlines()
        if line.strip().startswith("shardfx ")
    ]


EXAMPLES = [(name, line) for name in VERBS if name != "demo" for line in examples(name)]


@pytest.mark.parametrize("name", VERBS)
def test_every_help_shows_two_examples(name, capsys):
    assert run(name, "--help") == 0
    out = capsys.readouterr().out
    assert (
        out.startswith(f"Usage: shardfx {name} ")
        and max(map(len, out.splitlines())) < 120
    )
    assert len(examples(name)) >= 2
    for line in examples(name):
        assert line in out and line.split()[:2] == ["shardfx", name]


@pytest.mark.parametrize("name, line", EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_every_example_runs(name, line, project, capsys):
    words = shlex.split(line)[1:]
    code = run(*words)
    out, err = capsys.readouterr()
    # What finds something says so with 1, and the help says that it may.
    assert code == 0 or (code == 1 and "; 1 " in (command_of(name).epilog or "")), err
    assert out or "--html" in words
    if "--json" in words:
        after = words[words.index("--json") + 1 :]
        json.loads(
            Path(after[0]).read_text()
            if after and not after[0].startswith("--")
            else out
        )


def test_the_examples_of_the_demo_are_read():
    """`test_cli.py` runs it."""
    for line in examples("demo"):
        assert (
            command_of("demo")
            .make_context("demo", shlex.split(line)[2:])
            .params["steps"]
            == 3
        )


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing):
    done = python(f"sys.modules['{missing}'] = None\nsys.exit(main(['plan']))")
    line = (
        f"shardfx: error: the command line needs {missing}; install it with: pip"
        " install 'shardfx[cli]'\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.parametrize(
    "words, jax, offered",
    [
        ("shardfx ex", "None", {"explain"}),
        (
            "shardfx plan gpt2 --m",
            "__import__('jax')",
            {"--mode", "--mesh", "--min-bytes"},
        ),
    ],
)
def test_a_shell_completes_verbs_without_jax_and_flags(words, jax, offered):
    asked = {
        "_SHARDFX_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = python(f"sys.modules['jax'] = {jax}\nsys.exit(main())", PATH="", **asked)
    assert (
        done.stderr == ""
        and {line.partition(",")[2] for line in done.stdout.splitlines()} >= offered
    )


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"shardfx, version {shardfx.__version__}\n"


@pytest.mark.parametrize(
    "flags", [("--version", "--verbose"), ("--verbose", "--version")]
)
def test_the_versions_that_an_issue_needs(capsys, flags):
    assert run(*flags) == 0
    lines = capsys.readouterr().out.splitlines()
    words = dict(line.split(" ", 1) for line in lines)
    assert lines[0] == f"shardfx, version {shardfx.__version__}"
    assert words["jax"] == jax.__version__ and words["numpy"] == np.__version__
    assert words["python"].startswith("3.") and words["system"]
    assert words["devices"] == "8 x cpu (cpu)"
    assert {"jaxlib", "equinox", "libtpu"} <= words.keys()


def test_a_plan_that_was_written_is_a_model(project, capsys):
    flags = ("--mesh", "fsdp=4,tensor=2", "--rules", "my_model:BOTH")
    assert run("plan", "my_model:make", *flags, "--json", "plan.json") == 0
    assert "on mesh fsdp=4,tensor=2 (8 devices)" in capsys.readouterr().out
    assert run("plan", "plan.json", "--json") == 0
    assert ShardPlan.from_json(capsys.readouterr().out) == ShardPlan.from_json(
        Path("plan.json").read_text()
    )
    # With rules, its arrays are planned anew.
    assert (
        run("plan", "plan.json", "--mesh", "fsdp=2", "--rules", ".*->fsdp(fsdp)") == 0
    )
    assert "on mesh fsdp=2 (2 devices)" in capsys.readouterr().out
    # Without rules, too, where a mesh is given.
    assert run("plan", "plan.json", "--mesh", "fsdp=2") == 0
    assert "Without --rules, by `shardfx.auto.plan`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("devices", "mesh"),
    [
        (("--devices", "8"), "on mesh data=8 (8 devices)"),
        (("--target", "tpu:v5e:2x2*2"), "on mesh data=8(dcn=2) (8 devices)"),
        (("--target", "gpu:h100:8", "--optimizer", "optax:adamw"), "on mesh data=8"),
        (("--mesh", "data=2,fsdp=-1", "--devices", "8"), "on mesh data=2,fsdp=4"),
    ],
)
def test_a_plan_without_rules(project, capsys, devices, mesh):
    assert run("plan", "my_model:make", *devices) == 0
    printed = capsys.readouterr()
    assert mesh in printed.out and not printed.err
    assert "Without --rules, by `shardfx.auto.plan`: " in printed.out


def test_other_verbs_say_on_stderr_that_there_are_no_rules(project, capsys):
    assert run("explain", "my_model:make", "layer_0/up", "--devices", "8") == 0
    printed = capsys.readouterr()
    assert "gets: -, 1.0 MiB on each" in printed.out
    assert printed.err.startswith("Without --rules, by `shardfx.auto.plan`: ")


def data(capsys, words, code=0):
    """The JSON that a command prints."""
    capsys.readouterr()
    assert run(*words.split(), "--json") == code
    return json.loads(capsys.readouterr().out)


def test_what_verbs_print_as_data(project, capsys):
    assert data(capsys, "models")["gpt2"]["strategies"] == [
        "dp",
        "fsdp",
        "tp",
        "fsdp_tp",
    ]
    assert {"v5p", "h100"} <= {chip["name"] for chip in data(capsys, "chips")}
    dims = data(
        capsys, "explain llama3-8b model/norm/weight --mesh fsdp=8,tensor=16 --rules tp"
    )["dims"]
    assert dims[0]["size"] == 4096
    assert "seconds" in data(
        capsys, "traffic my_model:train_step --mesh fsdp=8 --how estimate --chip v5p"
    )
    tables = data(capsys, "traffic my_model:train_step --mesh fsdp=8")
    assert tables["wire_bytes"] == sum(row["wire_bytes"] for row in tables["rows"]) > 0
    assert {row["source"]["function"] for row in tables["rows"]} >= {"loss"}
    tables = data(
        capsys,
        "traffic my_model:train_step --mesh data=2,fsdp=2,tensor=2 --how compare",
    )
    compiled, estimated = (
        sum(row["wire_bytes"] for row in tables[how]["rows"])
        for how in ("compiled", "estimated")
    )
    assert tables["extra_bytes"] == compiled - estimated


STEPS = """
import click
import jax
import jax.numpy as jnp
from shardfx import MeshSpec, PathRules, plan

W = plan(jax.ShapeDtypeStruct((8, 8), jnp.float32), MeshSpec({"fsdp": 4}), paths=PathRules.parse(".*->fsdp")).structs
V = plan(jax.ShapeDtypeStruct((8, 8), jnp.float32), MeshSpec({"fsdp": 2}), paths=PathRules.parse(".*->fsdp")).structs

def own_mesh():
    return lambda w: w @ w, (W,)

def static():
    return lambda w, name: {"out": w @ w if name == "square" else w}, (W, "square")

def needs_mesh(mesh):
    made = plan(jax.ShapeDtypeStruct((1024, 8), jnp.float32), mesh, paths=PathRules.parse(".*->fsdp"))
    return lambda w: w, (made.structs,)

def nothing():
    return None

def no_mesh():
    return lambda w: w, (jax.ShapeDtypeStruct((8, 8), jnp.float32),)

def two_meshes():
    return lambda w, v: w, (W, V)

def fails():
    return lambda w: w @ jnp.ones(3), (W,)

VALUE = 3
"""


# A command, and a part of what it prints.
SHOWN = transcript("""
$ plan llama3-8b --kwargs layers=2 --mesh shard=8,model=2 --rules fsdp_tp:fsdp=shard,tensor=model
 model,shard 
$ plan mixtral-8x7b --kwargs layers=2 --mesh expert=8,fsdp=4 --rules ep
block_sparse_moe/experts/w1/weight
$ plan mixtral-8x7b --kwargs layers=2 --mesh expert=8,fsdp=4 --rules fsdp
block_sparse_moe/experts/{0..7}/w1/weight
$ traffic my_model:train_step --mesh data=16,fsdp=64,tensor=8 --how estimate
enter each of 8192 devices in a step
$ traffic steps:own_mesh
all-gather
$ traffic steps:static
all-gather
$ explain llama3-8b model/layers/{0..31}/self_attn/k_proj/weight --mesh fsdp=8,tensor=16 --rules tp
(`--refine` splits the axis)
$ lint my_model:make --mesh data=2,fsdp=4,tensor=2 --rules my_model:BOTH --kwargs width=8192
no findings
""")


@pytest.mark.parametrize("words, shown", SHOWN)
def test_what_a_verb_shows(words, shown, project, capsys):
    Path("steps.py").write_text(STEPS)
    assert run(*words) == 0
    assert shown in capsys.readouterr().out


# A command, and the error that it prints.
WRONG = transcript(r"""
$ plan llama3-8b --kwargs layers=2 --mesh shard=8 --rules fsdp_tp:date=shard
unexpected keyword argument 'date'
$ plan cut.json
cut.json': this is no whole JSON text
$ models \x1b[2J
no published model has '\x1b[2J' in its name
$ traffic steps:nothing
must return a step and a tuple of its arguments, as in `return train_step, (
$ traffic steps:no_mesh
are on no mesh; plan them on one
$ traffic steps:two_meshes
are on several meshes, fsdp=4 and fsdp=2;
$ traffic steps:fails
steps.py, line 3
$ traffic steps:own_mesh --mesh fsdp=4
takes no `mesh`, so its plans have their own
$ traffic steps:needs_mesh
missing 1 required positional argument: 'mesh'
$ traffic steps:needs_mesh --mesh fsdp=1024
has 1,024 devices; at most 512 can be emulated
$ traffic my_model:train_step --mesh fsdp=16
JAX has started with 8 devices
$ traffic steps:VALUE
is 3; name a function that returns a step
$ traffic my_model:train_step --mesh fsdp=8 --how estimate --target tpu:v5e:2x4
--target is what is compiled for
$ lint my_model:make --mesh fsdp=4,tensor=2 --rules my_model:BOTH --ignore corected
the codes of findings are unplannable,
$ fit --mesh fsdp=2
give a MODEL, as llama3-8b, or --step
$ fit --step my_model:train_step --mesh fsdp=8 --compile
--compile needs --step MODULE:STEP, and --target
$ search my_model:plain_step --devices 16
add one, as --chip h100
$ search my_model:plain_step
say what the devices are: --target tpu:v5e:4x4, or --devices
$ search my_model:plain_step --target tpu:v5e:2x4 --rules my_model:loss.__doc__
is None; it must be AxisRules
$ search no_model:step --target tpu:v5e:2x4 --write no/where.py
writing 'no/where.py' failed: FileNotFoundError
$ search no_model:step --target tpu:v5e:2x4 --write - --json
two results would be printed as one
$ search no_model:step --target tpu:v5e:2x4 --write kept.py
no_model
$ report my_model:make --mesh fsdp=4,tensor=2 --rules my_model:BOTH --step my_model:train_step
Missing option '--html'
$ convert model-dir out --map my_model:OPTIMIZER
it must be a TreeMap, or a function that makes one
$ convert model-dir out --map bad.json
this is no TreeMap's JSON
$ convert model-dir out --inverse
--inverse needs --map, and --like
$ convert model-dir out --map my_model:STACKED --like llama3.2-1b
in 150 places
$ convert model-dir gpt2-xl
gpt2-xl
""")


def files(folder):
    return {
        file: file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }


@pytest.mark.parametrize("words, message", WRONG)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(
    words, message, project, capsys
):
    texts = {
        "bad.json": "{}",
        "cut.json": '{"format": "shardfx.plan",',
        "gpt2-xl": "no checkpoint",
        "kept.py": "1",
    }
    for name, text in {**texts, "steps.py": STEPS}.items():
        Path(name).write_text(text)
    before = files(project)
    assert message in failure(capsys, *words)
    assert files(project) == before


@pytest.mark.parametrize("fail_on, code", [("error", 0), ("warning", 1), ("info", 1)])
def test_lint_fails_for_findings_of_the_chosen_severity(fail_on, code, project, capsys):
    flags = (
        "--mesh",
        "fsdp=4,tensor=3",
        "--rules",
        "my_model:BOTH",
        "--fail-on",
        fail_on,
    )
    assert run("lint", "my_model:make", *flags) == code
    assert (
        "2 warnings" in (out := capsys.readouterr().out)
        and "warning corrected: layer_{0..1}/down" in out
    )
    assert run("lint", "my_model:make", *flags, "--ignore", "corrected") == 0
    assert capsys.readouterr().out == "no findings\n"


def test_lint_shows_what_plan_would_refuse(project, capsys):
    flags = "my_model:make --mesh fsdp=4 --rules up->fsdp,none->fsdp"
    assert "no rule covers" in failure(capsys, "plan", *flags.split())
    findings = data(capsys, f"lint {flags}", 1)
    assert {finding["code"]: finding["severity"] for finding in findings} == {
        "unmatched": "error",
        "unused-rule": "error",
    }
    assert all(finding["fix"] for finding in findings)


def test_lint_of_a_plan_and_of_the_state_of_an_optimizer(project, capsys):
    flags = ("my_model:make", "--rules", "my_model:BOTH")
    assert run("plan", *flags, "--mesh", "fsdp=4,tensor=3", "--json", "plan.json") == 0
    assert run("lint", "plan.json", "--fail-on", "warning") == 1
    wide = (
        "--mesh",
        "data=2,fsdp=4,tensor=2",
        "--kwargs",
        "width=8192",
        "--optimizer",
        "my_model:OPTIMIZER",
    )
    assert run("lint", *flags, *wide) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "warning corrected" in out and "as ZeRO-1 would" in out


def test_diff_of_two_plans(project, capsys):
    first = ("--mesh", "fsdp=4,tensor=2", "--rules", "my_model:BOTH")
    for name, rules in (("a.json", "my_model:BOTH"), ("b.json", ".*->fsdp(fsdp)")):
        assert (
            run("plan", "my_model:make", *first[:2], "--rules", rules, "--json", name)
            == 0
        )
    capsys.readouterr()
    assert run("diff", "a.json", "b.json") == 0
    files = capsys.readouterr().out
    assert (
        run(
            "diff",
            "my_model:make",
            *first,
            "--to-rules",
            ".*->fsdp(fsdp)",
            "--exit-code",
        )
        == 1
    )
    assert capsys.readouterr().out == files and "4 arrays differ or move" in files
    assert run("diff", "a.json", "a.json", "--exit-code", "--json") == 0
    assert json.loads(capsys.readouterr().out)["leaves"] == []
    assert (
        run(
            "diff",
            "a.json",
            "my_model:make",
            "--to-mesh",
            "fsdp=8",
            "--to-rules",
            ".*->fsdp(fsdp)",
        )
        == 0
    )
    assert (
        "the mesh is fsdp=4,tensor=2 in one plan, fsdp=8 in the other"
        in capsys.readouterr().out
    )
    assert "there is one plan; name another" in failure(capsys, "diff", "a.json")


def test_fit_of_a_model_counts_its_arrays_alone(
    capsys,
):
    fitted = data(
        capsys,
        "fit llama3-8b --mesh fsdp=2 --rules fsdp --optimizer optax:adamw --chip v5e",
        1,
    )
    assert fitted["basis"] == "arguments" and fitted["is_close"] is False
    assert (
        not fitted["fits"]
        and fitted["headroom_bytes"]
        == fitted["usable_bytes"] - fitted["peak_bytes"]
        < 0
    )
    assert sum(row["bytes"] for row in fitted["rows"]) == fitted["peak_bytes"]
    assert {"model", "optimizer"} == {row["group"] for row in fitted["rows"]}


def test_search_chooses_mesh_and_rules_that_run(project, capsys):
    candidates = data(
        capsys,
        "search my_model:plain_step --target tpu:v5e:2x4 --keep 2 --write chosen.py",
    )
    assert (
        len(candidates) == 2
        and candidates[0]["fits"]
        and candidates[0]["seconds"] <= candidates[1]["seconds"]
    )
    space = {}
    exec(Path("chosen.py").read_text(), space)
    assert str(space["MESH"]) == candidates[0]["mesh"]
    assert Path("chosen.py").read_text().endswith("out_shardings=(plans[0], None))\n")
    step, args = importlib.import_module("my_model").plain_step()
    plans = space["plans_of"](step, *args)
    assert [
        {leaf.path: data_of(leaf.spec) for leaf in plan.leaves} for plan in plans
    ] == candidates[0]["plans"]
    assert (
        candidates[0]["by"] == "estimate"
        and candidates[0]["state_over"] == candidates[0]["states"] == []
    )
    assert candidates[0]["wire_bytes"] > 0
    assert (
        run(
            "search",
            "my_model:plain_step",
            *"--devices 2 --chip v5e --kwargs width=65536".split(),
        )
        == 1
    )


def test_search_compiles_the_best_and_rules_by_hand(project, capsys):
    words = (
        "search my_model:plain_step --target cpu:4 --kwargs width=64 --verify"
        " --closely 1"
    )
    options = "--rules my_model:BY_HAND --write chosen.py --json found.json"
    assert run(*words.split(), *options.split()) == 0
    out = capsys.readouterr().out
    # Axes get usual names.
    assert (
        re.search(r"^\[1\] +\S.* +compile +[\d.e+]+ ", out, re.MULTILINE)
        and "rows=" not in out
    )
    assert "by the compiled program" in Path("chosen.py").read_text()
    space = {}
    exec(Path("chosen.py").read_text(), space)
    step, args = importlib.import_module("my_model").plain_step(width=64)
    names = shardfx.auto.name_axes(step, *args).names
    plans = [
        shardfx.plan(arg, space["MESH"], names=tree, axes=space["RULES"])
        for arg, tree in zip(args, names, strict=True)
    ]
    assert all(sharding_plan.mesh.size == 4 for sharding_plan in plans)
    candidates = json.loads(Path("found.json").read_text())
    assert candidates[0]["by"] == "compile" and candidates[0]["traffic"]
    assert len(candidates) > 1 and str(space["MESH"]) in [
        candidate["mesh"] for candidate in candidates
    ]


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
    assert (
        run(
            "report",
            "my_model:make",
            *flags,
            "--html",
            "out.html",
            "--json",
            "out.json",
        )
        == 0
    )
    report = json.loads(Path("out.json").read_text())
    assert report["title"] == "my_model:make" and report["chip"]["name"] == "v5p"
    assert report["traffic"]["wire_bytes"] > 0 and len(report["rows"]) == 2
    page = Path("out.html").read_text()
    assert page.lower().startswith("<!doctype html>") and "my_model:make" in page


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None,
    reason="the compiler for TPUs is there",
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
    assert (
        "layers/up" in out
        and "f32[3,4,8]" in out
        and "2 arrays, 768 B, written to stacked." in out
    )
    (file,) = Path("stacked").glob("*.safetensors")
    stacked = load_file(file)
    assert {name: array.shape for name, array in stacked.items()} == {
        "layers/down": (3, 8, 4),
        "layers/up": (3, 4, 8),
    }
    assert (stacked["layers/up"][2] == 2).all()
    back = ("--map", "my_model:STACKED", "--inverse", "--like", "model-dir")
    assert run("convert", "stacked", "again.safetensors", *back) == 0
    again, first = (
        load_file("again.safetensors"),
        load_file("model-dir/model.safetensors"),
    )
    assert sorted(again) == sorted(first) and all(
        (again[name] == first[name]).all() for name in first
    )


def test_a_checkpoint_is_cast_and_a_dry_run_writes_nothing(project, capsys):
    flags = ("convert", "model-dir", "small.safetensors", "--dtype", "bfloat16")
    assert run(*flags, "--dry-run", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (
        summary["written"] is None
        and summary["bytes"] == 384
        and not Path("small.safetensors").exists()
    )
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
        words, cwd=ROOT, stdin=inner, stdout=inner, stderr=inner, env=flags
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
    assert (
        ".step-1.partial-0123456789abcdef" in capsys.readouterr().out
        and partial_save.exists()
    )
    assert run("clean", str(tmp_path), "--remove", "--json") == 0
    assert (
        json.loads(capsys.readouterr().out)[0]["target"].endswith("step-1")
        and not partial_save.exists()
    )
    assert run("clean", str(tmp_path)) == 0
    assert capsys.readouterr().out == "nothing is left over\n"
