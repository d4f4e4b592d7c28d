"""The project that verbs of the command line are run in."""

import json
import re

import numpy as np
from safetensors.numpy import save_file

from tests.cli.commands import ROOT, run


PAGE = (ROOT / "docs" / "cli.md").read_text()
# What the examples of the help name, beside what is on the page.
MORE = """
OPTIMIZER = optax.adamw(1e-3)
BY_HAND = AxisRules([("batch", "rows"), ("mlp", "columns")])
"""


def write_files(folder, added=""):
    """The page's model, and its checkpoint of three layers."""
    matches = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    text = "".join(matches) + added
    (folder / "my_model.py").write_text(text)
    (folder / "model-dir").mkdir()
    shapes = {"up": (8, 4), "down": (4, 8)}
    arrays = {}
    for layer in range(3):
        for name, shape in shapes.items():
            arrays[f"layer_{layer}.{name}"] = np.full(shape, layer, np.float32)
    save_file(arrays, folder / "model-dir" / "model.safetensors")


def data(capsys, words, code=0):
    """The JSON that a command prints."""
    capsys.readouterr()
    assert run(*words.split(), "--json") == code
    return json.loads(capsys.readouterr().out)
