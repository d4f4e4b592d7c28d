"""The coordination of several processes that make one save, through JAX's coordination service and without any program
on devices.

They go through rounds. In each round, every process leaves a note with its arguments, its progress or its error. Then
all wait for each other at a barrier, at most 20 seconds, so that a dead process is noticed. After it, the first process
reads the notes and sends one answer to all.
"""

import concurrent.futures
import contextlib
import functools as ft
import hashlib
import itertools as it
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from .._ground.errors import CheckpointError
from .._ground.processes import absent, coordination, named


_LOOK_SECONDS = 1.0
_SILENT_SECONDS = 20.0
# How long a failed process waits for the others, to tell them its error.
_LINGER_SECONDS = 20.0

Note = Mapping[str, Any]
Facts = Mapping[str, str]
Answers = Callable[[Mapping[int, Any]], Note]


def holders_of(tree: object) -> tuple[int, ...]:
    """The processes that save a tree: those with devices of its arrays, or all if no array is on devices."""
    everyone = tuple(range(jax.process_count()))
    if len(everyone) == 1:
        return everyone
    shardings = dict.fromkeys(leaf.sharding for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    holders = {device.process_index for sharding in shardings for device in sharding.device_set}
    return tuple(sorted(holders)) or everyone


def meeting(what: str, holders: tuple[int, ...], wait_seconds: float) -> "Together":
    """The object through which this process coordinates a save with the others.

    **Arguments:**

    - `what`: the target of the save, for messages.
    - `holders`: the processes that `holders_of` returned.
    - `wait_seconds`: seconds that this process waits for others.

    **Raises:**

    `CheckpointError` if all arrays are on devices of other processes, or if JAX's coordination service does not run.
    """
    me, client = jax.process_index(), coordination()
    if me not in holders:
        raise CheckpointError(
            f"process {me} owns no device of the arrays that it is to save to {what}; they lie on {named(holders)}: "
            "call `save` there alone."
        )
    if len(holders) > 1 and client is None:
        raise CheckpointError(
            f"the arrays lie on several of {jax.process_count()} processes, which agree on a save through JAX's "
            "coordination service, and it does not run; call `jax.distributed.initialize()` when the program starts."
        )
    return Together(what, me, holders, client, wait_seconds)


class Together:
    """The processes of one save, as a context at whose end the others learn of an error.

    All processes call the same methods in the same order.
    """

    def __init__(self, what: str, me: int, members: tuple[int, ...], client: object, wait_seconds: float):
        self.what, self.me, self.members, self.wait_seconds = what, me, members, wait_seconds
        self.is_first = me == members[0]
        self._client = client
        self._name = f"shardfx.save/{digest_of(map(str, members))}"
        # Ctrl-C interrupts a wait for this thread, and the thread's exchange still completes.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "shardfx-save-notes")
        # The number of this save and of its round: a process that hung may meet the others in a later one.
        self._at: list[Any] = ["", 0]
        # Whether the others know the end of the save, or cannot be told.
        self._is_over = len(members) == 1
        # From here on only the first process decides: errors elsewhere come too late.
        self._is_written = self._is_committed = False

    def __enter__(self) -> "Together":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is not None:
                why = type(error).__name__ + (f": {error}"[:1000] if str(error) else "")
                told = self._thread.submit(self._leave, why.removesuffix("."))
                # If the service has failed too, the earlier error says more.
                with contextlib.suppress(CheckpointError, TimeoutError):
                    told.result(_LINGER_SECONDS)
        finally:
            self._thread.shutdown(wait=False)

    def join(self) -> None:
        """Waits until all processes have called it."""
        if len(self.members) > 1:
            self._thread.submit(self._come).result()

    def agree(self, facts: Facts, lines: Sequence[str]) -> str:
        """Compares the arguments of all processes, and returns a name that only this save has."""
        answer = self._share({"facts": dict(facts)}, _compared)
        if "pair" in answer:
            first = ft.partial(_first_difference, answer["who"], answer["pair"])
            self._share({"lines": list(lines) if self.me in answer["pair"] else []}, first)
        return answer["token"]

    def attend(
        self, futures: Iterable[concurrent.futures.Future[Any]], advance: Callable[[int], None] = lambda _: None
    ) -> int:
        """Waits for the work of all processes.

        **Arguments:**

        - `futures`: the work of this process; each gives the bytes that it wrote.
        - `advance`: is told of these bytes.

        **Returns:**

        The bytes that all processes wrote.
        """
        left, wrote, looked_at = set(futures), 0, time.monotonic()
        while True:
            done, left = concurrent.futures.wait(left, _LOOK_SECONDS, concurrent.futures.FIRST_COMPLETED)
            for future in done:
                nbytes = future.result() or 0
                advance(nbytes)
                wrote += nbytes
            if not left or time.monotonic() - looked_at >= _LOOK_SECONDS:
                answer = self._share({"is_busy": bool(left), "wrote": wrote}, _progress)
                looked_at = time.monotonic()
                if not answer["is_busy"]:
                    return answer["wrote"]

    def alone(self, work: Callable[[], None]) -> None:
        """Runs `work` on the first process while the others wait."""
        with concurrent.futures.ThreadPoolExecutor(1, "shardfx-save") as pool:
            self.attend([pool.submit(work)] if self.is_first else [])

    def finish(self, wrote_bytes: int, total_bytes: int, commit: Callable[[], None]) -> None:
        """Commits the save if the processes have written all of its bytes."""
        if wrote_bytes < total_bytes:
            self._is_over = True
            raise CheckpointError(
                f"the processes wrote {wrote_bytes} of {total_bytes} bytes to {self.what}, as nobody holds the first "
                "replica of some array; place the arrays alike on all of them. Nothing was changed there."
            )

        def committing() -> None:
            commit()
            self._is_committed = True
            if len(self.members) > 1:
                self._asked("key_value_set", "/committed", self._at[0], True)

        self._is_written = True
        try:
            self.alone(committing)
        except CheckpointError:
            # A process that dies from here on causes no loss to the others.
            if not self._is_committed and (self.is_first or self._committed() != self._at[0]):
                raise

    def _committed(self) -> Any:
        """The name of the last save that the first process committed."""
        with contextlib.suppress(CheckpointError):
            return self._asked("key_value_try_get", "/committed")

    def _share(self, note: Note, answers: Answers) -> Any:
        if len(self.members) == 1:
            return answers({self.me: note})
        return self._thread.submit(self._round, note, answers).result()

    def _come(self) -> None:
        self._wait(
            self.wait_seconds,
            f"did not come within {self.wait_seconds:g} s to save {self.what}, though the arrays lie there too; call "
            "`save` on every process that holds some of them, or give a longer `wait_seconds`. Nothing was written.",
        )

    def _round(self, note: Note, answers: Answers) -> Any:
        """Leaves a note, and returns the first process's answer to the notes of all."""
        silence = (
            f"gave no sign of life for {_SILENT_SECONDS:g} s while saving to {self.what}: it has died, or hangs. "
            "Nothing was changed there; save again with processes that live."
        )
        self._at[1] += 1
        self._asked("key_value_set", f"/notes/{self.me}", json.dumps({"at": self._at, **note}), True)
        self._wait(_SILENT_SECONDS, silence)
        if self.is_first:
            found = self._asked("key_value_dir_get", "/notes")
            notes = {int(name.rpartition("/")[2]): json.loads(text) for name, text in found}
            answer = self._answer(dict(sorted(notes.items())), answers)
            self._asked("key_value_set", "/answer", json.dumps({"at": self._at, **answer}), True)
        self._wait(_SILENT_SECONDS, silence)
        answer = json.loads(self._asked("key_value_try_get", "/answer"))
        is_ours = answer["at"] == self._at
        self._is_over = not is_ours or "error" in answer or answer["is_over"]
        if not is_ours or "error" in answer:
            raise CheckpointError(answer["error"] if is_ours else f"{named(self.members[:1])} {silence}")
        self._at[0] = answer.get("token", self._at[0])
        return answer

    def _answer(self, notes: Mapping[int, Any], answers: Answers) -> Note:
        apart = [process for process, note in notes.items() if note["at"] != self._at]
        if apart:
            return {"error": f"{named(apart)} hung while saving to {self.what}. Nothing was changed there; save again."}
        for process, note in notes.items():
            if "error" in note and (process == self.me or not self._is_written):
                what = f"saving to {self.what} failed on process {process}"
                return {"error": f"{what}, with {note['error']}; nothing was changed there."}
        answer = answers(notes)
        return {**answer, "is_over": self._is_written and not answer["is_busy"]}

    def _leave(self, why: str) -> None:
        """Tells the other processes why this process leaves."""
        while not self._is_over:
            self._round({} if self._is_committed else {"error": why}, _progress)

    def _wait(self, seconds: float, silence: str) -> None:
        """Waits at the save's barrier; raises for processes that do not reach it."""
        try:
            who = absent(self._client, self._name, seconds, self.me, self.members)
        except jax.errors.JaxRuntimeError as error:
            raise self._gone(error) from error
        if who:
            self._is_over = True
            raise CheckpointError(f"{who} {silence}")

    def _asked(self, call: str, name: str, *given: object) -> Any:
        try:
            return getattr(self._client, call)(self._name + name, *given)
        except jax.errors.JaxRuntimeError as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> CheckpointError:
        self._is_over, first = True, str(error).partition("\n")[0]
        return CheckpointError(
            f"JAX's coordination service does not answer ({first:.200}): its process, the one with number 0, has "
            "ended, or the network fails; start the job again."
        )


def _progress(notes: Mapping[int, Any]) -> Note:
    busy, wrote = ([note.get(name, 0) for note in notes.values()] for name in ("is_busy", "wrote"))
    return {"is_busy": any(busy), "wrote": sum(wrote)}


def _compared(notes: Mapping[int, Any]) -> Note:
    """A name for the save, or the first argument in which processes differ."""
    facts = {process: note["facts"] for process, note in notes.items()}
    for name in dict.fromkeys(it.chain.from_iterable(facts.values())):
        groups: dict[str, list[int]] = {}
        for process, given in facts.items():
            groups.setdefault(given.get(name, "nothing"), []).append(process)
        who = " and ".join(f"one on {named(processes)}" for processes in groups.values())
        if len(groups) > 1 and name == "leaves":
            return {"pair": [group[0] for group in groups.values()][:2], "who": who}
        if len(groups) > 1 and name in ("plan", "map"):
            fix = f"`hosts.assert_same_plan({name})` says where they differ. Nothing was written."
            return {"error": f"the processes save by different {name}s, {who}; {fix}"}
        if len(groups) > 1:
            given = ", ".join(f"{value} on {named(processes)}" for value, processes in groups.items())
            text = f"the processes save with different `{name}`: {given}; give all of them the same"
            return {"error": f"{text}. Nothing was written."}
    return {"token": secrets.token_hex(8)}


def _first_difference(who: str, pair: Sequence[int], notes: Mapping[int, Any]) -> Note:
    lines = it.zip_longest(*[notes[process]["lines"] for process in pair], fillvalue="nothing more")
    one, two = next((one, two) for one, two in lines if one != two)
    return {
        "error": f"the processes save different trees, {who}: {one} on process {pair[0]}, {two} on process {pair[1]}; "
        "give all of them the same arrays. Nothing was written."
    }


def lines_of(leaves: Sequence[tuple[str, Any]]) -> list[str]:
    """One line for each array. The lines are equal on processes that save the same arrays."""
    texts: dict[object, str] = {}
    lines = []
    for path, value in leaves:
        # These values exist on every process, and each process may have them on its own devices.
        where = ""
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            if value.sharding not in texts:
                texts[value.sharding] = f" in {_where(value.sharding)}"
            where = texts[value.sharding]
        lines.append(f"leaf `{path}` is {value.dtype}{list(value.shape)}{where}")
    return lines


def _where(sharding: Any) -> str:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return f"{sharding} on devices {sorted(device.id for device in sharding.device_set)}"
    # The text of a mesh does not say where each device is on it.
    order = digest_of(str(device.id) for device in sharding.mesh.devices.flat)[:8]
    return f"{sharding.spec} on mesh {dict(sharding.mesh.shape)} with device order {order}"


def digest_of(lines: Iterable[str]) -> str:
    """A digest that is equal for equal lines."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]
