"""What a program of a fault is, and how far it is from the same program on one device."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


# Rounding explains less.
CLOSE = 1e-4
# Programs that run once need not be fast, and the partitioner runs all the same.
_QUICKLY: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


class Case(NamedTuple):
    """A function, its arguments, the sizes of the mesh axes, and a spec for each
    argument. `result` is the spec of the results; `None` if the compiler chooses.

    `step` takes the mesh and returns the function, which may constrain arrays over it.
    """

    step: Callable[[Mesh], Callable[..., Any]]
    args: tuple[np.ndarray, ...]
    mesh: Mapping[str, int]
    specs: tuple[PartitionSpec, ...]
    result: PartitionSpec | None = None


class Fault(NamedTuple):
    """The cases that were wrong with some JAX, and the same ones with what mends them,
    by name.
    """

    wrong: Mapping[str, Case]
    mended: Mapping[str, Case]


def apart(case: Case) -> float:
    """The norm of the difference to one device, as a share of the norm of the right
    result; the largest of all results.
    """
    devices = np.array(jax.devices()[:1]).reshape([1] * len(case.mesh))
    alone = Mesh(devices, tuple(case.mesh))
    whole = jax.jit(case.step(alone), compiler_options=_QUICKLY)(*case.args)
    jitted, *_ = placed(case)
    leaves = jax.tree.leaves(jitted(*case.args))
    pairs = zip(leaves, jax.tree.leaves(whole), strict=True)
    return max(_share(np.asarray(ours), np.asarray(right)) for ours, right in pairs)


def placed(case: Case) -> tuple[Any, ...]:
    """The jitted function of a case on its mesh, and structs of its arguments."""
    count = math.prod(case.mesh.values())
    devices = np.array(jax.devices()[:count]).reshape([*case.mesh.values()])
    mesh = Mesh(devices, tuple(case.mesh))
    shardings = tuple(NamedSharding(mesh, spec) for spec in case.specs)
    if case.result is None:
        result = None
    else:
        result = NamedSharding(mesh, case.result)
    jitted = jax.jit(
        case.step(mesh),
        in_shardings=shardings,
        out_shardings=result,
        compiler_options=_QUICKLY,
    )
    structs = [
        jax.ShapeDtypeStruct(array.shape, _dtype_of(array), sharding=sharding)
        for array, sharding in zip(case.args, shardings, strict=True)
    ]
    return jitted, *structs


def _dtype_of(array: np.ndarray) -> Any:
    """The dtype that JAX gives an array, which may be long and have no memory."""
    return jnp.asarray(np.empty(0, array.dtype)).dtype


def _share(ours: np.ndarray, right: np.ndarray) -> float:
    difference = np.linalg.norm(ours.astype(np.float64) - right)
    largest = max(np.linalg.norm(right.astype(np.float64)), 1e-12)
    return float(difference / largest)


def normal(seed: int, *shape: int) -> np.ndarray:
    """Random numbers, without a program of JAX."""
    numbers = 0.2 * np.random.default_rng(seed).standard_normal(shape)
    return numbers.astype(np.float32)


def main(fault: Fault) -> None:
    """Prints each case, and exits with 1 if one that is not mended is wrong."""
    wrong = {name: apart(case) for name, case in fault.wrong.items()}
    mended = {name: apart(case) for name, case in fault.mended.items()}
    for name, share in (wrong | mended).items():
        print(f"JAX {jax.__version__}: {name}: {share:.1e}")
    sys.exit(max(wrong.values()) > CLOSE)


def emulate() -> None:
    """Eight devices on any machine; ahead of the first array."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
