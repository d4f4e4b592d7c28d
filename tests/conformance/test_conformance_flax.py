"""Every vector measured on flax's two rule readers, its boxes and its constraints.

docs/migrating_flax.md tells readers where shardfx deviates.
"""

import functools as ft
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from conformance.vectors import Raises, Suite, U, entry, missing_on, outcome, spec_of
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import shardfx
from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    constrain,
    follow,
    plan,
    resolve,
    specs_of,
)
from shardfx.errors import RuleError, SpecError, UnmatchedError
from shardfx.interop import flax as interop


XY = MeshSpec({"x": 2, "y": 4})
SKIPPED = {
    "flax-0094": "rules in a thread-local; here they are an argument",
    "flax-0095": "rules in a context manager; here they are an argument",
    "flax-0111": "the mesh of a legacy `with mesh:`; here it is an argument",
    "flax-0112": "the mesh of jax.set_mesh; here it is an argument",
    "explicit mesh type string": (
        "how JAX prints Explicit axes; eformer-0042 is constrained under them"
    ),
}
# id -> (what shardfx gives, why not what flax gives)
DEVIATIONS: dict[str, tuple[Any, str]] = {
    "flax-0028": (
        P(("x", "y")),
        "as flax, with a reason; a rule ('b', 'w') after it is the fallback (B86)",
    ),
    "flax-0029": (
        Raises(RuleError, "uses mesh axis `x` twice"),
        "B86: an axis twice in one rule",
    ),
    "flax-0044": (P("x", "y"), "the members of a tuple are names like others"),
    "flax-0045": (
        Raises(SpecError, "is no entry of an array's names"),
        "names are strings",
    ),
    "flax-0053": (P("x"), "a mapping is an ordered list of pairs"),
    "flax-0056": (
        Raises(SpecError, "`a` occurs twice"),
        "B80: one axis cannot shard two dimensions",
    ),
    "flax-0057": (P("x"), "B80: the second name is blocked, with a reason"),
    "flax-0059": (P(("x", "y"), "z"), "the members of a tuple are names like others"),
    "flax-0060": (
        P("y"),
        (
            "last_wins reads rules as flax.core does; AxisRules(rules) reads them as"
            " linen does (B29)"
        ),
    ),
    "flax-0066": (
        Raises(SpecError, "is no entry of an array's names"),
        "B80: names are not made with str()",
    ),
    "flax-0067": (P("x"), "any string is a name"),
    "flax-0069": (P(U), "B80: names are not made with str()"),
    "flax-0070": (P(("a", "b")), "B80: names are not made with str()"),
    "flax-0078": ((("a", "x"), ("a", "y"), ("b", "z")), "B29: fallbacks are kept"),
    "flax-0080": ((("a", "x"), ("a", "y")), "B29: rules that begin alike agree"),
    "flax-0081": (
        Raises(RuleError, "map 'a' to"),
        "B29: they disagree about the first choice, so nothing is dropped",
    ),
    "flax-0082": ((("a", ("x", "y")),), "a list and a tuple are equal"),
    "flax-0092": (P(), "B81: no names resolve to P()"),
    "flax-0093": (P("x"), "B81: lists are sequences of names"),
    "flax-0098": (
        P(None, "y"),
        (
            "a name that is no axis replicates, with a reason; unmatched='raise' is the"
            " error"
        ),
    ),
    "flax-0100": (P(None, "y"), "corrected; strict=True raises"),
    "flax-0101": (P("x"), "B80: corrected; the name that lost has a reason"),
    "flax-0104": (P("x", "y"), "B83: inside shard_map the manual axes are left out"),
    "flax-0110": (P(), "B82: () replicates; None leaves the array as it is"),
    "flax-0116": (P("x"), "B87: blocked is not unmatched; each is its own reason"),
    "flax-0128": (
        {"w": P("x", "y")},
        "B30: a tuple of strings is the names of an array",
    ),
    "flax-0129": ({"w": P("x", "y")}, "B30"),
    "flax-0137": (
        ["in", "out", "layers"],
        "B88: -1 is the last dimension of the result",
    ),
    "flax-0140": (
        Raises(SpecError, "has no such name"),
        "B88: no assert, also under python -O",
    ),
    "flax-0141": (["in", "out"], "B88: padding is undone"),
}


