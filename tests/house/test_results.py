"""The values that public functions return: they pickle, copy, and cross to another
process, and their types are where they say they are.
"""

import concurrent.futures
import copy
import importlib
import inspect
import multiprocessing
import pickle
import re
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import shardfx as sfx
from shardfx.errors import ProgramError


API = Path(__file__).parents[2] / "docs" / "api"
MESH = sfx.MeshSpec({"data": 4, "tensor": 2})
TREE = {"w": jnp.ones((8, 6)), "b": jnp.ones((6,))}
RULES = sfx.PathRules([("w", jax.P("data", "tensor")), ("b", jax.P("tensor"))])
OTHER = sfx.PathRules([("w", jax.P("tensor")), ("b", sfx.replicate)])


def named():
    """The public names that pages of the API list."""
    names = set()
    for page in API.glob("*.md"):
        matches = re.findall(r"^::: (shardfx[\w.]*)", page.read_text(), re.M)
        names |= set(matches)
    return sorted(names)


def looked_up(name):
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            namespace = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            namespace = getattr(namespace, part)
        return namespace
    raise LookupError(name)


def test_pages_of_the_api_show_no_underscore():
    assert len(named()) > 150
    names = [name for name in named() if "._" in name and "__" not in name]
    assert names == []


def test_a_public_type_is_where_it_says_it_is():
    types = [kind for kind in map(looked_up, named()) if inspect.isclass(kind)]
    assert len(types) > 50
    for kind in types:
        assert pickle.loads(pickle.dumps(kind)) is kind
        assert "._" not in kind.__module__, kind


def test_every_library_has_its_module_without_an_import():
    for path in Path(sfx.interop.__file__).parent.glob("[a-z]*.py"):
        assert inspect.ismodule(getattr(sfx.interop, path.stem))
        assert path.stem in dir(sfx.interop)
    with pytest.raises(AttributeError, match="has no attribute 'torch'"):
        sfx.interop.torch  # noqa: B018


def made(rules=RULES):
    return sfx.plan(TREE, MESH, paths=rules)


def step(w, x):
    return jnp.tanh(x @ w).sum()


def results():
    plan = made()
    other = made(OTHER)
    placed = sfx.shard(TREE, plan.on(MESH.build(jax.devices())))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    rules = sfx.PathRules([(".*", jax.P("data"))])
    rows = sfx.plan(x, MESH, paths=rules)
    w = plan.structs["w"]
    traffic = sfx.cost.estimate(step, w, rows.structs)
    yield from (MESH, RULES, plan, plan["w"], plan["w"].reasons, TreeMapped)
    yield sfx.explain(plan, "w")
    yield sfx.lint(TREE, MESH, paths=OTHER)
    yield sfx.diff(plan, other)
    yield sfx.plan_reshard(plan, other)
    yield sfx.misplaced(placed, other.on(MESH.build(jax.devices())))
    rules = sfx.AxisRules([("a", "data")])
    yield sfx.resolve(("a",), rules)
    yield traffic
    yield traffic - traffic
    yield sfx.cost.seconds(traffic, "v5e", MESH)
    yield sfx.cost.shardings(step, w, rows.structs).rows
    yield sfx.cost.fit(plan, chip="v5e")
    yield sfx.chips.find("v5e")
    chunk_ids = ((0,), (1,))
    yield sfx.hosts.HostGrid({"data": 4}, {"data": 2}, chunk_ids)


TreeMapped = sfx.TreeMap({"w": sfx.From("w")})


def test_results_pickle_and_copy():
    count = 0
    for result in results():
        count += 1
        decoded = pickle.loads(pickle.dumps(result))
        for twin in (
            decoded,
            copy.copy(result),
            copy.deepcopy(result),
        ):
            assert type(twin) is type(result)
            assert str(twin) == str(result)
    assert count > 15


def test_results_of_a_step_copy():
    structs = made().structs
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    fitted = sfx.cost.fit(step, structs["w"], x, chip="v5e")
    shardings = sfx.cost.shardings(step, structs["w"], x)
    for result in (fitted, shardings):
        assert copy.copy(result) == result
        assert copy.deepcopy(result) == result


def test_results_of_a_step_pickle_without_their_step():
    structs = made().structs
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    fitted = sfx.cost.fit(step, structs["w"], x, chip="v5e")
    shardings = sfx.cost.shardings(step, structs["w"], x)
    changes = fitted.changes
    fit_there, shardings_there = pickle.loads(pickle.dumps((fitted, shardings)))
    assert (fit_there, str(fit_there)) == (fitted, str(fitted))
    assert fit_there.changes == changes
    assert shardings_there == shardings
    *table, note = str(shardings_there).splitlines()
    assert table == str(shardings).splitlines()[: len(table)]
    assert "where the step was traced" in note
    gone = (
        lambda: fit_there.peak_arrays,
        lambda: fit_there.shardings,
        lambda: fit_there.batch,
        lambda: shardings_there.conflicts,
        lambda: shardings_there.known_faults,
        lambda: shardings_there.missed_axes(shardings.rows[0]),
    )
    for read in gone:
        with pytest.raises(ProgramError, match="was pickled without its step"):
            read()
    again = pickle.loads(pickle.dumps(fit_there))
    assert again == fitted


def test_stages_of_a_function_copy():
    """`copy` asked an object without fields for an attribute of JAX's, for ever."""
    traced = sfx.filter_jit(step).trace(jnp.ones((8, 6)), jnp.ones((8, 8)))
    lowered = traced.lower()
    compiled = lowered.compile()
    assert copy.copy(traced).jaxpr is traced.jaxpr
    assert copy.copy(lowered).as_text() == lowered.as_text()
    assert copy.copy(compiled).as_text() == compiled.as_text()


@pytest.mark.parametrize("name", named())
def test_annotations_of_public_names_are_types(name):
    value = looked_up(name)
    if inspect.isclass(value) or inspect.isfunction(value):
        typing.get_type_hints(value)


def test_eight_threads_plan_alike():
    def planned(_):
        return sfx.plan(TREE, MESH, paths=RULES).digest

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        digests = set(threads.map(planned, range(64)))
    assert digests == {made().digest}


def digest_of(plan):
    return plan.digest, str(plan["w"])


def test_a_plan_crosses_to_a_spawned_process():
    plan = made()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as processes:
        there = processes.submit(digest_of, plan).result(timeout=120)
    assert there == digest_of(plan)
