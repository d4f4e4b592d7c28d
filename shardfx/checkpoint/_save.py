"""Saving: shards are written in parallel under a temporary name, which is renamed to
the target when all of them are complete.

`is_first` tells a process whether it is the first of those that save. It alone writes
NumPy arrays and the constants of a map, which all processes have.
"""

import contextlib
import errno
import functools as ft
import os
from collections.abc import Callable, Iterator, Mapping

import jax
from jax.core import Tracer

from .._convert import TreeMap, check_map
from .._ground.errors import (
    CheckpointError,
    LeafTypeError,
    MapError,
    bytes_or_none,
    check_type,
)
from .._ground.misuse import called
from .._ground.processes import coordination
from .._plan import ShardPlan
from . import _safetensors as safetensors
from ._address import Address, Where, address_of, shown
from ._coordination import SaveProcesses, digest_of, holders_of, lines_of
from ._leaves import (
    Leaves,
    exported,
    leaves_to_save,
    plan_of_arrays,
)
from ._metadata import NUMBERS_KEY, to_text
from ._object_saves import OBJECT_BYTES, save_objects
from ._objects import TIMEOUT_SECONDS, ObjectPlace
from ._reader import Progress
from ._saved_content import SavedContent, WriteOptions, array_bytes
from ._spans import ranges_of
from ._staging import NewFile, commit, create_files, remove_partial
from ._tensor_writes import Tensors, begin_writes


_FILE_BYTES = 5 * 10**9
_WAIT_SECONDS = 25.0