SUITE = Suite("flax.json", SKIPPED, DEVIATIONS)


def test_every_vector_is_run_or_named_with_a_reason():
    SUITE.check()


def test_the_migration_page_has_every_symbol_of_flax():
    symbols = """
        get_pspec map_sharding get_mesh apply_rules shard_value set_logical_axis_rules get_logical_axis_rules
        logical_axis_rules composite_rules from_sharding_rules logical_to_mesh_axes logical_to_mesh
        logical_to_mesh_sharding RulesFallback AXIS_IS_UNSHARDED RAISE_ERROR NO_CONSTRAINT with_logical_constraint
        LogicallyPartitioned with_logical_partitioning Partitioned with_partitioning add_axis remove_axis
        get_partition_spec get_sharding get_named_sharding get_global_mesh global_mesh_defined unbox out_sharding
        sharding_rules PARTITION_NAME
    """.split()
    assert missing_on("migrating_flax.md", symbols) == []


def rules_of(vector, key="rules") -> Any:
    return [(name, entry(target)) for name, target in vector["inputs"].get(key) or ()]


# --- rules


@SUITE.of(
    "logical_to_mesh_axes", "linen.spmd.with_logical_constraint -> spec passed down"
)
def test_logical_to_mesh_axes(vector):
    names = vector["inputs"].get("array_dim_names", vector["inputs"].get("names"))
    if vector["id"] == "flax-0053":
        rules = {"a": "x"}
    else:
        rules = rules_of(vector)
    if names is None:
        # No names: nothing is asked of the rules, and the leaf is left to path rules.
        sharding_plan = plan(
            jnp.ones(2), XY, names=None, axes=AxisRules(rules), unmatched="replicate"
        )
        assert sharding_plan.leaves[0].names is vector["expected"] is None
        return
    if names == "PartitionSpec('a','b')":
        names = P("a", "b")
    else:
        names = [entry(name) for name in names]
    with outcome(SUITE.expected(vector)) as expected:
        decision = resolve(names, AxisRules(rules))
        assert decision.spec == expected
    if vector["id"] == "flax-0028":
        actual = [(why.code.name, why.axes) for why in decision.reasons]
        assert actual == [("blocked", ("y", "w"))]
        axis_rules = AxisRules([*rules, ("b", "w")])
        spec = resolve(names, axis_rules).spec
        assert spec == P(("x", "y"), "w")


@SUITE.of("core.spmd.from_sharding_rules")
def test_from_sharding_rules(vector):
    names = [entry(name) for name in vector["inputs"]["sharding"]]
    rules = AxisRules.last_wins(rules_of(vector))
    with outcome(SUITE.expected(vector)) as expected:
        if not (isinstance(expected, P) or expected is None):
            expected = spec_of(expected)
        assert resolve(names, rules, unmatched="keep").spec == expected
        # With a mesh the same is said by rules that `plan` takes.
        mesh = MeshSpec(dict.fromkeys(("x", "y", "z", "a", "b"), 2))
        ruled = interop.core_rules(rules_of(vector), mesh)
        assert resolve(names, ruled).spec == expected


@SUITE.of("core.spmd.composite_rules")
def test_composite_rules(vector):
    with outcome(SUITE.expected(vector)) as expected:
        merged = interop.composite_rules(
            rules_of(vector, "rule1"), rules_of(vector, "rule2")
        )
        expected_rules = tuple((name, entry(target)) for name, target in expected)
        assert merged.rules == expected_rules
        axis_rules = AxisRules(rules_of(vector, "rule1"))
        expected_merged = axis_rules.merge(AxisRules(rules_of(vector, "rule2")))
        assert merged == expected_merged


