"""Every vector measured on eformer that concerns rules, matching and constraints.

docs/migrating_eformer.md tells readers where shardfx deviates.
"""

import contextlib
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _devices import Chip, objects
from conformance.vectors import decoded, entry, missing_on, outcome
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import shardfx
from shardfx import (
    MeshSpec,
    PathRules,
    constrain,
    correct,
    gather,
    hosts,
    plan,
    presets,
    resolve,
    shard,
)
from shardfx.errors import (
    RuleError,
)
from shardfx.interop.eformer import axis_names_of
from shardfx.presets import eformer, infer_mode
from shardfx.presets.layouts import Layout
from shardfx.presets.tokens import GENERATION_MODES, TOKENS
from tests.conformance.eformer_vectors import SUITE
from tests.specs import canonical


LAYOUTS = {
    name: value
    for name, value in vars(presets.layouts).items()
    if isinstance(value, Layout)
}
MESH = MeshSpec({"dp": 2, "tp": 4})
# Every axis that a vector names, of size 1: a mesh on which nothing has to be
# corrected.
ONE = MeshSpec(dict.fromkeys(("dp", "tp", "x", "y", "model", "data", "fsdp", "sp"), 1))


def test_every_vector_is_run_or_named_with_a_reason():
    # Beyond those that the study tagged, this one measured value is one that no valid
    # spec can have.
    SUITE.check(("eformer-0246",))


def test_the_migration_page_has_every_symbol_of_eformer():
    symbols = """
        MIN_SHARDING_SIZE LOG_SHARDING_MOVE names_in_current_mesh make_shard_and_gather_fns
        get_names_from_partition_spec with_sharding_constraint get_corrected_named_sharding match_partition_rules
        analyze_sharding_strategy create_pattern_based_partition_spec extract_sharding_structure extract_shardings
        get_shardings_with_structure get_incontext_mesh get_axes_size_in_mesh get_mesh_axis_names get_mesh_axis_size
        get_submesh_device_index get_partition_spec auto_partition_spec vrn_auto_partition_spec auto_shard_array
        auto_namedsharding optimize_sharding_for_memory validate_sharding_config convert_sharding_strategy
        hash_fn get_safe_hash_int PartitionAxis register unregister clear_registered_axes get_registered_axes
        resolve_axis resolve_spec PartitionManager get_current_partition_manager get_partition_manager
        apply_logical_sharding DynamicShardingAxes NOT_GIVEN EMPTY_VAL EMPTY MODE_TRAIN MODE_DECODE MODE_PREFILL
        MODE_INSERT GENERATION_MODES
    """.split()
    names = [
        name for name, value in vars(presets.tokens).items() if value in TOKENS.values()
    ]
    own_part = [
        *LAYOUTS,
        *names,
    ]
    assert len(own_part) == 17 + 25
    assert missing_on("migrating_eformer.md", [*symbols, *own_part]) == []


def meshes(vector) -> Any:
    axes = vector["inputs"].get("mesh")
    if vector["inputs"].get("mesh_axis_types") == "Explicit":
        kind = AxisType.Explicit
    else:
        kind = AxisType.Auto
    if axes is None:
        return None
    return MeshSpec([tuple(axis) for axis in axes], axis_types=kind)


def built(spec) -> Mesh:
    return spec.build(jax.devices()[: spec.size])


# --- constraints


@SUITE.of("constraints.get_corrected_named_sharding")
def test_get_corrected_named_sharding(vector):
    inputs = vector["inputs"]
    mesh = meshes(vector)
    spec = P(*map(entry, inputs["spec"]["spec"]))
    if "mesh_context" in inputs:
        ambient = jax.set_mesh(built(mesh))
    else:
        ambient = contextlib.nullcontext()
    with ambient, outcome(SUITE.expected(vector)) as expected:
        decision = correct(spec, tuple(inputs["shape"]), mesh)
        assert decision.spec == expected
        # B4, B6, B10: whatever was lost has a reason.
        assert bool(decision.reasons) == (decision.spec != canonical(spec))


