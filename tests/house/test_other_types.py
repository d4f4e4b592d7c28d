"""Values of other types than functions take: errors of the package, which name them."""

import collections.abc
from typing import Any

import jax
import numpy as np
import pytest

from shardfx import (
    AxisRules,
    From,
    MeshSpec,
    PathRules,
    ShardPlan,
    atomic,
    auto,
    checkpoint,
    chips,
    correct,
    cost,
    field,
    fsdp,
    hosts,
    lint,
    map_matrices,
    match,
    plan,
    plan_reshard,
    reshard,
    resolve,
    sync,
    testing,
    topology,
)
from shardfx.errors import LeafTypeError, MapError, MeshError, RuleError, SpecError
from shardfx.interop import eformer, huggingface, keras, levanter, maxtext, t5x
from shardfx.presets import maps, models
from tests.presets.small_models import config_of


MESH = MeshSpec({"data": 4, "tensor": 2})
GRID = hosts.regular_grid(MESH, {"data": 2})
SHAPES = {"w": jax.ShapeDtypeStruct((8,), "float32")}
WEIGHTS = {"w": np.ones(8, np.float32)}
ON_DEVICES = jax.NamedSharding(MESH.build(jax.devices()), jax.P("data"))
CONFIG = config_of("llama")
PLANNED = plan(SHAPES, MESH, paths=PathRules.parse("w->data"))
# Type checkers would refuse these.
NUMBER: Any = 3
NOTHING: Any = None
TEXT: Any = "ab"
HALVES: Any = (8.5,)
NO_DEVICES: Any = MESH


