"""Saving: shards are written in parallel under a temporary name, which is renamed to the target when all of them are
complete.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools as ft
import itertools as it
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .._convert import TreeMap
from .._ground.boxes import Box, slices
from .._ground.errors import CheckpointError, LeafTypeError, check_type
from .._plan import ShardPlan
from . import _safetensors as safetensors
from ._entry import fill
from ._files import inside, place, read_json
from ._flight import Progress
from ._index import read_index, require_local
from ._leaves import Leaves, exported, leaves_to_save, plan_of_arrays, plan_of_nothing, shards_of
from ._metadata import NUMBERS_KEY, to_text
from ._reader import COPY_BYTES, RUN_BYTES, copied_out
from ._spans import grouped, spans
from ._staging import PLAN, Headers, begin, commit, remove_partial, require_free, require_space
from ._together import Together, digest_of, holders_of, lines_of, meeting


PLAN_KEY = "shardfx.plan"
_NO_PLAN = "holds no plan: `checkpoint.save` writes one, unless by a map, or of arrays on no mesh or on several."
_FILE_BYTES = 5 * 10**9
_WORKERS = 4
# The number of bytes after which a save checks whether another process has failed.
_STEP_BYTES = 16 << 20
_WAIT_SECONDS = 25.0


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One array to write, and its position in a file."""

    name: str
    value: Any
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        return _nbytes(self.value)


def save(
    path: str | os.PathLike[str],
    tree: object,
    plan: ShardPlan | None = None,
    *,
    map: TreeMap | None = None,
    like: object = None,
    overwrite: bool = False,
    file_bytes: int = _FILE_BYTES,
    progress: bool | None = None,
    wait_seconds: float = _WAIT_SECONDS,
) -> None:
    """Writes the arrays of a tree as safetensors, with their plan.

    All files are written under a temporary name beside `path`, flushed to the disk, and renamed at the end. A process
    that is killed before leaves what was there unchanged, and of two writers one gets an error. Every process that owns
    a device of the arrays must call this with the same arguments, and `path` must be on a shared file system; each
    process writes its replica-0 shards. An error in one process is raised in all of them.

    **Arguments:**

    - `path`: the directory to make, which must not exist; or a file that ends in `.safetensors`.
    - `tree`: the planned tree, of JAX arrays, or of NumPy arrays that are equal on all processes. All processes save a
        tree of NumPy arrays alone together, too. PRNG keys are saved with the name of their implementation, and
        Python's numbers, a step counter for one, in the file's metadata. Other leaves that are no arrays, functions and
        strings, are not saved.
    - `plan`: its plan. The arrays are written as they are placed, whether that is by this plan or not. Without one, the
        plan that is written says how they lie; arrays on different meshes get none.
    - `map`: a [`shardfx.TreeMap`][] that makes the arrays of another layout from the tree's. Those are written, under
        its names, as Hugging Face's libraries read them, and without the plan, which is the tree's. Each process writes
        the values of its own shards, so that no array is ever assembled in one process.
    - `like`: for a map that goes backwards, as `map.inverse()` does: a tree of structs of what is to be written,
        `checkpoint.structs(index)` of the checkpoint that was read, for one.
    - `overwrite`: replace the file, at once and as a whole, if it exists. A directory cannot be replaced so: save
        to a new name, then remove the old one.
    - `file_bytes`: a directory gets a further file where one would get larger than this.
    - `progress`: whether to show a line on stderr; by default if that is a terminal.
    - `wait_seconds`: seconds that the processes wait for one that has not called this yet. A process that has called
        it, and then fails or dies, is noticed within 30 seconds, however long the others wait.

    **Raises:**

    `MapError` with all problems of a map that does not fit; `PlanMismatchError` if the tree is not the planned one;
    `LeafTypeError` for a dtype that safetensors cannot hold, for leaves that a map scales, or for a dtype whose values
    `load` could not return under this plan (NumPy's int64 where the plan has int32); `CheckpointError` if `path`
    exists, or if another process, which is named, failed, died, did not come, or has other arguments; `OSError` with
    the path if the disk is full or cannot be written. After each of these errors, what was at `path` before is still
    there.

    !!! Example

        ```python
        import tempfile
        import jax
        import jax.numpy as jnp
        import shardfx
        from shardfx import MeshSpec, PathRules, checkpoint

        tree = {"w": jnp.ones((64, 8), jnp.bfloat16)}
        made = shardfx.plan(
            tree, MeshSpec({"fsdp": 8}).build(jax.devices()), paths=PathRules.parse("w->fsdp")
        )
        directory = tempfile.mkdtemp() + "/step-1"
        checkpoint.save(directory, shardfx.shard(tree, made), made)
        assert checkpoint.saved_plan(directory).digest == made.digest
        ```
    """
    content = ft.partial(content_of, tree, plan, map, like)
    write(path, holders_of(tree), content, wait_seconds, progress, overwrite, file_bytes)