@SUITE.of("constraints.with_sharding_constraint")
def test_with_sharding_constraint(vector):
    inputs = vector["inputs"]
    mesh = meshes(vector) or MESH
    if "spec" in inputs:
        spec = inputs["spec"]
    else:
        spec = tuple(inputs["sharding"])
    if isinstance(spec, dict):
        spec = P(*map(entry, spec["spec"]))
    array = jnp.ones(inputs.get("array_shape", (8, 8)))
    if "dict" in inputs.get("note", ""):
        value: Any = {"a": array}
    else:
        value = array
    devices = built(mesh)
    mesh_of_plan: Any = devices
    if "mesh" in inputs and inputs["mesh"] is None:
        mesh_of_plan = mesh
    rules = PathRules([("x", P())])
    sharding_plan = plan({"x": array}, mesh_of_plan, paths=rules)
    # eformer passes over axes that the mesh lacks.
    constrain = ft.partial(shardfx.constrain, unmatched="replicate")
    if inputs.get("mesh_context") == "jax.set_mesh":
        ambient = jax.set_mesh(built(mesh))
    else:
        ambient = contextlib.nullcontext()
    with ambient, outcome(SUITE.expected(vector)) as expected:
        if "tree" in inputs and inputs["tree"]:
            constrain_leaf = lambda leaf: constrain(leaf, spec, sharding_plan)
            result = jax.tree.map(constrain_leaf, {"a": array})["a"]
        else:
            result = constrain(value, spec, sharding_plan)
        assert isinstance(result.sharding, NamedSharding)
        assert result.sharding.mesh == sharding_plan.jax_mesh
        assert canonical(result.sharding.spec) == expected
        # Under Explicit axes JAX wants the argument of a jitted function on the mesh
        # already.
        jitted = jax.jit(lambda x: constrain(x, spec, sharding_plan))
        inside = jitted(constrain(array, P(), sharding_plan))
        expected_sharding = NamedSharding(devices, expected)
        assert inside.sharding.is_equivalent_to(expected_sharding, array.ndim)


@SUITE.of("constraints.get_names_from_partition_spec")
def test_names_of_specs(vector):
    def specs(value):
        if isinstance(value, dict) and "spec" in value:
            return P(*map(entry, value["spec"]))
        if isinstance(value, dict):
            return {k: specs(v) for k, v in value.items()}
        return [specs(v) for v in value]

    axis_names = sorted(axis_names_of(specs(vector["inputs"]["specs"])))
    assert axis_names == list(SUITE.expected(vector))


@SUITE.of("constraints.get_axes_size_in_mesh")
def test_axes_size(vector):
    names = hashable(vector["inputs"]["axis_names"])
    with outcome(SUITE.expected(vector)) as expected:
        actual = meshes(vector).axis_size(names)
        assert actual == expected


@SUITE.of("constraints.get_mesh_axis_size", "constraints.get_submesh_device_index")
def test_sizes_and_indices_inside_shard_map(vector):
    names = hashable(vector["inputs"]["axis_names"])
    size = vector["function"].endswith("get_mesh_axis_size")
    with outcome(SUITE.expected(vector)) as expected:
        if size and not isinstance(expected, list):
            assert MESH.axis_size(names) == expected
            return

        def value():
            if size:
                number = MESH.axis_size(names)
            else:
                number = jax.lax.axis_index(names)
            return jnp.full((1, 1), number)

        out = jax.shard_map(
            value, mesh=built(MESH), in_specs=(), out_specs=P("dp", "tp")
        )()
        if isinstance(expected, list):
            expected_out = expected
        else:
            expected_out = [[expected] * 4] * 2
        assert out.tolist() == expected_out


