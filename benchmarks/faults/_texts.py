"""The partitioned program of a case as text, and a text run on emulated devices.

XLA's CPU client takes StableHLO alone, so a text goes through it. That loses the device
order of replica groups in mesh notation (`device_ids=`), so groups are written out
first: without that, right programs give other numbers.
"""

import importlib
import importlib.util
import itertools
import re
from typing import Any

import jax
import numpy as np
from jaxlib import xla_client

from shardfx._step import lowered, partitioner
from shardfx._step.collectives import groups_of
from shardfx._step.hlo_text import parse_hlo

from ._data import Case
from ._numbers import mesh_of, sharding


_jax: Any = importlib.import_module("jaxlib._jax")
# JAX 0.9 has both in one module.
_has_own_module = importlib.util.find_spec("jaxlib._hlo") is not None
_hlo: Any = importlib.import_module("jaxlib._hlo") if _has_own_module else _jax
# The passes that must not run again.
PARTITIONERS = "spmd-partitioning,shardy-xla,sharding-propagation,sharding-remover"
GROUPS = re.compile(r"replica_groups=.*?(?=, (?!device_ids)[a-z_]+=|$)")
_GROUPED = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all)\(")
_NAME = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = ")


def texts(case: Case, step: Any, arguments: list[np.ndarray]) -> tuple[str, str]:
    """The program of one device, groups written out, and the whole program before the
    partitioner, of a case whose jitted function is `step`.
    """
    count = mesh_of(case.layout.mesh).size
    module = step.lower(*arguments).compiler_ir("stablehlo")
    both = partitioner.programs(lowered.bytecode(module), count)
    return explicit(both.partitioned, count), both.whole


def explicit(text: str, devices: int) -> str:
    """The text with all replica groups as lists of devices."""
    instructions = {}
    for computation in parse_hlo(text).computations.values():
        instructions |= computation
    lines = text.split("\n")
    for number, line in enumerate(lines):
        kind = _GROUPED.search(line)
        name = _NAME.match(line)
        if kind is None or name is None or "replica_groups=" not in line:
            continue
        groups = groups_of(instructions[name[1]], kind[1], devices)
        rows = list(itertools.chain.from_iterable(group.tolist() for group in groups))
        lines[number] = GROUPS.sub(groups_text(rows), line, count=1)
    return "\n".join(lines)


def groups_text(rows: list[list[int]]) -> str:
    """The attribute of replica groups."""
    listed = ["{" + ",".join(str(device) for device in row) + "}" for row in rows]
    return "replica_groups={" + ",".join(listed) + "}"


def is_whole(text: str) -> bool:
    """Whether XLA wrote all constants out."""
    return "{...}" not in text


def placed(case: Case, arguments: list[np.ndarray]) -> list[jax.Array]:
    """The arguments on the case's mesh."""
    mesh = mesh_of(case.layout.mesh)
    return [
        jax.device_put(array, sharding(mesh, spec))
        for array, spec in zip(arguments, case.layout.arguments, strict=True)
    ]


def run(text: str, arguments: list[jax.Array], devices: int) -> list[list[np.ndarray]]:
    """Runs a partitioned program as it stands. Returns each result on each device."""
    module = _hlo.hlo_module_from_text(text)
    computation = _hlo.XlaComputation(module.as_serialized_hlo_module_proto())
    stablehlo = _jax.mlir.xla_computation_to_mlir_module(computation)
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    build.num_replicas = 1
    build.num_partitions = devices
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = False
    build.device_assignment = xla_client.DeviceAssignment.create(
        np.arange(devices).reshape(1, devices)
    )
    build.debug_options.xla_disable_hlo_passes = PARTITIONERS
    build.debug_options.xla_backend_optimization_level = 0
    device_list = xla_client.DeviceList(tuple(jax.devices()[:devices]))
    executable = jax.devices()[0].client.compile_and_load(
        stablehlo, device_list, options
    )
    results = executable.execute_sharded(arguments)
    by_result = results.disassemble_into_single_device_arrays()
    return [[np.asarray(array) for array in arrays] for arrays in by_result]


def shards(results: Any) -> list[list[np.ndarray]]:
    """Each result of a jitted function on each device, as `run` returns them."""
    by_result = []
    for leaf in jax.tree.leaves(results):
        ordered = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
        by_result.append([np.asarray(shard.data) for shard in ordered])
    return by_result


def difference(first: list[list[np.ndarray]], second: list[list[np.ndarray]]) -> float:
    """The largest difference, over the largest element of its result."""
    worst = 0.0
    for arrays, others in zip(first, second, strict=True):
        wide = np.stack([_wide(array) for array in arrays])
        other = np.stack([_wide(array) for array in others])
        alike = (wide == other) | (np.isnan(wide) & np.isnan(other))
        if np.all(alike):
            continue
        if not np.all(np.isfinite(wide[~alike]) & np.isfinite(other[~alike])):
            return float("inf")
        finite = np.abs(other[np.isfinite(other)])
        scale = max(float(np.max(finite, initial=0.0)), 1e-30)
        gap = float(np.max(np.abs(wide[~alike] - other[~alike])))
        worst = max(worst, gap / scale)
    return worst


def _wide(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return np.asarray(array, dtype=np.float64)