@SUITE.of("core.spmd.get_pspec", "logical rules + per-variable rules")
def test_rules_of_the_model_and_of_a_variable(vector):
    inputs = vector["inputs"]
    if inputs["sharding"] == "list ['a']":
        names = ["a"]
    else:
        names = inputs["sharding"] or []
    rules = interop.composite_rules(
        rules_of(vector, "context_rules"), rules_of(vector, "sharding_rules")
    )
    with outcome(SUITE.expected(vector)) as expected:
        decision = resolve(names, AxisRules.last_wins(rules.rules), unmatched="keep")
        spec = decision.spec
        assert spec == expected
        if vector["function"] == "core.spmd.get_pspec":
            return
        mesh = MeshSpec([tuple(axis) for axis in inputs["mesh"]])
        said = {
            "out_sharding": tuple(names),
            "sharding_rules": inputs["sharding_rules"],
        }
        variable = nnx.Param(jnp.ones((4, 4)), **said, eager_sharding=False)
        axes = interop.composite_rules(
            rules_of(vector, "context_rules"), interop.rules_of({"w": variable})
        )
        sharding_plan = plan(
            {"w": jnp.ones((4, 4))},
            mesh,
            names=interop.names_of({"w": variable}),
            axes=axes,
        )
        assert sharding_plan["w"].spec == expected


# --- constraints


@SUITE.of("core.spmd.shard_value")
def test_shard_value(vector):
    inputs = vector["inputs"]
    kinds = inputs.get("axis_types", "Auto")
    if kinds == ["Explicit", "Explicit"]:
        kind = AxisType.Explicit
    else:
        kind = AxisType.Auto
    mesh = MeshSpec({"x": 2, "y": 4}, axis_types=kind).build(jax.devices())
    x = jnp.ones(inputs.get("value_shape", (8, 8)))
    axes = interop.core_rules(rules_of(vector, "sharding_rules"), XY)
    sharding = inputs["sharding"]
    if isinstance(sharding, dict):
        sharding = P(*sharding["spec"])
    else:
        sharding = sharding and tuple(sharding)
    sharding = () if sharding == [] else sharding
    # flax-0108: without a mesh, which means without devices here.
    if "mesh" in inputs and inputs["mesh"] is None:
        place = MeshSpec({"x": 2, "y": 4})
    else:
        place = mesh
    # Flax passes over axes that the mesh lacks, pads names that are too short, and does
    # not mind unknown ones.
    rules = PathRules([("", P())])
    sharding_plan = plan(x, place, paths=rules, axes=axes, unmatched="replicate")
    if isinstance(sharding, tuple) and 0 < len(sharding) < x.ndim:
        sharding = (*sharding, ...)
    constrain = ft.partial(shardfx.constrain, unmatched="replicate")
    with outcome(SUITE.expected(vector)) as expected:
        if kinds == ["Manual", "Manual"]:
            body = lambda x: constrain(x, sharding, sharding_plan)
            out = jax.jit(
                jax.shard_map(body, mesh=mesh, in_specs=expected, out_specs=expected)
            )(x)
            assert specs_of(out) == expected
            return
        out = constrain(x, sharding, sharding_plan)
        if vector["expected"] == 1 and vector["id"] not in DEVIATIONS:
            assert out is x
            assert sharding is None
            return
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, expected), x.ndim)
    if vector["id"] == "flax-0098":
        with pytest.raises(UnmatchedError, match="no rule for the logical names `a`"):
            resolve(inputs["sharding"], axes, unmatched="raise")
    if vector["id"] == "flax-0100":
        with pytest.raises(SpecError, match="not divisible"):
            constrain(x, sharding, sharding_plan, strict=True)


@SUITE.of("linen.spmd.with_logical_constraint")
def test_with_logical_constraint(vector):
    inputs = vector["inputs"]
    axes = AxisRules(rules_of(vector))
    mesh = XY.build(jax.devices())
    x = jnp.ones((8, 8))
    rules = PathRules([("", P())])
    sharding_plan = plan(x, mesh, paths=rules, axes=axes, unmatched="replicate")
    constrain = ft.partial(shardfx.constrain, unmatched="replicate")
    # Without names, or without rules to read them by, flax leaves the array as it is;
    # that is said by None.
    if inputs.get("names") and inputs["rules"]:
        names = tuple(map(entry, inputs["names"]))
    else:
        names = None
    with outcome(SUITE.expected(vector)) as expected:
        if inputs.get("fallback") == "RAISE_ERROR":
            assert names is not None
            decision = resolve(names, axes, unmatched="raise")
            assert bool(decision.reasons) == (vector["id"] in DEVIATIONS)
        out = constrain(x, names, sharding_plan)
        if names is None:
            assert (out is x) == expected
            return
        assert specs_of(out) == expected
        inside = jax.jit(lambda x: constrain(x, names, sharding_plan))(x)
        if U not in names:
            assert inside.sharding.is_equivalent_to(NamedSharding(mesh, expected), 2)