@dataclasses.dataclass(frozen=True)
class SavedContent:
    """The content of a save.

    **Arguments:**

    - `leaves`: the arrays and numbers.
    - `lines`: lines for the processes to compare.
    - `given`: the digests of the arguments that say what is written.
    - `plan`: the plan of the written arrays, if there is one.
    - `metadata`: for the headers of all files.
    """

    leaves: Leaves
    lines: Sequence[str]
    given: Mapping[str, str]
    plan: ShardPlan | None
    metadata: Mapping[str, str]


def content_of(tree: object, plan: ShardPlan | None, map: TreeMap | None, like: object) -> SavedContent:
    """The content that `save` writes of a tree."""
    if plan is not None:
        check_type(
            "plan", plan, ShardPlan, LeafTypeError, "give what `shardfx.plan(tree, mesh, ...)` makes, or no plan"
        )
    own = plan_of_arrays(tree) if plan is None else plan
    leaves = leaves_to_save(tree, plan_of_nothing(tree) if own is None else own)
    lines = lines_of(leaves.arrays)
    if map is not None:
        leaves = exported(leaves, map, like)
        lines += lines_of(leaves.arrays)
    numbers = to_text(leaves.numbers)
    lines.append(f"the numbers are {numbers}")
    digests = ["None" if one is None else one.digest for one in (map, own)]
    given = {"map": digests[0], "leaves": digest_of(lines), "plan": digests[1]}
    if map is not None:
        return SavedContent(leaves, lines, given, None, {"format": "pt"})
    plan_digest = {} if own is None else {PLAN_KEY: own.digest}
    return SavedContent(leaves, lines, given, own, plan_digest | {NUMBERS_KEY: numbers})


def write(
    path: str | os.PathLike[str],
    holders: tuple[int, ...],
    content: Callable[[], SavedContent],
    wait_seconds: float,
    progress: bool | None,
    overwrite: bool = False,
    file_bytes: int = _FILE_BYTES,
) -> bool:
    """Writes the given content with the other processes, and returns whether this process is the first of them."""
    what = repr(os.fspath(path) if isinstance(path, os.PathLike) else path)[:500]
    with contextlib.ExitStack() as afterwards, meeting(what, holders, wait_seconds) as together:
        together.join()
        path = os.path.abspath(require_local(os.fspath(path)))
        found, is_file = content(), path.endswith(".safetensors")
        given = {"path": repr(path), "overwrite": repr(bool(overwrite)), "file_bytes": repr(file_bytes)}
        token = together.agree(given | dict(found.given), found.lines)
        staging = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.partial-{token}")
        text = None if found.plan is None else found.plan.to_json()
        extra = dict(found.metadata) | ({PLAN_KEY: text} if is_file and text is not None else {})
        headers, tensors = _layout(found.leaves, staging, extra, None if is_file else file_bytes)
        if together.is_first:
            # After a commit nothing has this name any more.
            afterwards.callback(remove_partial, staging)

        def prepare() -> None:
            require_free(path, is_file, overwrite)
            require_space(path, headers)
            begin(staging, headers, is_file, text)

        together.alone(prepare)
        total = sum(tensor.nbytes for tensor in tensors)
        wrote = _write_all(tensors, Progress("saving", total, progress), together, afterwards)
        together.finish(wrote, total, lambda: commit(staging, path, is_file, overwrite))
        return together.is_first


