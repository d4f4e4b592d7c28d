"""Writes docs/notebook.ipynb: the cells below with what they show.

    python docs/draw_notebook.py

A cell that ends in a value shows its `_repr_html_`, as Jupyter and Colab do. Needs the
extra `demo`, and no Jupyter.
"""

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import jax


NOTEBOOK = Path(__file__).with_name("notebook.ipynb")
# Text and code in turn.
CELLS = (
    """# shardfx in a notebook

Plans, what a step sends, whether it fits, findings: each is a value that a notebook
shows as a table. In Colab, install first: `%pip install "shardfx @ git+URL"`.""",
    """import equinox as eqx
import jax
import jax.numpy as jnp
import shardfx as sfx
from jax.sharding import PartitionSpec as P

# Eight emulated devices. Where there are accelerators, leave both lines out.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

make = lambda key: eqx.nn.MLP(64, 64, 256, depth=2, key=key)
model = eqx.filter_eval_shape(lambda: make(jax.random.key(0)))
plan = sfx.auto.plan(model, sfx.MeshSpec({"data": 2, "fsdp": 4}))
plan""",
    """Why it is so, and the rules to keep and edit:""",
    """print(plan.why)
print(plan.code())""",
    """One array, and mistakes in rules:""",
    """sfx.explain(plan, "layers/0/weight")""",
    """rules = sfx.PathRules([("weight", P("fsdp")), ("kernel", sfx.fsdp("fsdp"))])
sfx.lint(model, plan.mesh, paths=rules)""",
    """What a step sends, and whether it fits a chip:""",
    """def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


step = sfx.filter_jit(eqx.filter_grad(loss), out_shardings=plan)
x = jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=plan.batch)
planned = eqx.combine(plan.structs, model)  # with the activation functions
sfx.cost.estimate(step, planned, x)""",
    """sfx.cost.fit(step, planned, x, chip="v5e")""",
)


def outputs_of(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a cell, and returns what a notebook shows of it."""
    statements = ast.parse(source).body
    last = statements[-1]
    shown = None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if isinstance(last, ast.Expr):
            head = ast.Module(statements[:-1], type_ignores=[])
            exec(compile(head, "cell", "exec"), names)
            shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        else:
            exec(compile(source, "cell", "exec"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = {"output_type": "stream", "name": "stdout", "text": printed.getvalue()}
        outputs.append(text)
    if shown is not None:
        data = {"text/html": shown._repr_html_(), "text/plain": str(shown)}
        result = {"output_type": "execute_result", "execution_count": None}
        outputs.append({**result, "metadata": {}, "data": data})
    return outputs


def notebook() -> dict[str, Any]:
    """The notebook as JSON, its cells executed."""
    names: dict[str, Any] = {}
    cells = []
    for number, source in enumerate(CELLS):
        cell = {"id": f"cell-{number}", "metadata": {}, "source": source}
        if is_code(source):
            outputs = outputs_of(source, names)
            cell |= {"cell_type": "code", "execution_count": None, "outputs": outputs}
        else:
            cell |= {"cell_type": "markdown"}
        cells.append(cell)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {
        "kernelspec": kernel,
        "language_info": {"name": "python"},
        "jax": jax.__version__,
    }
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}


def is_code(source: str) -> bool:
    """Whether a cell is Python, not text."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


if __name__ == "__main__":
    NOTEBOOK.write_text(json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n")
