"""Makes the failure of one process the failure of all processes."""

import types

import jax

from .._ground.errors import PlanMismatchError
from .._ground.processes import coordination, exchanged_at_call, named
from .._plan import ShardPlan


# Errors that list many leaves are long, and each process keeps the texts of all.
_LONGEST_TEXT = 2_000


class SharedOutcome:
    """A context for work that must succeed on all processes of a plan's mesh.

    When the work ends, each process tells the others whether it failed. A process that
    failed raises its own error; the others raise `PlanMismatchError` with its text.

    **Arguments:**

    - `plan`: the plan of the batch that `global_batch` makes, on a mesh of devices.
    - `wait_seconds`: the seconds that a process waits for the others.

    **Raises:**

    `PlanMismatchError` if the plan has several processes and JAX's coordination service
    does not run. At the end of the work, if other processes failed or are late.
    """

    def __init__(self, plan: ShardPlan, wait_seconds: float):
        assert plan.jax_mesh is not None
        devices = plan.jax_mesh.devices.flat
        self._processes = sorted({device.process_index for device in devices})
        self._client = coordination()
        self._wait_seconds = wait_seconds
        # Two batches that are under way at once have different plans.
        self._name = f"shardfx.global_batch/{plan.digest}"
        if len(self._processes) > 1 and self._client is None:
            raise PlanMismatchError(
                f"the batch lies on {named(self._processes)}, which ask each other"
                " through JAX's coordination service, and it does not run; call"
                " `jax.distributed.initialize()` when the program starts, or leave out"
                " `wait_seconds`."
            )

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        """Exchanges the text of `error`, "" for none, with the other processes. Raises
        `PlanMismatchError` if another one failed or is late, and this one did not fail.
        """
        text = ""
        if error is not None:
            text = f"{type(error).__name__}: {error}"
        # The text of each process by its number, and the names of the late ones.
        texts, late = exchanged_at_call(
            client=self._client,
            name=self._name,
            text=text[:_LONGEST_TEXT],
            seconds=self._wait_seconds,
            me=jax.process_index(),
            processes=self._processes,
        )

        # The error of this process says more to whoever reads its log.
        if error is not None:
            return
        if late:
            raise PlanMismatchError(
                f"{late} did not call `global_batch` with this plan and `wait_seconds`"
                f" within {self._wait_seconds:g} s; call it on every process, with the"
                " same plan (`hosts.assert_same_plan` compares them), or give a longer"
                " `wait_seconds`."
            )
        error_texts = {}
        for process, text in texts.items():
            if text:
                error_texts[process] = text
        if error_texts:
            first = min(error_texts)
            raise PlanMismatchError(
                f"{named(sorted(error_texts))} failed to make the batch, so no process"
                f" has it. Process {first}: {error_texts[first]}"
            )
