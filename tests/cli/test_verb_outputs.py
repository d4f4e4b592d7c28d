import json
from pathlib import Path

import pytest

from tests.cli.commands import failure, run, transcript
from tests.cli.verb_files import data


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
$ report no_model:make --mesh fsdp=4 --rules fsdp --html - --json -
two results would be printed as one
$ report no_model:make --mesh fsdp=4 --rules fsdp --html no/where.html
writing 'no/where.html' failed: FileNotFoundError
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
$ convert model-dir out --like model-dir
--like is for --map
$ convert model-dir kept.safetensors --dry-run
'kept.safetensors' exists, and nothing was changed; pass `--overwrite` to replace it
$ convert model-dir kept.safetensors
'kept.safetensors' exists, and nothing was changed; pass `--overwrite` to replace it
$ convert model-dir model-dir --overwrite --dry-run
'model-dir' exists, and nothing was changed; name another TO
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
        "kept.safetensors": "1",
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
    assert "2 warnings" in (out := capsys.readouterr().out)
    assert "warning corrected: layer_{0..1}/down" in out
    assert run("lint", "my_model:make", *flags, "--ignore", "corrected") == 0
    assert capsys.readouterr().out == "no findings\n"


def test_lint_shows_what_plan_would_refuse(project, capsys):
    flags = "my_model:make --mesh fsdp=4 --rules up->fsdp,none->fsdp"
    assert "no rule covers" in failure(capsys, "plan", *flags.split())
    findings = data(capsys, f"lint {flags}", 1)
    actual = {finding["code"]: finding["severity"] for finding in findings}
    assert actual == {
        "unmatched": "error",
        "unused-rule": "error",
    }
    for finding in findings:
        assert finding["fix"]


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
    assert "warning corrected" in out
    assert "as ZeRO-1 would" in out


def test_diff_of_two_plans(project, capsys):
    first = ("--mesh", "fsdp=4,tensor=2", "--rules", "my_model:BOTH")
    for name, rules in (("a.json", "my_model:BOTH"), ("b.json", ".*->fsdp(fsdp)")):
        output = run(
            "plan", "my_model:make", *first[:2], "--rules", rules, "--json", name
        )
        assert output == 0
    capsys.readouterr()
    assert run("diff", "a.json", "b.json") == 0
    files = capsys.readouterr().out
    output = run(
        "diff",
        "my_model:make",
        *first,
        "--to-rules",
        ".*->fsdp(fsdp)",
        "--exit-code",
    )
    assert output == 1
    assert capsys.readouterr().out == files
    assert "4 arrays differ or move" in files
    assert run("diff", "a.json", "a.json", "--exit-code", "--json") == 0
    assert json.loads(capsys.readouterr().out)["leaves"] == []
    output = run(
        "diff",
        "a.json",
        "my_model:make",
        "--to-mesh",
        "fsdp=8",
        "--to-rules",
        ".*->fsdp(fsdp)",
    )
    assert output == 0
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
    assert fitted["basis"] == "arguments"
    assert fitted["is_close"] is False
    assert not fitted["fits"]
    assert fitted["headroom_bytes"] == fitted["usable_bytes"] - fitted["peak_bytes"] < 0
    total = sum(row["bytes"] for row in fitted["rows"])
    assert total == fitted["peak_bytes"]
    expected = {row["group"] for row in fitted["rows"]}
    assert {"model", "optimizer"} == expected
