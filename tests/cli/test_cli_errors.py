from pathlib import Path

import pytest

from tests.cli.commands import MODEL, failure, transcript


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
    allowed = failure(
        capsys, "plan", f"{module}:STRUCTS", *flags[2:], "--kwargs", "a=4"
    )
    assert "--kwargs are for a callable, but" in allowed


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
    assert line.startswith("shardfx plan: error: ")
    assert message in line


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
has this name; did you mean 'llama' or 'llama4'?
$ plan m:m --mesh a=-1 --rules llama --devices DIGITS
is not a valid integer
$ plan llama3-8b --mesh a=2 --rules llama:fsdp=data,fsdp=tensor
--rules 'llama:fsdp=data,fsdp=tensor' has 'fsdp' twice
$ plan llama3-8b --mesh a=2 --rules llama:head_dim=-64
the size of `dim` is -64; give a positive number of elements, as `head_dim=64`
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
    allowed = failure(capsys, *[word.replace("{}", module) for word in words])
    assert message in allowed


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
