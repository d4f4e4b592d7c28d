import importlib
import importlib.util
import json
import re
from pathlib import Path

from jax.sharding import PartitionSpec as P

import shardfx
from tests.cli.commands import run
from tests.cli.verb_files import data


def specs_of_plan(entries_by_path):
    """The specs of a plan from its JSON, which has a list for each tuple."""
    specs = {}
    for path, entries in entries_by_path.items():
        specs[path] = P(*map(entry_of_json, entries))
    return specs


def entry_of_json(entry):
    return tuple(entry) if isinstance(entry, list) else entry


def test_search_chooses_mesh_and_rules_that_run(project, capsys):
    candidates = data(
        capsys,
        "search my_model:plain_step --target tpu:v5e:2x4 --keep 2 --write chosen.py",
    )
    assert len(candidates) == 2
    assert candidates[0]["fits"]
    assert candidates[0]["seconds"] <= candidates[1]["seconds"]
    space = {}
    exec(Path("chosen.py").read_text(), space)
    assert str(space["MESH"]) == candidates[0]["mesh"]
    assert Path("chosen.py").read_text().endswith("out_shardings=(plans[0], None))\n")
    step, args = importlib.import_module("my_model").plain_step()
    plans = space["plans_of"](step, *args)
    specs = [{leaf.path: leaf.spec for leaf in plan.leaves} for plan in plans]
    assert specs == list(map(specs_of_plan, candidates[0]["plans"]))
    assert candidates[0]["by"] == "estimate"
    assert candidates[0]["state_over"] == candidates[0]["states"] == []
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
    assert re.search(r"^\[1\] +\S.* +compile +[\d.e+]+ ", out, re.MULTILINE)
    assert "rows=" not in out
    assert "by the compiled program" in Path("chosen.py").read_text()
    space = {}
    exec(Path("chosen.py").read_text(), space)
    step, args = importlib.import_module("my_model").plain_step(width=64)
    names = shardfx.auto.name_axes(step, *args).names
    plans = [
        shardfx.plan(arg, space["MESH"], names=tree, axes=space["RULES"])
        for arg, tree in zip(args, names, strict=True)
    ]
    for sharding_plan in plans:
        assert sharding_plan.mesh.size == 4
    candidates = json.loads(Path("found.json").read_text())
    assert candidates[0]["by"] == "compile"
    assert candidates[0]["traffic"]
    assert len(candidates) > 1
    assert str(space["MESH"]) in [candidate["mesh"] for candidate in candidates]
