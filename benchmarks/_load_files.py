"""The suite `load`: the checkpoint and the plans of it."""

import atexit
import functools as ft
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from shardfx import PathRules, ShardPlan, plan


COUNT = 128
CUTS = {"rows": P("x"), "columns": P(None, "x"), "replicated": P()}


def _shapes(mebibytes: int) -> dict[str, tuple[tuple[int, int], Any]]:
    """Tensors of three sizes, half of them bfloat16, half float32, that sum up to about
    `mebibytes`.
    """
    shapes = {}
    unit = mebibytes * 2**20 // COUNT
    for number in range(COUNT):
        if number % 2:
            dtype = jnp.bfloat16
        else:
            dtype = np.float32
        nbytes = unit * (1, 2, 3, 2)[number % 4] // 2
        columns = 4096 if mebibytes >= 1024 else 1024
        rows = max(8, nbytes // (columns * np.dtype(dtype).itemsize) // 8 * 8)
        shapes[f"layers.{number}.weight"] = ((rows, columns), dtype)
    return shapes


@ft.lru_cache(maxsize=4)
def checkpoint_folder(mebibytes: int) -> Path:
    """A folder with the same arrays as safetensors, and as flax and Orbax write them
    once they are asked for.
    """
    from safetensors.numpy import save_file

    folder = Path(tempfile.mkdtemp(prefix="shardfx-load-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    random = np.random.default_rng(0)
    arrays = {
        name: (
            random.integers(
                0, 2**14, (*shape, np.dtype(dtype).itemsize // 2), np.uint16
            )
            .view(dtype)
            .reshape(shape)
        )
        for name, (shape, dtype) in _shapes(mebibytes).items()
    }
    save_file(arrays, folder / "model.safetensors")
    return folder


def plan_of_cut(
    mebibytes: int, cut: str, devices: list[Any], dtype: Any = None
) -> ShardPlan:
    structs = {
        name: jax.ShapeDtypeStruct(shape, dtype or stored_dtype)
        for name, (shape, stored_dtype) in _shapes(mebibytes).items()
    }
    mesh = Mesh(np.array(devices), ("x",))
    rules = PathRules([(".*", CUTS[cut])])
    return plan(structs, mesh, paths=rules)


def read_through(path: Path) -> None:
    """Reads the files through, so that they are in the page cache."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            with open(file, "rb") as opened:
                while opened.read(2**24):
                    pass


def file_bytes(mebibytes: int) -> int:
    return sum(
        int(np.prod(shape)) * np.dtype(dtype).itemsize
        for shape, dtype in _shapes(mebibytes).values()
    )
