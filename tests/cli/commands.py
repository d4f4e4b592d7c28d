"""How the tests run commands, and the models that the commands are about."""

import contextlib
import io
import itertools
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shardfx.__main__ import main


ROOT = Path(__file__).parents[2]
NUMBERS = itertools.count()
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


def help_of(*words):
    """What `shardfx WORDS --help` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--help"]) == 0
    return out.getvalue()


def listed_verbs():
    """The verbs that the help of the command line lists, and what it says of each."""
    listed = help_of().partition("\nCommands:\n")[2].partition("\n\n")[0]
    # A verb stands behind two spaces; a text goes on behind more.
    rows = re.findall(r"^  (\w+) +(.*(?:\n    +.*)*)", listed, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in rows}


LISTED = listed_verbs()
VERBS = tuple(LISTED)


def run(*arguments):
    """The exit code of the command line."""
    return main(arguments)


def failure(capsys, *arguments):
    """The one line on stderr of a command that fails with exit code 2."""
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err.strip()


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