@SUITE.of("constraints.match_partition_rules")
def test_match_partition_rules(vector):
    inputs = vector["inputs"]
    rules = PathRules(
        [
            (regex, target and P(*map(entry, target["spec"])))
            for regex, target in inputs["rules"]
        ]
    )
    order = inputs.get("tree_key_order")
    if order:
        tree = {key: jax.ShapeDtypeStruct((4,), "int8") for key in order}
    else:
        tree = leaves(inputs["tree"])
    # Elements become bytes: int8 leaves have as many of one as of the other. `None`
    # stood for an environment variable.
    if inputs.get("min_size", 0) is None:
        smallest = 16384
    else:
        smallest = inputs.get("min_size", 0)
    if inputs.get("strict", True) and vector["id"] != "eformer-0089":
        unmatched = "raise"
    else:
        unmatched = "replicate"
    with outcome(SUITE.expected(vector)) as expected:
        sharding_plan = plan(
            tree,
            ONE,
            paths=rules,
            min_bytes=smallest,
            unmatched=unmatched,
            unused="allow",
        )
        if order:
            assert list(sharding_plan.specs) == expected
        else:
            assert sharding_plan.specs == expected


def leaves(tree) -> Any:
    if not isinstance(tree, dict):
        if isinstance(tree, list):
            return [leaves(item) for item in tree]
        return tree
    if "shape" in tree:
        return jax.ShapeDtypeStruct(tuple(tree["shape"]), "int8")
    if "python" in tree:
        return tree["python"]
    return {key: leaves(item) for key, item in tree.items()}


@SUITE.of("constraints.analyze_sharding_strategy")
def test_analysis(vector):
    inputs = vector["inputs"]
    # complex64 has the 8 bytes of the vector's float64, and needs no x64 mode.
    tree = {
        name: jax.ShapeDtypeStruct(tuple(shape), "complex64")
        for name, shape in inputs["tree"].items()
    }
    specs = {
        name: P(*map(entry, spec["spec"])) for name, spec in inputs["specs"].items()
    }
    rules = PathRules([(f"^{name}$", spec) for name, spec in specs.items()])
    sharding_plan = plan(
        tree,
        meshes(vector),
        paths=rules,
    )
    total = sum(
        leaf.bytes
        for leaf in sharding_plan.leaves
        if leaf.bytes_per_device < leaf.bytes
    )
    sharded = total // 8
    actual = (
        sharding_plan.bytes_total // 8,
        sharded,
        sharding_plan.bytes_per_device,
    )
    assert actual == SUITE.expected(vector)


@SUITE.of("constraints.create_pattern_based_partition_spec")
def test_patterns(vector):
    inputs = vector["inputs"]
    tree = {name: jax.ShapeDtypeStruct((8, 8), "int8") for name in inputs["names"]}
    with outcome(SUITE.expected(vector)) as expected:
        if inputs["pattern"]:
            rules = PathRules.parse(inputs["pattern"]).rules
        else:
            rules = ()
        if "default_spec" in inputs:
            default = [(".*", decoded(inputs["default_spec"]))]
        else:
            default = []
        path_rules = PathRules([*rules, *default])
        sharding_plan = plan(tree, ONE, paths=path_rules, unmatched="replicate")
        assert [sharding_plan.specs[name] for name in inputs["names"]] == expected


@SUITE.of(
    "constraints.extract_sharding_structure",
    "constraints.extract_shardings",
    "constraints.get_partition_spec",
)
def test_shardings_are_read_without_a_mesh(vector):
    sharding = NamedSharding(built(MESH), P("dp", None))
    leaf: Any = jax.device_put(jnp.ones((8, 8)), sharding)
    if vector["function"].endswith("structure"):
        leaf = jax.ShapeDtypeStruct((8, 8), "int8", sharding=sharding)
    tree = dict(vector["inputs"].get("tree", {}))
    if vector["function"].endswith("spec"):
        with outcome(SUITE.expected(vector)) as expected:
            tree["a"] = jnp.ones((8, 8))
            if expected:
                tree["a"] = leaf
            assert shardfx.specs_of(tree) == expected
    else:
        shardings = shardfx.shardings_of({"a": leaf, "n": 3})
        assert shardings == {"a": sharding, "n": None}
        assert canonical(shardings["a"].spec) == SUITE.expected(vector)