@called(
    "save(path, tree, plan)",
    step="`Manager(directory).save(step, tree, plan)`",
    force="`overwrite=True`",
)
def save(
    path: Where,
    tree: object,
    plan: ShardPlan | None = None,
    *,
    map: TreeMap | None = None,
    like: object = None,
    overwrite: bool = False,
    file_bytes: int | None = None,
    progress: bool | None = None,
    wait_seconds: float = _WAIT_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> None:
    """Writes the arrays of a tree as safetensors, with their plan.

    All files are written under a temporary name beside `path`, flushed to the disk, and
    renamed at the end. Until then an older file at `path` stays unchanged, also after
    an error. If two saves to a new `path` run at the same time, one of them gets an
    error.

    Every process that owns a device of the arrays must call `save` with the same
    arguments, and `path` must be on a shared file system. If several devices hold the
    same shard, the process of the first of them writes it. An error in one process is
    raised in all of them.

    In a store, such as `gs://bucket/step-100`, the files get a name that no other save
    has. An index is written last, with the condition that there is none, and makes the
    checkpoint exist. Each process writes files of its own; an array that is spread over
    processes, or larger than `file_bytes`, is written in parts.

    **Arguments:**

    - `path`: the directory to make, which must not exist; or a file that ends in
      `.safetensors`; or the address of either in a store.
    - `tree`: the planned tree, of JAX arrays, or of NumPy arrays that are equal on all
      processes. If it holds NumPy arrays only, every process must call `save`. PRNG
      keys are saved with the name of their implementation. Python's numbers, such as a
      step counter, are saved in the file's metadata. Functions, classes, dtypes and
      enumeration members are not saved, and of an Equinox module nothing beside: they
      are made again with the tree. Any other leaf, such as a text, is an error.
    - `plan`: the tree's plan. The arrays are written in the shardings that they have,
      even if the plan has others. Without `plan`, the arrays' own shardings are saved
      as a plan, if they are on one mesh.
    - `map`: a [`shardfx.TreeMap`][] that makes the arrays of another layout, such as
      that of Hugging Face's libraries, from the tree's arrays. The results are written
      under the names of that layout, without a plan. Each process writes the values of
      its own shards. Python's numbers that the map does not copy are left out.
    - `like`: for an inverse map: a tree of structs of the arrays to write, such as
      `checkpoint.structs(index)` of the checkpoint that was read.
    - `overwrite`: whether to replace an existing file. A directory cannot be replaced:
      save to a new name, then remove the old directory.
    - `file_bytes`: the size above which the arrays of a directory are divided into
      several files, by default 5 GB on a disk and 32 MiB in a store.
    - `progress`: whether to show a progress line on stderr; `None` shows it if stderr
      is a terminal.
    - `wait_seconds`: seconds that the processes wait for a process that has not called
      `save` yet. A process that fails or dies later is noticed within 30 seconds.
    - `timeout_seconds`: for a store, seconds after which a request that is not answered
      is an error, its repetitions included. A request sends up to `file_bytes`.

    **Raises:**

    - `MapError` with all problems of a map that does not fit, and for `like` without a
      map.
    - `PlanMismatchError` if the tree is not the planned one.
    - `LeafTypeError` for a dtype that safetensors cannot hold, for leaves that a map
      scales, or for a dtype that `load` could not return under this plan, such as
      NumPy's int64 where the plan has int32.
    - `CheckpointError` if `path` exists, for a leaf that would be lost, for `file_bytes`
      and a path that is one file, or with the number of another process that failed,
      died, did not call `save`, or has other arguments.
    - `OSError` with the path if the disk is full or cannot be written.

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
    _require_values(tree)
    content = ft.partial(content_of, tree, plan, map, like)
    options = WriteOptions(
        wait_seconds=wait_seconds,
        progress=progress,
        overwrite=overwrite,
        file_bytes=file_bytes,
        timeout_seconds=timeout_seconds,
    )
    write(path, holders_of(tree), content, options)


def _require_values(tree: object) -> None:
    """Raises `LeafTypeError` for a plan and for traced arrays, which have no values."""
    if isinstance(tree, ShardPlan):
        raise LeafTypeError(
            "the tree is a plan, which has no arrays: write `save(path, tree, plan)`;"
            " `plan.to_json()` is the text of a plan."
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        raise LeafTypeError(
            "`save` is called inside `jax.jit`, where arrays have no values: save what"
            " the jitted function returns."
        )


def content_of(
    tree: object,
    plan: ShardPlan | None,
    map: TreeMap | None,
    like: object,
) -> SavedContent:
    """The content of a save of `tree`: its arrays, or with `map`, the arrays that the
    map makes of them.

    **Arguments:**

    - `tree`: a tree of JAX or NumPy arrays.
    - `plan`: the tree's plan; `None` for the plan with the arrays' own shardings, if
      they are on one mesh.
    - `map`: the map, or `None`. The content has no plan if a map is given.
    - `like`: a tree with the shapes and dtypes of the arrays that the map makes; `None`
      if they follow from the map.
    """
    if plan is not None:
        check_type(
            what="plan",
            value=plan,
            expected=ShardPlan,
            error=LeafTypeError,
            fix="give what `shardfx.plan(tree, mesh, ...)` makes, or no plan",
        )
    check_map(map)
    if like is not None and map is None:
        raise MapError(
            "`like` says which arrays `map` makes, and there is no map: write"
            " `save(path, tree, plan, map=map, like=like)`, or leave `like` out."
        )
    tree_plan = plan
    if tree_plan is None:
        tree_plan = plan_of_arrays(tree)
    leaves = leaves_to_save(tree, tree_plan)
    # Nothing compares the lines of a process that is alone.
    has_others = jax.process_count() > 1
    lines = lines_of(leaves.arrays) if has_others else []
    if map is not None:
        leaves = exported(leaves, map, like)
        if has_others:
            lines += lines_of(leaves.arrays)
    numbers = to_text(leaves.numbers)
    lines.append(f"the numbers are {numbers}")
    metadata: dict[str, str] = {}
    if map is not None:
        metadata["format"] = "pt"
    elif tree_plan is not None:
        metadata[safetensors.PLAN_KEY] = tree_plan.digest
    if map is None or leaves.numbers:
        metadata[NUMBERS_KEY] = numbers
    return SavedContent(
        leaves=leaves,
        lines=lines,
        digests={
            "map": _short_digest(map),
            "leaves": digest_of(lines),
            "plan": _short_digest(tree_plan),
        },
        plan=tree_plan if map is None else None,
        metadata=metadata,
    )


def _short_digest(value: TreeMap | ShardPlan | None) -> str:
    if value is None:
        return "nothing"
    return value.digest[:12]


def write(
    path: Where,
    holders: tuple[int, ...],
    content: Callable[[], SavedContent],
    options: WriteOptions,
) -> bool:
    """Writes the result of `content` to `path`, together with the other processes in
    `holders`. If `content` raises, all of them raise.

    Returns whether this process is the first of them.
    """
    shown_path = shown(path)
    save_processes = SaveProcesses(
        target=shown_path,
        me=jax.process_index(),
        members=holders,
        client=coordination(),
        wait_seconds=options.wait_seconds,
    )
    with (
        contextlib.ExitStack() as afterwards,
        save_processes as processes,
        _with_path_in_errors(shown_path),
    ):
        # Here the other processes hear of a wrong path, too.
        if not isinstance(path, str | os.PathLike | Mapping):
            raise LeafTypeError(
                f"`path` must be a text or a `pathlib.Path`, not {type(path).__name__};"
                " write `save(path, tree, plan)`, the path first."
            )
        target = address_of(path)
        is_store = isinstance(target, Address)
        name = target.shown if is_store else os.path.abspath(target)
        file_bytes = bytes_or_none("file_bytes", options.file_bytes)
        if file_bytes is not None and not is_store and _is_file(name):
            raise CheckpointError(
                f"`file_bytes={file_bytes}` divides the arrays of a directory, and this"
                " is one file: give a path without `.safetensors`, or leave"
                " `file_bytes` out."
            )
        if file_bytes is None:
            file_bytes = OBJECT_BYTES if is_store else _FILE_BYTES
        saved = content()
        compared = {
            "path": repr(name),
            "overwrite": repr(bool(options.overwrite)),
            "file_bytes": repr(file_bytes),
            **saved.digests,
        }
        token = processes.compare(compared, saved.lines)
        bar = Progress(verb="saving", total_bytes=saved.nbytes, show=options.progress)
        if is_store:
            place = ObjectPlace(target, options.timeout_seconds)
            write_content = ft.partial(save_objects, place)
        else:
            write_content = ft.partial(_write_files, name)
        write_content(
            processes=processes,
            afterwards=afterwards,
            content=saved,
            overwrite=options.overwrite,
            file_bytes=file_bytes,
            token=token,
            advance=bar.advance,
        )
        bar.end()
        return processes.is_first


def _is_file(path: str) -> bool:
    """Whether a save to this path of a disk makes one file, not a directory."""
    return path.endswith(".safetensors")


def _write_files(
    path: str,
    processes: SaveProcesses,
    afterwards: contextlib.ExitStack,
    content: SavedContent,
    overwrite: bool,
    file_bytes: int,
    token: str,
    advance: Callable[[int], None],
) -> None:
    """Writes the content of a save to a file or a directory. `token` is a text that no
    other save has. `afterwards` is closed at the end of the save, once the other
    processes know of an error. `advance` is called with the bytes of each write.
    """
    is_file = _is_file(path)
    parent, name = os.path.split(path)
    staging = os.path.join(parent, f".{name}.partial-{token}")
    metadata = dict(content.metadata)
    if is_file and content.plan_text is not None:
        metadata[safetensors.PLAN_KEY] = content.plan_text
    files, tensors = _layout(
        leaves=content.leaves,
        staging=staging,
        extra=metadata,
        file_bytes=None if is_file else file_bytes,
    )
    if processes.is_first:
        # After a commit nothing has this name any more.
        afterwards.callback(remove_partial, staging)

    make_files = ft.partial(
        create_files,
        path=path,
        staging=staging,
        files=files,
        is_file=is_file,
        overwrite=overwrite,
        plan=content.plan_text,
    )
    processes.run_on_first(make_files)
    processes.finish(
        futures=begin_writes(tensors, processes.is_first, afterwards),
        advance=advance,
        total_bytes=content.nbytes,
        commit=lambda _: commit(staging, path, is_file, overwrite),
    )


@contextlib.contextmanager
def _with_path_in_errors(shown_path: str) -> Iterator[None]:
    """A context that adds the path of the save to an `OSError` of a system call that
    has none, such as that of a write to a full disk.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        text = f"{error.strerror}, while saving; what was at the path is unchanged"
        if error.errno == errno.ENOSPC:
            text = (
                f"{error.strerror}, while saving; what was at the path before is"
                " unchanged. Free some space, or save elsewhere"
            )
        raise OSError(error.errno, f"{text}: {shown_path}") from error


def _layout(
    leaves: Leaves,
    staging: str,
    extra: dict[str, str],
    file_bytes: int | None,
) -> tuple[dict[str, NewFile], list[Tensors]]:
    """The files to create by their paths, and the tensors to write to each. All
    processes compute the same result.

    The files lie in the directory `staging`, each with arrays of at most `file_bytes`
    bytes or one larger array. If `file_bytes` is `None`, `staging` is the only file.
    `extra` is the metadata for all headers.
    """
    most = float("inf")
    if file_bytes is not None:
        most = file_bytes
    names = [name for name, _ in leaves.arrays]
    values = [value for _, value in leaves.arrays]
    sizes = [array_bytes(value) for value in values]
    ranges = list(ranges_of(sizes, most)) or [(0, 0)]
    files: dict[str, NewFile] = {}
    tensors: list[Tensors] = []
    for number, (start, stop) in enumerate(ranges, 1):
        part = "" if len(ranges) == 1 else f"-{number:05}-of-{len(ranges):05}"
        file = staging
        if file_bytes is not None:
            file = os.path.join(staging, f"model{part}.safetensors")
        names_of_file = names[start:stop]
        metadata = {
            **extra,
            **safetensors.metadata_of_dtypes(names_of_file, leaves.dtype_names),
        }
        header, offsets = safetensors.write_header(leaves.arrays[start:stop], metadata)
        tensors_of_file = Tensors(
            file=file,
            names=names_of_file,
            values=values[start:stop],
            sizes=sizes[start:stop],
            offsets=offsets,
        )
        file_size = len(header) + sum(tensors_of_file.sizes)
        files[file] = NewFile(
            header=header, nbytes=file_size, tensor_names=names_of_file
        )
        tensors.append(tensors_of_file)
    return files, tensors