@SUITE.of("linen.spmd.logical_to_mesh")
def test_logical_to_mesh(vector):
    tree = {}
    for key, names in vector["inputs"]["tree"].items():
        if isinstance(names, dict):
            names = names["spec"]
        tree[key] = tuple(names)
    with outcome(SUITE.expected(vector)) as expected:
        arrays = {key: jnp.ones((8, 8)) for key in tree}
        axis_rules = AxisRules(rules_of(vector))
        sharding_plan = plan(
            arrays,
            XY,
            names=tree,
            axes=axis_rules,
        )
        assert sharding_plan.specs == expected


# --- boxes


@SUITE.of(
    "core.meta.Partitioned.add_axis",
    "core.meta.Partitioned.remove_axis",
    "core.meta add_axis(4) then remove_axis(4)",
)
def test_axes_are_added_and_removed(vector):
    inputs = vector["inputs"]
    function = vector["function"]
    names = tuple(inputs["names"])
    options = (inputs.get("index", 4), inputs.get("partition_name", "layers"))
    with outcome(SUITE.expected(vector)) as expected:
        if "add_axis" in function:
            names = interop.add_axis(names, *options)
        actual = list(
            interop.remove_axis(names, *options) if "remove_axis" in function else names
        )
        assert actual == expected


@SUITE.of("transform_metadata")
def test_transform_metadata(vector):
    inputs = vector["inputs"]
    names_by_key = {key: tuple(names) for key, names in vector["expected"].items()}
    name = inputs["partition"]
    inside = inputs["in_axes"]
    outside = inputs["out_axes"]
    inner = interop.remove_axis(tuple(inputs["v"]), inside, name)
    assert inner == names_by_key["v_inner"]
    assert interop.add_axis(inner, inside, name) == names_by_key["v_after"]
    actual = interop.add_axis(tuple(inputs["v2_inner"]), outside, name)
    assert actual == names_by_key["v2_outer"]


@SUITE.of("lifted transform axis metadata")
def test_a_scanned_layer_has_the_name_of_its_new_dimension(vector):
    names = tuple(vector["inputs"]["names"])
    init = nn.with_partitioning(nn.initializers.ones_init(), names)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(4, kernel_init=init, use_bias=False)(x), None

    metadata = {nn.PARTITION_NAME: "layers"}
    scanned: Any = nn.scan(
        Layer,
        {"params": 0},
        split_rngs={"params": True},
        length=8,
        metadata_params=metadata,
    )
    boxed = jax.eval_shape(scanned().init, jax.random.key(0), jnp.ones((2, 4)), None)
    layer_names = jax.tree.leaves(
        interop.names_of(boxed), is_leaf=lambda node: isinstance(node, tuple)
    )
    expected = tuple(vector["expected"])
    names = tuple(vector["inputs"]["names"])
    expected_layer_names = [interop.add_axis(names, 0, "layers")]
    assert layer_names == [expected] == expected_layer_names


@SUITE.of("core.meta.get_partition_spec")
def test_get_partition_spec(vector):
    assert specs_of(vector["inputs"]["tree"]) == vector["expected"]


@SUITE.of("core.meta.get_sharding")
def test_get_sharding(vector):
    mesh = XY.build(jax.devices())
    boxed = {
        "bias": jnp.ones(8),
        "kernel": nn.Partitioned(jnp.ones((8, 8)), ("x", "y")),
    }
    for tree in (interop.unboxed(boxed), boxed):
        names = interop.names_of(boxed, default=())
        axes = interop.core_rules((), mesh)
        sharding_plan = plan(tree, mesh, names=names, axes=axes)
        leaves = jax.tree.leaves(sharding_plan.shardings)
        sharding_by_name = dict(
            zip(
                ("bias", "kernel"),
                leaves,
                strict=True,
            )
        )
        for name, expected in vector["expected"].items():
            assert sharding_by_name[name] == NamedSharding(
                mesh, spec_of(expected["named_sharding"])
            )


