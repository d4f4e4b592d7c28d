"""`shardfx convert` writes a checkpoint with other names, shapes, dtypes or files;
`shardfx clean` removes the incomplete checkpoints of saves that were killed. Parameters
are options, which their `help` texts explain.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp

from shardfx import MeshSpec, PathRules, TreeMap, checkpoint, plan, replicate

from ..._convert import bound, tree_structs
from ..._ground.text import array_text, bytes_text, plural, table
from .._load import load_model, made_of
from .._screen import JSON, answer, verb
from .._usage import UsageError, calling


_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@verb(
    examples=(
        "shardfx convert model-dir stacked --map my_model:STACKED",
        "shardfx convert model-dir small.safetensors --dtype bfloat16 --dry-run --json",
    )
)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option(
    "--map",
    "map_name",
    metavar="MAP",
    help="MODULE:NAME of a TreeMap, or a file with its JSON.",
)
@click.option("--inverse", is_flag=True, help="Take the map backwards; needs --like.")
@click.option(
    "--like",
    metavar="MODEL",
    help="What TO shall hold: a model or checkpoint, as other verbs name it.",
)
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    help="Cast all floating-point arrays on the way.",
)
@click.option("--overwrite", is_flag=True, help="Replace a file TO that exists.")
@click.option("--dry-run", is_flag=True, help="Only say what TO would hold.")
@JSON
def convert(
    source: str,
    target: str,
    map_name: str | None,
    inverse: bool,
    like: str | None,
    dtype: str | None,
    overwrite: bool,
    dry_run: bool,
    json_file: str | None,
) -> None:
    """Convert a checkpoint: change names, shapes, dtypes, files.

    FROM is any checkpoint that shardfx reads: safetensors, Orbax, zarr, eformer. TO is
    a directory for safetensors files, or one file NAME.safetensors. The command holds
    all arrays in memory once. Without --map, TO gets the arrays of FROM with the same
    names.
    """
    if inverse and (map_name is None or like is None):
        raise UsageError(
            "--inverse needs --map, and --like that says what there shall be"
        )
    if like is not None and map_name is None:
        raise UsageError("--like is for --map: without it, TO holds what FROM holds")
    _require_free(target, overwrite)
    tree_map = None if map_name is None else _map(map_name)
    if tree_map is not None and inverse:
        tree_map = tree_map.inverse()
    index = calling(f"reading {source!r}", lambda: checkpoint.read_index(source))
    structs = calling(f"reading {source!r}", lambda: checkpoint.structs(index))
    if dtype is not None:
        structs = jax.tree.map(lambda struct: _cast(struct, dtype), structs)
    like_tree = None if like is None else load_model(like).tree
    # What TO holds: a struct for each path.
    target_structs: Mapping[str, Any] = tree_structs(structs)
    if tree_map is not None:
        like_structs = None if like_tree is None else tree_structs(like_tree)
        target_structs = calling(
            "mapping", lambda: bound(tree_map, tree_structs(structs), like_structs)
        )
    if not dry_run:
        # Every leaf is replicated, so this process writes all of it. `load` and `save`
        # show their progress.
        mesh = MeshSpec({"device": 1}).build(jax.devices()[:1])
        whole_plan = plan(structs, mesh, paths=PathRules([(".*", replicate)]))
        load_dtype = None if dtype is None else jnp.dtype(dtype)
        tree = calling(
            "reading", lambda: checkpoint.load(index, whole_plan, dtype=load_dtype)
        )
        options = {"map": tree_map, "like": like_tree, "overwrite": overwrite}
        calling(
            f"writing {target!r}",
            lambda: checkpoint.save(target, tree, whole_plan, **options),
        )
    _answer(json_file, target, target_structs, dry_run=dry_run)


def _answer(
    json_file: str | None,
    target: str,
    structs: Mapping[str, Any],
    *,
    dry_run: bool,
) -> None:
    """Prints the arrays that are written to `target`, or that would be in a `dry_run`,
    or writes them as JSON. `structs` has a ShapeDtypeStruct for each path.
    """
    total_bytes = 0
    arrays = []
    cells = [("path", "array")]
    for path, leaf in structs.items():
        total_bytes += math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
        arrays.append({"path": path, "shape": leaf.shape, "dtype": str(leaf.dtype)})
        cells.append((path, array_text(leaf.dtype, leaf.shape)))
    written = target
    end = f", written to {target}."
    if dry_run:
        written = None
        end = f" would be written to {target}."
    count_text = plural(len(structs), "array")
    total_line = f"{count_text}, {bytes_text(total_bytes)}{end}"
    lines = [*table(cells, right=()), "", total_line]
    data = {"written": written, "bytes": total_bytes, "arrays": arrays}
    answer(json_file, lambda: "\n".join(lines), lambda: data)


def _require_free(target: str, overwrite: bool) -> None:
    """Raises `UsageError` if the path `target` exists and may not be replaced, before
    anything is read. A directory is never replaced.
    """
    if not os.path.lexists(target):
        return
    is_file = target.endswith(".safetensors") and not os.path.isdir(target)
    if is_file and overwrite:
        return
    fix = "pass `--overwrite` to replace it" if is_file else "name another TO"
    raise UsageError(
        f"{target!r} exists, and nothing was changed; {fix}, or remove it first"
    )


def _map(name: str) -> TreeMap:
    """The TreeMap in a JSON file, or that MODULE:NAME is or makes."""
    if os.path.isfile(name) and not name.endswith(".py"):
        return calling(
            f"reading {name!r}",
            lambda: TreeMap.from_json(Path(name).read_text(encoding="utf-8")),
        )
    return made_of(name, TreeMap, "a TreeMap, or a function that makes one")


def _cast(struct: jax.ShapeDtypeStruct, dtype: str) -> jax.ShapeDtypeStruct:
    """The struct with another dtype, if its own is one of floating point."""
    if jnp.issubdtype(struct.dtype, jnp.floating):
        return jax.ShapeDtypeStruct(struct.shape, jnp.dtype(dtype))
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype)


@verb(examples=("shardfx clean .", "shardfx clean . --remove"))
@click.argument("directory", metavar="DIRECTORY")
@click.option("--remove", is_flag=True, help="Remove what is found.")
@click.option(
    "--older-than",
    "older_than_seconds",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Only what nothing was written to for so long.",
)
@JSON
def clean(
    directory: str,
    remove: bool,
    older_than_seconds: float,
    json_file: str | None,
) -> None:
    """List or remove the incomplete checkpoints of killed saves.

    A save writes to .NAME.partial-... in DIRECTORY and renames it at the end. If a save
    is killed, this directory or file remains.
    """
    left_over = calling(
        f"looking at {directory!r}",
        lambda: checkpoint.left_over(
            directory,
            older_than_seconds=older_than_seconds,
            remove=remove,
        ),
    )
    state = "removed" if remove else "left over"
    cells = [(state, "bytes", "age")]
    for path in left_over:
        age = f"{path.age_seconds / 3600:.1f} h"
        cells.append((path.path, bytes_text(path.nbytes), age))
    lines = table(cells, right={"bytes", "age"})
    text = "\n".join(lines) if left_over else "nothing is left over"
    answer(json_file, lambda: text, lambda: list(left_over))