def saved_plan(path: str | os.PathLike[str], like: object = None) -> ShardPlan:
    """The plan that `save` wrote with a checkpoint.

    **Arguments:**

    - `path`: the path that was given to `save`.
    - `like`: as in [`shardfx.ShardPlan.from_json`][].

    **Returns:**

    The plan, without devices; place it on devices with [`shardfx.ShardPlan.on`][].

    **Raises:**

    `CheckpointError` if there is no plan, `PlanFormatError` if it is damaged.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        where = place(path, None)
        if not os.path.exists(os.path.join(path, PLAN)):
            raise CheckpointError(f"{path!r} {_NO_PLAN}")
        # The text is first parsed as untrusted JSON, then by the plan's own reader.
        return ShardPlan.from_json(json.dumps(read_json(where, inside(where, PLAN))), like)
    text = read_index(path).metadata.get(PLAN_KEY)
    if text is None:
        raise CheckpointError(f"{path!r} {_NO_PLAN}")
    return ShardPlan.from_json(text, like)


def _layout(
    leaves: Leaves, staging: str, extra: dict[str, str], file_bytes: int | None
) -> tuple[Headers, list[_Tensor]]:
    """For each file its header, size and tensor names; and the position of each tensor. It is the same on
    every process.
    """
    most = float("inf") if file_bytes is None else file_bytes
    groups = list(grouped(leaves.arrays, lambda row: _nbytes(row[1]), most)) or [[]]
    headers, tensors = {}, []
    for number, group in enumerate(groups):
        file = staging if file_bytes is None else os.path.join(staging, _file_name(number, len(groups)))
        other = {name: leaves.kinds[name] for name, _ in group if name in leaves.kinds}
        metadata = extra | ({safetensors.DTYPES_KEY: json.dumps(other)} if other else {})
        header, offsets = safetensors.write_header(group, metadata)
        headers[file] = (header, len(header) + sum(_nbytes(value) for _, value in group), [name for name, _ in group])
        tensors += [_Tensor(*row, file, offset) for row, offset in zip(group, offsets, strict=True)]
    return headers, tensors


def _nbytes(value: Any) -> int:
    return math.prod(value.shape) * value.dtype.itemsize


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def _write_all(tensors: list[_Tensor], bar: Progress, together: Together, afterwards: contextlib.ExitStack) -> int:
    """Writes this process's shards, and returns the number of bytes that all processes wrote.

    After an error, the caller waits `afterwards` for the writes that have begun, so that the other processes learn of
    it first.
    """
    files: dict[str, int] = {}
    for file in dict.fromkeys(tensor.file for tensor in tensors):
        files[file] = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        afterwards.callback(os.close, files[file])
    pool, stop = concurrent.futures.ThreadPoolExecutor(_WORKERS, "shardfx-save"), threading.Event()
    afterwards.callback(pool.shutdown, wait=True, cancel_futures=True)
    afterwards.callback(stop.set)
    # Tensors that are small together: one thread task for each would cost more.
    by_file = it.groupby(tensors, lambda one: one.file)
    groups = [group for _, own in by_file for group in grouped(own, lambda one: one.nbytes, COPY_BYTES)]
    writes = [pool.submit(_write, files[group[0].file], group, together.is_first, stop) for group in groups]
    wrote = together.attend(writes, bar.advance)
    together.attend([pool.submit(os.fsync, file) for file in files.values()])
    bar.end()
    return wrote


def _write(descriptor: int, tensors: Sequence[_Tensor], is_first: bool, stop: threading.Event) -> int:
    """Writes this process's shards of consecutive tensors, with one call for those of which it holds everything."""
    if len(tensors) == 1:
        return _write_parts(descriptor, tensors[0], list(shards_of(tensors[0].value, is_first)), stop)
    begin, runs, written = tensors[0].offset, list[slice](), 0
    memory = np.empty(tensors[-1].offset + tensors[-1].nbytes - begin, np.uint8)
    for tensor in tensors:
        pieces = list(shards_of(tensor.value, is_first))
        if sum([values.size for _, values in pieces]) < math.prod(tensor.value.shape):
            # Another process writes the rest of the tensor.
            written += _write_parts(descriptor, tensor, pieces, stop)
            continue
        at = tensor.offset - begin
        _put_together(np.ndarray(tensor.value.shape, tensor.value.dtype, memory.data, at), pieces, tensor.name)
        start = runs.pop().start if runs and runs[-1].stop == at else at
        runs.append(slice(start, at + tensor.nbytes))
    for run in runs:
        _write_at(descriptor, memory[run], begin + run.start, stop)
        written += run.stop - run.start
    return written


def _put_together(whole: np.ndarray, pieces: Sequence[tuple[Box, np.ndarray]], name: str) -> None:
    for box, values in pieces:
        part = whole[(*[slice(low, high) for low, high in box], ...)]
        if values.dtype == whole.dtype:
            part[...] = values
        else:
            fill(part, values, name)


def _write_parts(
    descriptor: int, tensor: _Tensor, pieces: Sequence[tuple[Box, np.ndarray]], stop: threading.Event
) -> int:
    boxes, values = [box for box, _ in pieces], [value for _, value in pieces]
    shape, dtype, written = tensor.value.shape, tensor.value.dtype, 0
    # The gaps between the pieces are never written, since another process may have written them already.
    limits = {"gap_bytes": 1, "run_bytes": RUN_BYTES, "copy_bytes": COPY_BYTES}
    for span in spans(shape, dtype.itemsize, boxes, **limits):
        views = [values[part.number][slices(part.where, boxes[part.number])] for part in span.parts]
        if span.is_direct and len(views) == 1 and views[0].flags.c_contiguous and views[0].dtype == dtype:
            out = views[0].reshape(-1).view(np.uint8)
        else:
            out = copied_out(views, span, dtype, tensor.name)
        for run in range(span.runs):
            piece = out[run * span.run_bytes : (run + 1) * span.run_bytes]
            _write_at(descriptor, piece, tensor.offset + span.offset + run * span.step, stop)
        written += span.nbytes
    return written


def _write_at(descriptor: int, data: np.ndarray, offset: int, stop: threading.Event) -> None:
    left = memoryview(data.data)
    while len(left) and not stop.is_set():
        done = os.pwrite(descriptor, left[:_STEP_BYTES], offset)
        left, offset = left[done:], offset + done