# --- what flax and shardfx both stand on


@SUITE.of("shard_shape", "jax NamedSharding.shard_shape")
def test_shard_shape(vector):
    inputs = vector["inputs"]
    mesh = MeshSpec([tuple(axis) for axis in inputs["mesh"]])
    shape = tuple(inputs["shape"])
    spec = spec_of(inputs["spec"]["spec"])
    expected = tuple(vector["expected"])
    assert NamedSharding(mesh.abstract(), spec).shard_shape(shape) == expected
    struct = jax.ShapeDtypeStruct(shape, "int8")
    sharding_plan = plan(struct, mesh, paths=PathRules([("", spec)]))
    assert sharding_plan.bytes_per_device == math.prod(expected)


@SUITE.of("optimizer state inherits spec")
def test_optimizer_state_inherits_the_spec(vector):
    params = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    spec = spec_of(vector["inputs"]["param_spec"]["spec"])
    mesh = MeshSpec({"row": 2, "col": 4})
    rules = PathRules([("w", spec)])
    sharding_plan = plan(params, mesh, paths=rules)
    state, _ = follow(optax.adam(1e-3).init, sharding_plan).specs
    for name, expected in vector["expected"].items():
        assert getattr(state, name)["w"] == spec_of(expected["spec"])


@SUITE.of("axis types")
def test_axis_types(vector):
    for kind in (AxisType.Auto, AxisType.Explicit):
        axes = {"row": 2, "col": 4}
        mesh = MeshSpec(axes, axis_types=kind).build(jax.devices())
        axes = interop.core_rules((), mesh)
        sharding_plan = plan(
            jnp.ones((8, 8)),
            mesh,
            names=("row", "col"),
            axes=axes,
        )
        expected = spec_of(vector["expected"]["spec"])
        assert sharding_plan.leaves[0].spec == expected
        out = constrain(jnp.ones((8, 8)), ("row", "col"), sharding_plan)
        assert specs_of(out) == sharding_plan.leaves[0].spec


@SUITE.of("per-variable meshes")
def test_a_plan_per_mesh(vector):
    for case_number, (name, inputs) in enumerate(sorted(vector["inputs"].items())):
        axes = dict.fromkeys(inputs["mesh"], 2)
        devices = jax.devices()[4 * case_number : 4 * case_number + 4]
        mesh = MeshSpec(axes).build(devices)
        x = jnp.ones((4, 4))
        axes = interop.core_rules((), mesh)
        sharding_plan = plan(x, mesh, names=tuple(inputs["spec"]), axes=axes)
        expected = spec_of(vector["expected"][name]["spec"])
        assert sharding_plan.leaves[0].spec == expected
        constrained = constrain(x, sharding_plan.leaves[0].spec, sharding_plan)
        assert constrained.sharding.mesh == mesh  # pyright: ignore[reportAttributeAccessIssue]


@SUITE.of("jax PartitionSpec canonicalisation", "jax.make_mesh default axis_types")
def test_facts_about_jax(vector):
    if vector["function"].startswith("jax.make_mesh"):
        shape = tuple(vector["inputs"]["shape"])
        mesh = jax.make_mesh(shape, ("x", "y"))
        names = [kind.name for kind in MeshSpec.of(mesh).axis_types]
        assert names == vector["expected"]
        return
    measured = [
        P(("a",)),
        P(()),
        P(["a", "b"]),
        P("a") == P("a", None),
        P(None) == P(),
        isinstance(P("a"), tuple),
    ]
    expected = []
    for item in vector["expected"]:
        is_spec = isinstance(item, dict)
        expected.append(P(*map(entry, item["spec"])) if is_spec else item)
    assert measured == expected
    # What JAX tells apart although it is one layout, a plan does not.
    mesh = MeshSpec({"a": 2})
    for spec, canonical in (
        (P("a", None), P("a")),
        (P(("a",)), P("a")),
        (P(None), P()),
    ):
        assert shardfx.correct(spec, (8, 8), mesh).spec == canonical