def test_a_mesh_without_devices_is_no_list_of_devices():
    assert not isinstance(MESH, collections.abc.Iterable)
    with pytest.raises(MeshError, match=r"a sequence of devices, not MeshSpec; write"):
        MESH.build(NO_DEVICES)
    with pytest.raises(TypeError, match="`spec.axis_names` for the names"):
        list(NO_DEVICES)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: fsdp(NUMBER), RuleError, r"`fsdp\(\(3,\)\)` needs the name"),
        (lambda: match({}, NOTHING), RuleError, "`rules` must be of type PathRules"),
        (lambda: PathRules(NUMBER), RuleError, "`rules` must be of type Iterable"),
        (lambda: AxisRules(NUMBER), RuleError, "`rules` must be of type Iterable"),
        (
            lambda: AxisRules([], units=NUMBER),
            RuleError,
            "`units` must be of type Iterable",
        ),
        (
            lambda: PathRules([], mesh_axes=NUMBER),
            RuleError,
            "`mesh_axes` must be of type Iterable",
        ),
        (lambda: correct(jax.P(), TEXT, MESH), SpecError, "a size for each dimension"),
        (
            lambda: correct(jax.P(), HALVES, MESH),
            SpecError,
            r"holds 8.5, which is none",
        ),
        (
            lambda: correct(jax.P(), (8,), MESH, min_bytes=TEXT),
            RuleError,
            "`min_bytes` is a number of bytes, not 'ab'",
        ),
        (lambda: MESH.fit(NOTHING), MeshError, r"not None: write `mesh.fit\(len\("),
        (lambda: MESH.fit(TEXT), MeshError, r"not 'ab': write `mesh.fit\(len\("),
        (lambda: MESH.axis_size(NUMBER), MeshError, "the name of an axis, or several"),
        (
            lambda: PathRules([]).prepend(NOTHING),
            RuleError,
            "`rules` must be of type Iterable, not NoneType",
        ),
        (
            lambda: PathRules([]).extend(TEXT),
            RuleError,
            r"is given a text; write `PathRules.parse\('ab'\)`",
        ),
        (
            lambda: levanter.rules_of(NUMBER),
            RuleError,
            r"`mapping` is a mapping, not int; write it as in `rules_of\(\{",
        ),
        (
            lambda: levanter.mappings_of(NOTHING),
            RuleError,
            "`trainer` is a mapping, not NoneType",
        ),
        (lambda: keras.rules_of(NOTHING), RuleError, "`layout_map` is a mapping"),
        (lambda: maxtext.rules_of(TEXT), RuleError, "`config` is a mapping, not str"),
        (
            lambda: huggingface.rules_of(NOTHING),
            RuleError,
            r"`plans` is a mapping, not NoneType; .* `rules_of\(plans_of\(model.config",
        ),
        (
            lambda: hosts.data_layout(TEXT, "data", GRID, 0),
            MeshError,
            "a batch of 'ab' rows cannot be sharded over the 4 devices",
        ),
        (
            lambda: hosts.data_layout(8, "data", GRID, NOTHING),
            MeshError,
            r"no process None; use one of 0 to 1, such as `jax.process_index\(\)`",
        ),
        (
            lambda: hosts.shard_id(NUMBER, GRID, 0),
            MeshError,
            "mesh axes are a name or a tuple of names, not 3",
        ),
        (
            lambda: hosts.local_chunk(NUMBER, jax.P(), GRID, 0),
            SpecError,
            "`shape` has a size for each dimension, and this is 3",
        ),
        (
            lambda: hosts.local_chunk((8,), TEXT, GRID, 0),
            SpecError,
            "`spec` is a PartitionSpec, not 'ab'; write",
        ),
        (
            lambda: hosts.regular_grid(TEXT, {"data": 2}),
            MeshError,
            "expected a MeshSpec, a jax Mesh",
        ),
        (
            lambda: hosts.regular_grid(MESH, NUMBER),
            MeshError,
            "`num_chunks` must be of type Mapping, not int",
        ),
        (
            lambda: hosts.owned((), ON_DEVICES, 0),
            SpecError,
            r"has 1 entries, but the array has shape \(\)",
        ),
        (lambda: MESH.build([NUMBER] * 8), MeshError, r"3 is no device; pass `jax.d"),
        (
            lambda: plan(SHAPES, MESH, memory_kinds=NUMBER),
            RuleError,
            "`memory_kinds` takes pairs, .* and not 3",
        ),
        (
            lambda: plan({"w": np.zeros(8, np.longdouble)}, MESH, axes=AxisRules([])),
            LeafTypeError,
            "a NumPy array of dtype float128 cannot be put on a device",
        ),
        (
            lambda: lint(SHAPES, MESH, memory_kinds=TEXT),
            RuleError,
            r"for all arrays write `\[\('.\*', 'ab'\)\]`",
        ),
        (
            lambda: lint(SHAPES, MESH, memory_kinds=[TEXT]),
            RuleError,
            "`memory_kinds` takes pairs, .* and not 'ab'",
        ),
        (
            lambda: auto.renamed(SHAPES, TEXT),
            RuleError,
            "`renamed` takes a dict from paths to names, not 'ab'",
        ),
        (lambda: field(stacked=NOTHING), SpecError, "give a tuple of names, such as"),
        (
            lambda: From.concat(TEXT),
            MapError,
            r"`From.concat` takes several expressions, not 'ab'",
        ),
        (
            lambda: From("w").scale(NUMBER, block=(2,)),
            MapError,
            "`From` takes the path",
        ),
        (
            lambda: plan_reshard(SHAPES, SHAPES, map=TEXT),
            MapError,
            r"`map` is a TreeMap, not str; write `map=TreeMap\(",
        ),
        (
            lambda: reshard(WEIGHTS, ON_DEVICES, map=TEXT),
            MapError,
            "`map` is a TreeMap, not str",
        ),
        (
            lambda: checkpoint.save("never made", WEIGHTS, map=TEXT),
            MapError,
            "`map` is a TreeMap, not str",
        ),
        (
            lambda: checkpoint.save("never made", WEIGHTS, file_bytes=TEXT),
            LeafTypeError,
            r"`file_bytes` is a number of bytes, not 'ab'; write `2\*\*30`",
        ),
        (
            lambda: checkpoint.load("nothing", SHAPES, memory_limit_bytes=TEXT),
            LeafTypeError,
            "`memory_limit_bytes` is a number of bytes, not 'ab'",
        ),
        (
            lambda: testing.assert_collectives(NUMBER),
            LeafTypeError,
            "`traffic` must be of type Traffic, not int; give what `cost.traffic`",
        ),
        (lambda: testing.traffic_text(TEXT), LeafTypeError, "must be of type Traffic"),
        (
            lambda: t5x.partitioning_of(NUMBER),
            RuleError,
            "reads the text of a gin file",
        ),
        (
            lambda: eformer.replicate(WEIGHTS, NO_DEVICES),
            MeshError,
            r"`mesh` must be of type Mesh, not MeshSpec; .*`spec.build\(",
        ),
        (
            lambda: maps.stacked(CONFIG).to(NO_DEVICES),
            MapError,
            "`to` takes the layout of the target, not MeshSpec",
        ),
        (
            lambda: From.constant(1, NUMBER, "float32"),
            MapError,
            r"`From.constant` takes a shape, not 3; write `\(3,\)`",
        ),
        (
            lambda: map_matrices(NUMBER, PLANNED),
            LeafTypeError,
            r"`fn` is a function of a matrix, not 3; write `map_matrices\(fn, plan\)`",
        ),
        (
            lambda: map_matrices(abs, PLANNED, over=NUMBER),
            SpecError,
            "`over` takes the name of a mesh axis, or several, not 3",
        ),
        (
            lambda: map_matrices(abs, PLANNED, where=TEXT),
            RuleError,
            "`where` must be of type Mapping, not str; write `where=",
        ),
        (
            lambda: sync.plan_transfer(PLANNED, PLANNED, map=NUMBER),
            MapError,
            "`map` is a TreeMap, not int",
        ),
        (
            lambda: testing.shardings_text(NUMBER),
            LeafTypeError,
            "`shardings` must be of type StepShardings, not int",
        ),
        (lambda: auto.plan(SHAPES, [1]), MeshError, r"`devices=\[1\]` is neither"),
        (
            lambda: auto.plan(SHAPES, 8, batch_dim=NOTHING),
            RuleError,
            "`batch_dim=None` is no number",
        ),
        (lambda: cost.seconds(NUMBER, "v5e"), LeafTypeError, "must be of type Traffic"),
    ],
)
def test_a_value_of_another_type_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("processes", [2.0, "2", True, np.float32(2), [2]])
def test_processes_of_a_load_are_a_whole_number(processes, tmp_path):
    weights = {"w": np.ones((8,), np.float32)}
    checkpoint.save(tmp_path / "c", weights)
    index = checkpoint.read_index(tmp_path / "c")
    planned = plan(weights, MESH, paths=PathRules.parse("w->data"))
    message = r"`processes` must be a whole number, not .*; give 1 or more, such as `pr"
    with pytest.raises(LeafTypeError, match=message):
        checkpoint.plan_reads(index, planned, processes=processes)


