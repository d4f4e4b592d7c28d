"""Every vector measured on T5X's partitioning module."""

import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from _devices import chips, objects
from conformance.vectors import Raises, Suite, entry, outcome, spec_of
from jax.sharding import Mesh, PartitionSpec as P

from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    constrain,
    hosts,
    plan,
    resolve,
    topology,
)
from shardfx.presets import t5x
from tests.specs import entry_axes


SUITE = Suite("t5x.json", {}, {})


def test_every_vector_is_run():
    expected = sorted(vector["id"] for vector in SUITE.vectors)
    assert sorted(SUITE.run) == expected
    assert len(set(SUITE.run)) == 211


@SUITE.of("bounds_from_last_device")
def test_bounds(vector):
    inputs = vector["inputs"]
    expected = vector["expected"]
    if inputs["coords"] is None:
        counts = inputs["process_count"], inputs["local_device_count"]
        devices = [
            SimpleNamespace(id=i, process_index=i // counts[1])
            for i in range(math.prod(counts))
        ]
    else:
        cases = (*inputs["coords"], inputs["core_on_chip"])
        devices = chips([c + 1 for c in cases])
    # T5X looked at the last device only, so it needed them in order.
    assert topology.bounds(devices[::-1]) == tuple(expected)


@SUITE.of("get_coords")
def test_coords(vector):
    inputs = dict(vector["inputs"])
    local = inputs.pop("local_device_count", 0)
    actual = topology.coords(SimpleNamespace(**inputs), local)
    assert actual == tuple(vector["expected"])


@SUITE.of("default_mesh.model_parallel_submesh")
def test_default_submesh(vector):
    inputs = vector["inputs"]
    expected = vector["expected"]
    bounds = tuple(inputs["bounds"])
    partitions = inputs["num_partitions"]
    if "model_parallel_submesh" in inputs:
        # An explicit submesh is used as it is: there is no default to ask for.
        host_bounds = (2, 2, 1, 2)
        order = topology.submesh_order(
            bounds, host_bounds, inputs["model_parallel_submesh"]
        )
        assert order.shape[1] == math.prod(expected)
        return
    if vector["tag"] == "conform" and isinstance(expected, list):
        assert topology.default_submesh(
            inputs["device_kind"], partitions, bounds
        ) == tuple(expected)
        return
    feasible = topology.feasible_submeshes(partitions, bounds)
    if feasible:
        assert vector["tag"] == "deviate"
        assert (
            topology.default_submesh(inputs["device_kind"], partitions, bounds)
            in feasible
        )
    else:
        with pytest.raises(ValueError, match="use `num_partitions` out of"):
            topology.default_submesh(inputs["device_kind"], partitions, bounds)


@SUITE.of("get_mesh")
def test_submesh_order(vector):
    inputs = vector["inputs"]
    expected = vector["expected"]
    submesh = inputs["model_parallel_submesh"]
    if "bounds_xyzc" not in inputs:
        hosts = inputs["hosts"]
        local = inputs["devices_per_host"]
        order = topology.submesh_order((hosts, local), (1, local), submesh)
        actual = (order @ np.array([local, 1])).tolist()
        assert actual == expected["ids"]
        return
    arguments = (inputs["bounds_xyzc"], inputs["host_layout_xyzc"], submesh)
    if vector["tag"] == "deviate":
        with pytest.raises(ValueError, match="dim|host bounds"):
            topology.submesh_order(
                *arguments, tile_by_host=inputs["tile_by_host_if_needed"]
            )
        return
    order = topology.submesh_order(
        *arguments, tile_by_host=inputs["tile_by_host_if_needed"]
    )
    assert list(order.shape[:2]) == expected["shape"]
    assert order.tolist() == expected["coords"]


@SUITE.of("get_gpu_mesh")
def test_hybrid_shape(vector):
    inputs = vector["inputs"]
    expected = vector["expected"]
    is_error = vector["tag"] == "deviate" or "raises" in expected
    with outcome(Raises(ValueError, "use one of") if is_error else expected) as target:
        counts = (
            inputs["num_partitions"],
            inputs["local_device_count"],
            inputs["process_count"],
        )
        ici, dcn = topology.hybrid_shape(*counts)
        assert list(ici) == target["ici_mesh_shape"]
        assert list(dcn) == target["dcn_mesh_shape"]
        actual = [a * b for a, b in zip(ici, dcn, strict=True)]
        assert actual == [target["shape"][name] for name in ("data", "model")]


T5X_MESH = "default_mesh(4) on TPU v3 (4,4,1,2), hosts (2,2,1,2)"


def t5x_mesh():
    """The mesh of T5X's own tests: 32 cores of TPU v3 on four hosts, model parallel
    over 2 x 1 x 1 x 2.
    """
    bounds = (4, 4, 1, 2)
    hosts_at = (2, 2, 1, 2)
    devices = chips(bounds, hosts_at, "TPU v3")
    submesh = topology.default_submesh("TPU v3", 4, bounds)
    order = topology.submesh_order(bounds, hosts_at, submesh)
    grid = topology.positions(devices)
    return Mesh(
        objects(devices)[grid[tuple(np.moveaxis(order, -1, 0))]], ("data", "model")
    )


def slices_grid():
    """Two slices of 8 x 2 devices, two processes along `data` in each."""
    mesh = MeshSpec({"replica": 2, "data": 8, "model": 2})
    return hosts.regular_grid(mesh, {"replica": 2, "data": 2})


def grid_for(inputs):
    if inputs.get("mesh") == T5X_MESH:
        return hosts.grid_of(t5x_mesh())
    return slices_grid()


def assert_chunk(chunk, shape, expected, replica):
    slices = []
    for pair, size in zip(expected, shape, strict=True):
        start, stop = pair["slice"]
        slices.append([0, size] if start is None else [start, stop])
    actual = [[piece.start, piece.stop] for piece in chunk.slices]
    assert actual == slices
    assert chunk.replica_id == replica


@SUITE.of("default_mesh+local_mesh")
def test_default_mesh_and_its_local_part(vector):
    inputs = vector["inputs"]
    expected = vector["expected"]
    mesh = t5x_mesh()
    grid = hosts.grid_of(t5x_mesh())
    assert list(mesh.axis_names) == expected["axis_names"]
    assert dict(mesh.shape) == expected["global_shape"]
    assert mesh.size == expected["size"]
    actual = {n: grid.axis_sizes[n] // grid.num_chunks[n] for n in grid.axis_names}
    assert actual == expected["local_shape"]
    process = inputs["process_index"]
    local = [d.id for d in mesh.devices.flat if d.process_index == process]
    assert local == list(itertools.chain.from_iterable(expected["local_ids"]))


@SUITE.of("get_cpu_mesh", "default_mesh", "PjitPartitioner.mesh")
def test_meshes_without_a_torus(vector):
    inputs = vector["inputs"]
    expected = vector["expected"]
    local = inputs.get("local_device_count", 8)
    processes = inputs.get("process_count", 1)
    if vector["function"] == "PjitPartitioner.mesh":
        # T5X ignored ICI sizes that came without DCN sizes; a MeshSpec without `dcn` is
        # taken as it is.
        axes = zip(("replica", "data", "model"), inputs["ici_mesh_shape"], strict=True)
        mesh = MeshSpec(axes)
        shape = dict(mesh.build(jax.devices()).shape)
        assert shape == {
            "replica": 1,
            "data": 4,
            "model": 2,
        }
        return
    if vector["tag"] == "conform" or inputs["num_partitions"] == local:
        actual = {"data": processes, "model": local}
        assert actual == (expected.get("shape") or expected)
        return
    # T5X ignored the number of partitions on CPU; it is honoured, or refused.
    partitions = inputs["num_partitions"]
    if local % partitions:
        with pytest.raises(ValueError, match="use one of"):
            topology.hybrid_shape(partitions, local, processes)
    else:
        ici, dcn = topology.hybrid_shape(partitions, local, processes)
        assert ici[1] * dcn[1] == partitions


@SUITE.of("default_mesh (hybrid)")
def test_hybrid_mesh(vector):
    expected = vector["expected"]
    inputs = vector["inputs"]
    names = ("replica", "data", "model")
    ici = inputs["ici_mesh_shape"]
    dcn = inputs["dcn_mesh_shape"]
    sizes = [a * b for a, b in zip(ici, dcn, strict=True)]
    axes = zip(names, sizes, strict=True)
    spec = MeshSpec(axes, dcn=dict(zip(names, dcn, strict=True)))
    order = spec.order(chips((4, 2, 1, 1), slices=2))
    pairs = [list(pair) for pair in spec.shape.items()]
    assert pairs == expected["shape"]
    actual = np.vectorize(lambda device: device.id)(order.devices).tolist()
    assert actual == expected["ids"]
    assert order.method == "hybrid: mesh_utils"
    assert order.mean_hops == (0.0, 1.0, 1.0)


@SUITE.of("LocalChunker.__init__")
def test_host_grid(vector):
    expected = vector["expected"]
    grid = grid_for(vector["inputs"])
    assert dict(grid.num_chunks) == expected["num_chunks"]
    ids = grid.chunk_ids[vector["inputs"]["process_index"]]
    actual = dict(zip(grid.axis_names, ids, strict=True))
    assert actual == expected["chunk_ids"]


@SUITE.of("LocalChunker.get_local_chunk_info")
def test_local_chunk(vector):
    inputs = vector["inputs"]
    expected = vector["expected"]
    grid = grid_for(inputs)
    shape = inputs["global_shape"]
    spec = spec_of(inputs["mesh_axes"])
    process = inputs["process_index"]
    if vector["id"] == "t5x-0253":
        # T5X had no tuple entries.
        actual = hosts.local_chunk(shape, spec, grid, process)
        slices = (slice(32, 64), slice(0, 16))
        assert actual == hosts.LocalChunk(slices, 0)
    elif vector["tag"] == "deviate":
        with pytest.raises(ValueError, match="not divisible|entries|twice|no axis"):
            hosts.local_chunk(shape, spec, grid, process)
    else:
        chunk = hosts.local_chunk(shape, spec, grid, process)
        assert_chunk(chunk, shape, expected["slice"], expected["replica_id"])


@SUITE.of("LocalChunker.get_shard_id")
def test_shard_id(vector):
    inputs = vector["inputs"]
    expected = vector["expected"]
    axes = inputs.get("sharded_mesh_axes", inputs.get("sharded_mesh_axes_order"))
    actual = hosts.shard_id(entry(axes), grid_for(inputs), inputs["process_index"])
    assert actual == expected
    if vector["tag"] == "deviate":
        # T5X took these axes in a set, whose order is that of their hashes.
        with pytest.raises(ValueError, match="no order; pass a tuple"):
            hosts.shard_id(set(axes), grid_for(inputs), inputs["process_index"])


@SUITE.of("LocalChunker.get_replica_id")
def test_replica_id(vector):
    axes = entry(vector["inputs"]["sharded_mesh_axes"])
    process = vector["inputs"]["process_index"]
    error = Raises(ValueError, "no axis 'zz'")
    with outcome(
        error if vector["tag"] == "deviate" else vector["expected"]
    ) as expected:
        assert hosts.replica_id(axes, grid_for(vector["inputs"]), process) == expected


@SUITE.of("LocalChunker (multi-slice)")
def test_slices(vector):
    expected = vector["expected"]
    process = vector["inputs"]["process_index"]
    grid = slices_grid()
    actual = dict(zip(grid.axis_names, grid.chunk_ids[process], strict=True))
    assert actual == expected["chunk_ids"]
    assert dict(grid.num_chunks) == expected["num_chunks"]
    pieces, replica = expected["chunk (32,64) [data,model]"]
    chunk = hosts.local_chunk((32, 64), P("data", "model"), grid, process)
    assert_chunk(
        chunk,
        (32, 64),
        pieces,
        replica,
    )
    for function in (hosts.shard_id, hosts.replica_id):
        for axes in ((), ("data",), ("replica", "data")):
            key = f"{function.__name__}({','.join(axes) or '()'})"
            if key in expected:
                assert function(axes, grid, process) == expected[key]


@SUITE.of("BasePartitioner.get_data_layout")
def test_data_layout(vector):
    inputs = vector["inputs"]
    expected = vector["expected"]
    grid = hosts.grid_of(t5x_mesh())
    process = inputs["process_index"]
    if inputs["batch_size"] == 0:
        with pytest.raises(ValueError, match="a positive multiple of 8, or `None`"):
            hosts.data_layout(0, "data", grid, process)
        return
    if "host_index" in inputs:
        # T5X could not be asked about another host.
        shard_id = hosts.data_layout(8, "data", grid, inputs["host_index"]).shard_id
        assert shard_id == 0
        return
    axes = data_axes(inputs.get("logical_axis_rules", [["batch", "data"]]))
    layout = hosts.data_layout(inputs["batch_size"], axes, grid, process)
    assert dataclasses.asdict(layout) == expected


@SUITE.of(
    "BasePartitioner.data_mesh_size/data_shards/data_shard_id/data_partition_spec"
)
def test_data_properties(vector):
    size, shards, shard, spec = vector["expected"]
    mesh = t5x_mesh()
    layout = hosts.data_layout(
        None, "data", hosts.grid_of(mesh), vector["inputs"]["process_index"]
    )
    assert MeshSpec.of(mesh).axis_size("data") == size
    assert layout.num_shards == shards
    assert layout.shard_id == shard
    rules = AxisRules([("batch", "data")])
    decision = resolve(("batch",), rules)
    actual = decision.spec
    assert actual == spec_of(spec["spec"])


def data_axes(rules):
    spec = resolve(("batch",), axis_rules(rules)).spec
    if len(spec):
        return entry_axes(spec[0])
    return None


def axis_rules(rules):
    return AxisRules([(name, entry(to)) for name, to in rules])


@SUITE.of("PjitPartitioner._data_axis")
def test_data_axis(vector):
    assert data_axes(vector["inputs"]["logical_axis_rules"]) == entry(
        vector["expected"]
    )


@SUITE.of("PjitPartitioner.get_mesh_axes (leaf)")
def test_mesh_axes_of_a_leaf(vector):
    inputs = vector["inputs"]
    expected = vector["expected"]
    mesh = MeshSpec({"data": 2, "model": 2})
    axes = axis_rules(inputs.get("logical_axis_rules", []))
    struct = jax.ShapeDtypeStruct((4, 4), np.float32)
    tree = {"w": struct}
    names = {"w": inputs["logical_axes"] and tuple(inputs["logical_axes"])}
    planned = plan(tree, mesh, names=names, axes=axes, unmatched="replicate")
    if expected:
        expected_specs = spec_of(expected["spec"])
    else:
        expected_specs = P()
    assert planned.specs["w"] == expected_specs


@SUITE.of("BasePartitioner.__init__")
def test_contradictory_partitioner_arguments(vector):
    # There is no second argument to contradict a submesh; one of the wrong rank is
    # refused.
    submesh = vector["inputs"]["model_parallel_submesh"]
    error = Raises(ValueError, "has 2 dimensions, but `bounds`")
    with outcome(vector["inputs"].get("num_partitions", error)) as expected:
        bounds = (4, 4, 1, 2)
        host_bounds = (2, 2, 1, 2)
        shape = topology.submesh_order(bounds, host_bounds, submesh).shape[1]
        assert shape == expected


@SUITE.of("with_sharding_constraint")
def test_constraint_is_checked_on_every_backend(vector):
    mesh = MeshSpec({"data": 8})
    planned = plan(
        {"x": np.ones(8, np.float32)},
        mesh.build(jax.devices()),
        paths=replicate_all(),
    )
    with pytest.raises((ValueError, TypeError)):
        constrain(np.ones(8, np.float32), vector["inputs"]["axis_resources"], planned)


@SUITE.of("global_mesh_defined")
def test_no_global_mesh_is_read(vector):
    assert vector["tag"] == "context"
    # Whatever mesh is current, a plan is for the mesh that it was given.
    spec = MeshSpec({"data": 8})
    mesh = jax.make_mesh((2,), ("other",))
    with jax.set_mesh(mesh):
        sharding_plan = plan({"x": np.ones(8, np.float32)}, spec, paths=replicate_all())
        mesh = sharding_plan.mesh
        assert mesh == spec


def replicate_all():
    return PathRules([(".*", P())])


def listed(rules):
    """The rules as JSON has them, with a list for each tuple."""
    return json.loads(json.dumps(rules.rules))


def preset(inputs):
    added = [tuple(rule) for rule in inputs.get("additional_rules") or ()]
    return t5x(
        inputs["activation_partitioning_dims"],
        inputs["parameter_partitioning_dims"],
        added,
    )


@SUITE.of("standard_logical_axis_rules")
def test_standard_rules(vector):
    inputs = vector["inputs"]
    expected = vector["expected"]
    with outcome(
        Raises(ValueError, "use 1 or 2") if isinstance(expected, dict) else expected
    ) as target:
        rules = listed(preset(inputs))
        if "returns" in inputs:
            actual = rules[-len(target) :]
        else:
            actual = rules
        assert actual == target


@SUITE.of("standard_rules->logical_to_mesh_axes")
def test_standard_rules_resolve(vector):
    inputs = vector["inputs"]
    expected = vector["expected"]
    spec = resolve(tuple(inputs["array_dim_names"]), preset(inputs)).spec
    assert spec == spec_of(expected["spec"])


@SUITE.of("PjitPartitioner.logical_axis_rules")
def test_rules_for_several_slices(vector):
    axes, first = vector["expected"]
    rules = t5x().without("batch").prepend([("batch", tuple(axes))])
    assert listed(rules)[0] == first
    assert data_axes(listed(rules)) == tuple(axes)