@SUITE.of("constraints.make_shard_and_gather_fns")
def test_shard_and_gather(vector):
    inputs = vector["inputs"]
    mesh = built(meshes(vector))
    if "value" in inputs:
        value = np.ones((8, 8), np.float32)
    else:
        value = jnp.ones(inputs.get("array_shape", (8, 8)))
    rules = PathRules([("x", decoded(inputs["spec"]))])
    sharding_plan = plan(
        {"x": value},
        mesh,
        paths=rules,
        unmatched="replicate",
    )
    placed = shard({"x": value}, sharding_plan)["x"]
    expected = SUITE.expected(vector)
    if "gather" in inputs.get("call", ""):
        placed = gather(placed)
    if isinstance(expected, str):
        assert type(placed).__name__ == expected
        return
    assert isinstance(placed.sharding, NamedSharding)  # pyright: ignore[reportAttributeAccessIssue]
    assert placed.sharding.mesh == mesh  # pyright: ignore[reportAttributeAccessIssue]
    assert canonical(placed.sharding.spec) == expected  # pyright: ignore[reportAttributeAccessIssue]
    if vector["id"] == "eformer-0125":
        with pytest.raises(RuleError, match="uses the mesh axis 'zz'"):
            plan({"x": value}, mesh, paths=PathRules([("x", P("zz"))]))


# --- PartitionAxis


def registered(rules, registry):
    """What eformer's `register` does, said with the methods of AxisRules."""
    for row in registry:
        name = row["name"].strip()
        rule = row["axis_rule"]
        if row.get("override") and name in rules.names:
            rules = rules.without(name)
        if isinstance(rule, list) and len(rule) == 1:
            (rule,) = rule
        if isinstance(rule, list):
            # A composite of tokens stands for the mesh axes that they have.
            specs = [resolve((token,), rules).spec[0] for token in rule]
            rules = rules.extend({name: specs})
        elif rule in TOKENS or (rule or "").startswith("__"):
            rules = rules.with_alias(name, TOKENS.get(rule, rule))
        else:
            rules = rules.extend({name: rule})
        generation = row.get("generation_axis_rule", "as the base field")
        if generation is None:
            modes = dict.fromkeys(GENERATION_MODES, {name: None})
            rules = rules.prepend(modes=modes)
        elif generation.startswith("decode_"):
            # An alias keeps the decode rule of the field that it follows; there is
            # nothing to say.
            assert generation == f"decode_{rule}"
    return rules


MODES = {
    "__train__": "train",
    "__prefill__": "prefill",
    "__autoregressive__": "decode",
    "__insert__": "insert",
}


def names_of(axes) -> Any:
    """eformer writes "_" where nothing shards; here that is None."""
    names = []
    for axis in axes:
        if isinstance(axis, list):
            names.append(names_of(axis))
        elif axis == "_":
            names.append(None)
        else:
            names.append(axis)
    return tuple(names)


def fields(paxis) -> Any:
    return {key: hashable(value) for key, value in paxis.items()}


def hashable(value) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return value


# A raw mesh axis among the names passes where eformer let it pass.
KEEP = {"eformer-0194", "eformer-0202", "eformer-0204"}


@SUITE.of("PartitionAxis.resolve_axis", "PartitionAxis.resolve_spec")
def test_resolve_axis(vector):
    inputs = vector["inputs"]
    modes = inputs.get("modes") or [inputs["mode"]]
    with outcome(SUITE.expected(vector)) as expected:
        rules = registered(
            eformer(**fields(inputs["paxis"])), inputs.get("registry", ())
        )
        unmatched = "raise"
        if vector["id"] in KEEP:
            unmatched = "keep"
        decided = ft.partial(
            resolve, names_of(inputs["axes"]), rules, unmatched=unmatched
        )
        specs = [decided(mode=MODES.get(mode, mode)).spec for mode in modes]
        if "modes" in inputs:
            assert specs == [canonical(P(entry(axes))) for axes in expected]
        else:
            if isinstance(expected, P):
                spec = expected
            else:
                spec = P(*map(entry, expected))
            expected_specs = [canonical(spec)]
            assert specs == expected_specs