@pytest.mark.parametrize("number", [1.0, True, "1", np.bool_(True), [1]])
def test_numbers_of_a_transfer_are_whole_numbers(number):
    planned = plan(SHAPES, MESH, paths=PathRules.parse("w->data"))
    with pytest.raises(
        MeshError, match=r"`receiver` is .* of `dst` are \{0..1\}; give"
    ):
        sync.plan_transfer(planned, planned, processes=(2, 2), receiver=number)
    for processes in (number, [*[0] * 7, number], np.array(1.0)):
        with pytest.raises(MeshError, match="`processes` is .* for 8 devices; give a"):
            sync.plan_transfer(planned, planned, processes=(1, processes))
    with pytest.raises(MeshError, match="`memory_limit_bytes` is .*; give a number of"):
        sync.plan_transfer(planned, planned, memory_limit_bytes=number)


def test_sizes_of_a_mesh_may_be_of_numpy():
    sizes: Any = {"data": np.int64(4)}
    slices: Any = {"data": np.int32(2)}
    mesh = MeshSpec(sizes, dcn=slices)
    assert repr(mesh) == "MeshSpec({'data': 4}, dcn={'data': 2})"
    filled = MeshSpec({"data": -1}).fit(np.int64(4))  # pyright: ignore
    assert type(filled.size) is int
    planned = plan(SHAPES, mesh, paths=PathRules.parse("w->data"))
    assert ShardPlan.from_json(planned.to_json()) == planned


def test_extents_of_a_torus_may_be_of_numpy():
    extents: Any = np.array([4, 6, 8])
    assert topology.wraps("TPU v4", extents) == (True, False, True)


def test_chips_of_a_table_may_be_names():
    assert chips.table("v5e") == chips.table((chips.find("v5e"),))
    assert chips.table(["v5e", "v5p"]).count("\n") == 2


def test_a_model_may_be_sharded_over_several_axes():
    rules = models.rules_for("gpt2", "fsdp", fsdp=("data", "fsdp"))
    mesh = MeshSpec({"data": 2, "fsdp": 4})
    planned = plan(models.tree("gpt2", layers=1), mesh, paths=rules, unused="allow")
    assert planned["wte/weight"].spec == jax.P(None, ("data", "fsdp"))


def test_units_may_be_numbers_of_numpy():
    of_numpy: Any = np.int64(2)
    rules = AxisRules([("w", "data")], units={"w": of_numpy})
    assert rules == AxisRules([("w", "data")], units={"w": 2})
    assert atomic("w", of_numpy) == atomic("w", 2)
    planned = plan(SHAPES, MESH, names={"w": ("w",)}, axes=rules)
    assert ShardPlan.from_json(planned.to_json()) == planned


@pytest.mark.parametrize("number", [np.int64(16), 15.5, 16.0, float("inf")])
def test_the_least_bytes_of_a_plan_are_an_int_in_json(number):
    rules = PathRules([("w", fsdp("data"))])
    planned = plan(SHAPES, MESH, paths=rules, min_bytes=number)
    assert ShardPlan.from_json(planned.to_json()) == planned
    is_small = number > 32
    assert planned["w"].spec == (jax.P() if is_small else jax.P("data"))


def test_path_rules_grow_by_a_mapping():
    first = PathRules({"a": jax.P()})
    assert first.extend({"b": jax.P()}).rules == (("a", jax.P()), ("b", jax.P()))
    assert first.prepend({"b": jax.P()}).rules == (("b", jax.P()), ("a", jax.P()))


def test_one_logical_axis_of_a_levanter_trainer_may_be_a_text():
    parameter, compute = levanter.mappings_of({"tensor_parallel_axes": "mlp"})
    assert resolve(("mlp",), compute).spec == jax.P("model")
    assert parameter.names == ("mlp", "batch", "embed")


def test_the_form_is_that_of_the_function_that_was_called():
    for function, form in (
        (checkpoint.structs, r"structs\(path\)"),
        (checkpoint.read_index, r"read_index\(path\)"),
    ):
        with pytest.raises(LeafTypeError, match=f"Write `{form}`"):
            function(NUMBER)
