"""Checkpoints of a training run: the latest few steps are kept, and written while
training goes on.
"""

import concurrent.futures
import dataclasses
import functools as ft
import operator
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

from jaxtyping import PyTree

from .._ground.errors import CheckpointError
from .._ground.misuse import called, lacking
from .._plan import ShardPlan
from ._address import Address, Where, address_of
from ._coordination import holders_of
from ._leaves import host_copy
from ._load import load
from ._objects import TIMEOUT_SECONDS
from ._save import content_of, write
from ._saved_content import SavedContent, WriteOptions
from ._steps import StepFiles, StepObjects


class Manager:
    """Saves a training run in the background, and keeps the latest steps.

    `save` copies the data of this process in memory, so that the next training step may
    donate the arrays, and writes the copy in a thread as [`shardfx.checkpoint.save`][]
    does. Each step is a directory such as `step-100`, which exists completely or not at
    all. All processes make a manager of the same directory, on a shared file system,
    and make the same calls.

    **Arguments:**

    - `directory`: the directory of the run. It is created if it does not exist. Or its
      address in a store, such as `gs://bucket/run`.
    - `keep`: the number of steps to keep; `None` for all. The oldest steps are removed
      when a new step is complete.
    - `wait_seconds`: seconds that the processes of a save wait for a process that has
      not called `save` yet.
    - `timeout_seconds`: for a store, seconds after which a request that is not answered
      is an error, which the next call tells.

    !!! Example

        ```python
        import tempfile
        import jax
        import jax.numpy as jnp
        import shardfx
        from shardfx import MeshSpec, PathRules, checkpoint

        tree = {"w": jnp.zeros((8, 8)), "step": 0}
        made = shardfx.plan(
            tree, MeshSpec({"fsdp": 8}).build(jax.devices()), paths=PathRules.parse("w->fsdp")
        )
        state = shardfx.shard(tree, made)
        with checkpoint.Manager(tempfile.mkdtemp(), keep=2) as manager:
            for step in range(1, 5):
                state = {"w": state["w"] + 1, "step": step}
                manager.save(step, state, made)
        assert manager.steps() == (3, 4) and manager.latest() == 4
        again = manager.load(state)
        assert again["step"] == 4 and again["w"][0, 0] == 4
        ```
    """

    __module__ = "shardfx.checkpoint"

    if not TYPE_CHECKING:
        # Names of Orbax's CheckpointManager.
        __getattr__ = lacking(
            {
                "restore": "`manager.load(plan)`",
                "latest_step": "`manager.latest()`",
                "all_steps": "`manager.steps()`",
                "wait_until_finished": "`manager.wait()`",
            }
        )

    @called("Manager(directory, keep=3)", max_to_keep="`keep=`")
    def __init__(
        self,
        directory: Where,
        *,
        keep: int | None = 3,
        wait_seconds: float = 25.0,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ):
        self._options = WriteOptions(
            wait_seconds=wait_seconds,
            progress=False,
            timeout_seconds=timeout_seconds,
        )
        address = address_of(directory)
        self._steps: StepFiles | StepObjects
        if isinstance(address, Address):
            self._steps = StepObjects(
                where=directory, address=address, timeout_seconds=timeout_seconds
            )
        else:
            self._steps = StepFiles(os.path.abspath(address))
        self.directory = self._steps.directory
        self.keep = None if keep is None else _kept_steps(keep)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "shardfx-manager")
        self._under_way: concurrent.futures.Future[None] | None = None
        self._is_closed = False

    def __enter__(self) -> "Manager":
        return self

    def __exit__(
        self,
        kind: object,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def path(self, step: SupportsIndex) -> Where:
        """The directory of a step, or its address, whether it exists or not. Raises
        `CheckpointError` for a number that is no step.
        """
        return self._steps.path(_whole_step(step))

    def steps(self) -> tuple[int, ...]:
        """The numbers of the complete steps, in order.

        Only directories that `save` wrote are steps. Empty directories and those of
        other programs are passed over.
        """
        return self._steps.numbers()

    def latest(self) -> int | None:
        """The number of the last complete step; `None` if no step is complete."""
        return max(self.steps(), default=None)

    @called("manager.save(step, tree, plan)")
    def save(
        self,
        step: SupportsIndex,
        tree: object,
        plan: ShardPlan | None = None,
    ) -> None:
        """Waits for the previous save, copies a tree to this process's memory, and
        starts to write it in a thread.

        **Arguments:**

        - `step`: the number of the step, a whole number from 0 on: an int, or an array
          of an integer dtype.
        - `tree`: the tree to save, of JAX or NumPy arrays.
        - `plan`: the tree's plan. Without it, the arrays' own shardings are saved as a
          plan, if they are on one mesh.

        **Raises:**

        The error of the previous save if it failed, or the errors of
        [`shardfx.checkpoint.save`][] for a tree that cannot be saved. If writing this
        step fails, the next call of `save`, `load`, `wait` or `close` raises.
        `CheckpointError` for a step that is no whole number from 0 on, and after
        `close`.
        """
        step = _whole_step(step)
        self.wait()
        if self._is_closed:
            raise CheckpointError(
                f"the manager of {self.directory!r} is closed, so step {step} is not"
                " saved; save inside of `with checkpoint.Manager(...) as manager:`, or"
                " make another manager of this directory."
            )
        holders = holders_of(tree)
        try:
            content = content_of(tree, plan, None, None)
            arrays = []
            for path, value in content.leaves.arrays:
                arrays.append((path, host_copy(value)))
            content = dataclasses.replace(
                content, leaves=dataclasses.replace(content.leaves, arrays=arrays)
            )
        except (ValueError, TypeError, RuntimeError, MemoryError) as error:
            # The other processes wait for this one, and get the reason why it does not
            # write.
            fail = ft.partial(_raise, error)
            write(self.path(step), holders, fail, self._options)
            raise
        self._under_way = self._pool.submit(self._write, step, holders, content)

    @called("manager.load(plan)")
    def load(
        self,
        plan: PyTree,
        step: SupportsIndex | None = None,
        **options: Any,
    ) -> PyTree:
        """Waits for the previous save, and loads a step.

        **Arguments:**

        - `plan`: a plan on devices, or a tree of arrays or structs with the wanted
          shardings, such as the last state.
        - `step`: the number of the step; `None` for the latest.
        - `options`: further keyword arguments of [`shardfx.checkpoint.load`][], such as
          `dtype="plan"`.

        **Raises:**

        `CheckpointError` if there is no such step. The error of the previous save if it
        failed, and the errors of [`shardfx.checkpoint.load`][].
        """
        self.wait()
        step = self.latest() if step is None else _whole_step(step)
        if step is None:
            raise CheckpointError(
                f"{self.directory!r} has no checkpoint yet: start anew if"
                " `manager.latest()` is `None`, or give the directory of the run."
            )
        if not self._steps.holds(step):
            last_steps = self.steps()[-8:]
            listed = ", ".join(map(str, last_steps)) or "no step"
            raise CheckpointError(
                f"{self.directory!r} has no step {step}; it has {listed}."
            )
        options.setdefault("timeout_seconds", self._options.timeout_seconds)
        return load(self.path(step), plan, **options)

    def wait(self) -> None:
        """Waits until the last save is on disk. Raises its error if it failed."""
        under_way = self._under_way
        self._under_way = None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Waits until the last save is on disk, and ends the thread. Raises the error
        of the save if it failed.
        """
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _write(
        self,
        step: int,
        holders: tuple[int, ...],
        content: SavedContent,
    ) -> None:
        """Writes one step, and removes the oldest steps beyond `keep`. It runs in the
        thread of the manager.
        """
        is_first = write(self.path(step), holders, lambda: content, self._options)
        self._steps.note(step)
        if is_first and self.keep is not None:
            others = [number for number in self.steps() if number != step]
            # The new step is one of those to keep.
            count_to_remove = max(0, len(others) - (self.keep - 1))
            for old_step in others[:count_to_remove]:
                self._steps.remove(old_step)


def _raise(error: Exception) -> SavedContent:
    raise error


def _whole_step(step: SupportsIndex) -> int:
    """The number of a step as an int. Raises `CheckpointError` for a number that names
    no directory of `steps`.
    """
    try:
        number = operator.index(step)
    except TypeError as error:
        raise CheckpointError(
            f"a step is a whole number, and this is {step!r:.60}, of type"
            f" {type(step).__name__}; nothing would find such a checkpoint again. Give"
            " an int: `int(step)`, as in `manager.save(step, tree)`."
        ) from error
    if number < 0 or isinstance(step, bool):
        raise CheckpointError(
            f"a step is a whole number from 0 on, and this is {step!r}; count the steps"
            " from 0, as in `manager.save(0, tree)`."
        )
    return number


def _kept_steps(keep: SupportsIndex) -> int:
    """The argument `keep` as an int. Raises `CheckpointError` if it is no number of
    steps from 1 on.
    """
    try:
        count = operator.index(keep)
    except TypeError as error:
        raise CheckpointError(
            f"`keep={keep!r:.60}` is no number of steps; give a whole number, such as"
            " `keep=3`, or `None` for all."
        ) from error
    if count < 1:
        raise CheckpointError(
            f"`keep={count}` would keep no checkpoint; give 1 or more, or `None` for"
            " all."
        )
    return count
