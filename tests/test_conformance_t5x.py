"""Every vector measured on T5X's partitioning module."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shardfx import topology


VECTORS = json.loads((Path(__file__).parent / "data" / "t5x.json").read_text())


def vectors(*functions):
    chosen = [vector for vector in VECTORS if vector["function"] in functions]
    assert chosen, functions
    return pytest.mark.parametrize("vector", chosen, ids=[vector["id"] for vector in chosen])


def chips(bounds, hosts=None, kind="TPU v4"):
    """Devices that fill `bounds` from the origin, numbered core first, then x, y, z; hosts are boxes of `hosts`."""
    hosts = bounds if hosts is None else hosts
    nx, ny, nz, nc = bounds
    per = [bound // host for bound, host in zip(bounds, hosts, strict=True)]
    out = []
    for z, y, x, c in np.ndindex(nz, ny, nx, nc):
        hx, hy, hz, hc = (at // host for at, host in zip((x, y, z, c), hosts, strict=True))
        process = hc + per[3] * (hx + per[0] * (hy + per[1] * hz))
        out.append(
            SimpleNamespace(
                id=len(out),
                coords=(x, y, z),
                core_on_chip=c,
                process_index=process,
                device_kind=kind,
                platform="tpu",
            )
        )
    return out


@vectors("bounds_from_last_device")
def test_bounds(vector):
    inputs, expected = vector["inputs"], vector["expected"]
    if inputs["coords"] is None:
        counts = inputs["process_count"], inputs["local_device_count"]
        devices = [SimpleNamespace(id=i, process_index=i // counts[1]) for i in range(math.prod(counts))]
    else:
        devices = chips([c + 1 for c in (*inputs["coords"], inputs["core_on_chip"])])
    # T5X looked at the last device only, so it needed them in order.
    assert topology.bounds(devices[::-1]) == tuple(expected)


@vectors("get_coords")
def test_coords(vector):
    inputs = dict(vector["inputs"])
    local = inputs.pop("local_device_count", 0)
    assert topology.coords(SimpleNamespace(**inputs), local) == tuple(vector["expected"])


@vectors("default_mesh.model_parallel_submesh")
def test_default_submesh(vector):
    inputs, expected = vector["inputs"], vector["expected"]
    bounds, partitions = tuple(inputs["bounds"]), inputs["num_partitions"]
    if "model_parallel_submesh" in inputs:
        # An explicit submesh is used as it is: there is no default to ask for.
        order = topology.submesh_order(bounds, (2, 2, 1, 2), inputs["model_parallel_submesh"])
        assert order.shape[1] == math.prod(expected)
        return
    if vector["tag"] == "conform" and isinstance(expected, list):
        assert topology.default_submesh(inputs["device_kind"], partitions, bounds) == tuple(expected)
        return
    feasible = topology.feasible_submeshes(partitions, bounds)
    if feasible:
        assert vector["tag"] == "deviate"
        assert topology.default_submesh(inputs["device_kind"], partitions, bounds) in feasible
    else:
        with pytest.raises(ValueError, match="use `num_partitions` out of"):
            topology.default_submesh(inputs["device_kind"], partitions, bounds)


@vectors("get_mesh")
def test_submesh_order(vector):
    inputs, expected = vector["inputs"], vector["expected"]
    submesh = inputs["model_parallel_submesh"]
    if "bounds_xyzc" not in inputs:
        hosts, local = inputs["hosts"], inputs["devices_per_host"]
        order = topology.submesh_order((hosts, local), (1, local), submesh)
        assert (order @ np.array([local, 1])).tolist() == expected["ids"]
        return
    arguments = (inputs["bounds_xyzc"], inputs["host_layout_xyzc"], submesh)
    if vector["tag"] == "deviate":
        with pytest.raises(ValueError, match="dim|host bounds"):
            topology.submesh_order(*arguments, tile_by_host=inputs["tile_by_host_if_needed"])
        return
    order = topology.submesh_order(*arguments, tile_by_host=inputs["tile_by_host_if_needed"])
    assert list(order.shape[:2]) == expected["shape"]
    assert order.tolist() == expected["coords"]


@vectors("get_gpu_mesh")
def test_hybrid_shape(vector):
    inputs, expected = vector["inputs"], vector["expected"]
    arguments = inputs["num_partitions"], inputs["local_device_count"], inputs["process_count"]
    if vector["tag"] == "deviate" or "raises" in expected:
        with pytest.raises(ValueError, match="use one of"):
            topology.hybrid_shape(*arguments)
        return
    ici, dcn = topology.hybrid_shape(*arguments)
    assert (list(ici), list(dcn)) == (expected["ici_mesh_shape"], expected["dcn_mesh_shape"])
    shape = dict(zip(("data", "model"), (a * b for a, b in zip(ici, dcn, strict=True)), strict=True))
    assert shape == expected["shape"]
