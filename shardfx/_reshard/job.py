"""What there is to do for the leaves of a tree that change their shardings alone."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from .._ground.boxes import Box, volume
from .._ground.errors import LeafTypeError, MeshError, SpecError
from .destinations import is_array, leaf_name
from .ends import has_devices, require_movable, require_reduced
from .flight import Job
from .move import Move, balanced, move_of


def job_of(
    rows: Sequence[tuple[int, Any, Sharding | None]],
    path_of: Callable[[int], str],
    lost: tuple[Any, ...] = (),
    copies: bool = True,
) -> Job:
    """Finds the move of every leaf, before any is made; what is wrong with one raises with its path.

    **Arguments:**

    - `rows`: the number of each leaf, the leaf, and where it shall lie: `None` where it is to be left alone.
    - `path_of`: the path of a leaf.
    - `lost`, `copies`: as of `move_of`.
    """
    known: dict[Any, Move] = {}
    job = Job(path_of, {}, [], [], {}, set(), copies)
    for at, leaf, target in rows:
        if target is None or not is_array(leaf):
            job.kept.add(id(leaf))
            continue
        with naming(lambda at=at: path_of(at)):
            if not isinstance(leaf, jax.Array):
                _require_devices(target)
                require_movable(leaf.shape, leaf.dtype, target)
                require_reduced(target)
                job.placements.append((at, leaf, target))
                continue
            key = (leaf.sharding, target, leaf.shape, leaf.dtype)
            move = known.get(key)
            if move is None:
                move = known[key] = _move(leaf, target, lost, copies)
        if move.how == "in place" and leaf.committed:
            job.kept.add(id(leaf))
        else:
            job.moves.setdefault(move, []).append((at, leaf))
    chosen = balanced({move: len(places) for move, places in job.moves.items()})
    return dataclasses.replace(job, moves={chosen[move]: places for move, places in job.moves.items()})


def _move(leaf: jax.Array, target: Sharding, lost: tuple[Any, ...], copies: bool) -> Move:
    _require_devices(target)
    move = move_of(leaf.shape, leaf.dtype, leaf.sharding, target, lost, copies)
    if move.work is not None and move.work.cuts.missing:
        raise MeshError(f"{_lost_text(move, move.work.cuts.missing)}; load it from a checkpoint.")
    return move


def _require_devices(target: Sharding) -> None:
    if isinstance(target, NamedSharding) and not has_devices(target):
        raise MeshError(
            f"the target {target.spec} lies on the mesh {dict(target.mesh.shape)} without devices; "
            "use `plan.on(plan.mesh.build(jax.devices()))`, or a NamedSharding on a `jax.sharding.Mesh`."
        )


def _lost_text(move: Move, missing: Sequence[Box]) -> str:
    """Which elements no device holds that is left."""
    first = ", ".join(f"{start}:{stop}" for start, stop in missing[0])
    count = sum(map(volume, missing))
    return f"{count} of {math.prod(move.shape)} elements are on lost devices only, the first of them [{first}]"


@contextlib.contextmanager
def naming(path: Callable[[], str]) -> Iterator[None]:
    """Puts the leaf's path before what is wrong with it."""
    try:
        yield
    except (SpecError, MeshError, LeafTypeError) as error:
        raise type(error)(f"{leaf_name(path())}: {error}") from error
