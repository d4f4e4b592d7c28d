import json
import shlex
from pathlib import Path

import click
import jax
import numpy as np
import pytest

import shardfx
from shardfx import ShardPlan
from shardfx._cli import group
from tests.cli.commands import LISTED, VERBS, help_of, python, run


def test_the_list_of_verbs_says_what_each_says_of_itself():
    for name, text in LISTED.items():
        _, paragraph, *_ = help_of(name).split("\n\n")
        assert " ".join(paragraph.split()).startswith(text)
        assert text.count(". ") == 0
        assert text.endswith(".")


def test_no_verb_needs_no_jax():
    code = """
        for words in (["--help"], ["--version"], ["no-such-verb"]):
            main(words)
            assert "jax" not in sys.modules
    """
    done = python(code)
    assert done.returncode == 0, done.stderr


def examples(name):
    _, _, epilog = help_of(name).partition("\n  examples:\n")
    return [
        line.strip()
        for line in epilog.splitlines()
        if line.strip().startswith("shardfx ")
    ]


EXAMPLES = []
for name in VERBS:
    if name != "demo":
        EXAMPLES += [(name, line) for line in examples(name)]


@pytest.mark.parametrize("name", VERBS)
def test_every_help_shows_two_examples(name, capsys):
    assert run(name, "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: shardfx {name} ")
    assert max(map(len, out.splitlines())) < 120
    assert len(examples(name)) >= 2
    for line in examples(name):
        assert line.split()[:2] == ["shardfx", name]


@pytest.mark.parametrize("name, line", EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_every_example_runs(name, line, project, capsys):
    words = shlex.split(line)[1:]
    code = run(*words)
    out, err = capsys.readouterr()
    # What finds something says so with 1, and the help says that it may.
    assert code == 0 or (code == 1 and "; 1 " in help_of(name)), err
    assert out or "--html" in words
    if "--json" in words:
        after = words[words.index("--json") + 1 :]
        json.loads(
            Path(after[0]).read_text()
            if after and not after[0].startswith("--")
            else out
        )


def test_the_examples_of_the_demo_are_read():
    """`test_cli.py` runs them."""
    for line in examples("demo"):
        command = group.shardfx_.get_command(click.Context(group.shardfx_), "demo")
        assert command is not None
        params = command.make_context("demo", shlex.split(line)[2:]).params
        assert params["steps"] == 3


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing):
    done = python(f"sys.modules['{missing}'] = None\nsys.exit(main(['plan']))")
    line = (
        f"shardfx: error: the command line needs {missing}; install it with: pip"
        " install 'shardfx[cli]'\n"
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == line


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
    text = str(words.count(" "))
    asked = {
        "_SHARDFX_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": text,
    }
    done = python(f"sys.modules['jax'] = {jax}\nsys.exit(main())", PATH="", **asked)
    assert done.stderr == ""
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} >= offered


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
    assert words["jax"] == jax.__version__
    assert words["numpy"] == np.__version__
    assert words["python"].startswith("3.")
    assert words["system"]
    assert words["devices"] == "8 x cpu (cpu)"
    assert {"jaxlib", "equinox", "libtpu"} <= words.keys()


def test_a_plan_that_was_written_is_a_model(project, capsys):
    flags = ("--mesh", "fsdp=4,tensor=2", "--rules", "my_model:BOTH")
    assert run("plan", "my_model:make", *flags, "--json", "plan.json") == 0
    assert "on mesh fsdp=4,tensor=2 (8 devices)" in capsys.readouterr().out
    assert run("plan", "plan.json", "--json") == 0
    expected = ShardPlan.from_json(Path("plan.json").read_text())
    assert ShardPlan.from_json(capsys.readouterr().out) == expected
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
    assert mesh in printed.out
    assert not printed.err
    assert "Without --rules, by `shardfx.auto.plan`: " in printed.out


def test_other_verbs_say_on_stderr_that_there_are_no_rules(project, capsys):
    assert run("explain", "my_model:make", "layer_0/up", "--devices", "8") == 0
    printed = capsys.readouterr()
    assert "gets: -, 1.0 MiB on each" in printed.out
    assert printed.err.startswith("Without --rules, by `shardfx.auto.plan`: ")