@SUITE.of("PartitionAxis.__init__", "PartitionAxis.replace")
def test_fields(vector):
    rules = eformer(**vector["inputs"]["overrides"])
    expected = SUITE.expected(vector)
    if isinstance(expected, dict):
        fields = expected
    else:
        fields = {"tensor_parallel_axis": expected[0], "head_axis": expected[1]}
    for field, target in fields.items():
        token = TOKENS[field.removeprefix("decode_")]
        mode = "train"
        if field.startswith("decode_"):
            mode = "decode"
        spec = resolve((token,), rules, mode=mode).spec
        assert spec == canonical(P(entry(target))), field


# --- PartitionManager


def layout_with(arguments):
    """The layout of the axes of arguments, which may say its dimension of the mode."""
    mode_dim = None
    if isinstance(arguments["mode"], int):
        mode_dim = arguments["mode"]
    return Layout(names_of(arguments["axes"]), mode_dim)


def layout_of(arguments):
    dynamic = arguments.get("dynamic_axes")
    if dynamic is None or "axes" in arguments:
        return layout_with(arguments)
    if isinstance(dynamic, str):
        return LAYOUTS["HiddenStateSharding"]
    if "name" not in dynamic:
        return Layout(names_of(dynamic["axes"]))
    layout = LAYOUTS[dynamic["name"]]
    assert layout == layout_with(dynamic)
    return layout


@SUITE.of("PartitionManager.resolve")
def test_manager_resolve(vector):
    inputs = dict(vector["inputs"])
    if vector["id"] == "eformer-0254":
        inputs.pop("axes")
    layout = layout_of(inputs)
    shape = inputs.get("shape")
    with outcome(SUITE.expected(vector)) as expected:
        mode = infer_mode(shape and tuple(shape), layout.mode_dim)
        rules = eformer(**fields(inputs.get("paxis", {})))
        decision = resolve(
            layout.axes,
            rules,
            mode=mode,
            unmatched="raise",
        )
        spec = decision.spec
        expected_spec = expected
        if not isinstance(expected, P):
            expected_spec = P(*expected)
        assert spec == canonical(expected_spec)


@SUITE.of("PartitionManager.shard")
def test_manager_shard(vector):
    inputs = vector["inputs"]
    mesh = built(meshes(vector))
    x = jnp.ones(inputs["array_shape"])
    names = names_of(inputs["axes"])
    axes = eformer(**inputs["paxis"])
    sharding_plan = plan(
        x,
        mesh,
        names=names,
        axes=axes,
        mode=MODES[inputs["mode"]],
    )
    for placed in (
        shard(x, sharding_plan),
        constrain(x, names, sharding_plan),
        jax.jit(lambda x: constrain(x, names, sharding_plan))(x),
    ):
        sharding = NamedSharding(mesh, SUITE.expected(vector))
        assert placed.sharding.is_equivalent_to(sharding, x.ndim)
    assert sharding_plan.leaves[0].spec == SUITE.expected(vector)


# --- meshes


@SUITE.of("mesh.create_mesh")
def test_create_mesh(vector):
    inputs = vector["inputs"]
    kind = AxisType[inputs["axis_types"].capitalize()]
    axes = dict(zip(inputs["axis_names"], inputs["axis_dims"], strict=True))
    spec = MeshSpec(axes, axis_types=kind).fit(inputs["devices"])
    for mesh in (spec.build(jax.devices()), spec.abstract()):
        kinds = [kind.name for kind in mesh.axis_types]
        shape = list(mesh.shape.values())
        actual = [
            list(mesh.axis_names),
            kinds,
            shape,
        ]
        assert actual == SUITE.expected(vector)


@SUITE.of("mesh.calculate_host_mesh_shape")
def test_host_mesh_shape(vector):
    inputs = vector["inputs"]
    shape = inputs["global_mesh_shape"]
    local = inputs["total_devices(local)"]
    axes = {f"axis{i}": size for i, size in enumerate(shape)}
    devices = objects(
        [Chip(i, (i, 0, 0), 0, i // local, "cpu") for i in range(np.prod(shape))]
    )
    with outcome(SUITE.expected(vector)) as expected:
        mesh = Mesh(devices.reshape(shape), tuple(axes))
        grid = hosts.grid_of(mesh)
        actual = [size // grid.num_chunks[axis] for axis, size in axes.items()]
        assert actual == expected
