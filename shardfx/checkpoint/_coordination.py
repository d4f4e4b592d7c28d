"""The coordination of the processes that make one save, through JAX's coordination
service and without any program on devices.

The processes go through rounds. In each round, every process sends its arguments, its
progress or its error to the others, and waits for theirs, at most 20 seconds, so that a
dead process is noticed. All processes read the same messages, and so all of them come
to the same decision. Once everything is written, the first process alone commits the
save (gives the files their final name), and the others wait for its result.
"""

import concurrent.futures
import contextlib
import functools as ft
import hashlib
import itertools as it
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from .._ground.errors import CheckpointError
from .._ground.processes import exchanged, named
from .._ground.spec import DType


_ROUND_SECONDS = 1.0
_SILENT_SECONDS = 20.0
# The longest time in which a failed process tries to send its error to the others.
_LINGER_SECONDS = 20.0


def holders_of(tree: object) -> tuple[int, ...]:
    """The numbers of the processes that save a tree: those that own devices of its JAX
    arrays.

    If it has no JAX array, all processes save it.
    """
    everyone = tuple(range(jax.process_count()))
    if len(everyone) == 1:
        return everyone
    shardings = dict.fromkeys(
        leaf.sharding for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)
    )
    holders: set[int] = set()
    for sharding in shardings:
        holders.update(device.process_index for device in sharding.device_set)
    return tuple(sorted(holders)) or everyone


class SaveProcesses:
    """The processes of one save. All of them call the same methods in the same order.

    It is used in a `with` statement. If the block raises an error, the other processes
    receive it. In its methods, `futures` are the work of this process: each one returns
    the number of bytes that it wrote, or `None`. `advance` is called with each number,
    for a progress line.

    **Arguments:**

    - `target`: the path or address of the checkpoint, for messages.
    - `me`, `members`: the number of this process, and the numbers of all processes that
      save.
    - `client`: JAX's client of its coordination service; `None` if the service does not
      run.
    - `wait_seconds`: seconds that this process waits for the others to call `save`.

    **Raises:**

    `CheckpointError` if this process is not one of `members`, or if several processes
    save without the service. The methods raise it on all processes if one of them
    fails, or does not answer in time.
    """

    def __init__(
        self,
        target: str,
        me: int,
        members: tuple[int, ...],
        client: Any,
        wait_seconds: float,
    ):
        """Prepares the first round. `me` is the number of this process, `members` are
        the numbers of all processes that save, and `client` is that of JAX's
        coordination service.
        """
        if me not in members:
            raise CheckpointError(
                f"process {me} owns no device of the arrays that it is to save to"
                f" {target}; they lie on {named(members)}: call `save` there alone."
            )
        if len(members) > 1 and client is None:
            raise CheckpointError(
                f"the arrays lie on several of {jax.process_count()} processes, which"
                " agree on a save through JAX's coordination service, and it does not"
                " run; call `jax.distributed.initialize()` when the program starts."
            )
        self.target = target
        self.me = me
        self.members = members
        self._first_process = min(members)
        self.is_first = me == self._first_process
        self._client = client
        # The service keeps the texts of a round under names that begin with this.
        self._round_prefix = f"shardfx.save/{digest_of(map(str, members))}"
        # How long a round waits for the others, and what its error then says of those
        # that are late. Both change after the first round.
        self._timeout_seconds = wait_seconds
        self._silence_text = (
            f"did not come within {wait_seconds:g} s to save {target}, though the"
            " arrays lie there too; call `save` on every process that holds some of"
            " them, or give a longer `wait_seconds`. Nothing was written."
        )
        # The time of the first process at which the save began.
        self.began_at = 0.0
        # Ctrl-C interrupts a wait for this thread, and the thread's exchange still
        # completes.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "shardfx-save-rounds")
        # Whether the others know the end of the save, or cannot be told.
        self._is_over = False

    def __enter__(self) -> "SaveProcesses":
        return self

    def __exit__(
        self,
        kind: object,
        error: BaseException | None,
        trace: object,
    ) -> None:
        """Sends the error of the block to the other processes, unless they know how
        the save ended.
        """
        if error is not None and not self._is_over:
            note_of_error = {"error": _error_text(error)}
            sent = self._thread.submit(self._round, note_of_error)
            # If the service has failed too, the earlier error says more.
            with contextlib.suppress(
                CheckpointError, TimeoutError, jax.errors.JaxRuntimeError
            ):
                sent.result(_LINGER_SECONDS)
        self._thread.shutdown(wait=False)

    def compare(self, facts: Mapping[str, str], lines: Sequence[str]) -> str:
        """Compares the arguments of all processes. Returns a random text, the same on
        all of them, which no other save has.

        `facts` has the arguments of this process, as text, by name. Its entry "leaves"
        is the digest of `lines`, which describe one array each. Raises
        `CheckpointError` with the first argument that differs. If that is "leaves", the
        message has the first of `lines` that differs.
        """
        note_of_process = {
            "facts": dict(facts),
            "token": secrets.token_hex(8),
            "seconds": time.time(),
        }
        notes = self._in_thread(self._first_round, note_of_process)
        self.began_at = notes[self._first_process]["seconds"]
        facts_by_process = {process: note["facts"] for process, note in notes.items()}
        for name in dict.fromkeys(it.chain.from_iterable(facts_by_process.values())):
            processes_by_value: dict[str, list[int]] = {}
            for process, facts_of_process in facts_by_process.items():
                value = facts_of_process.get(name, "nothing")
                processes_by_value.setdefault(value, []).append(process)
            if len(processes_by_value) > 1:
                raise self._differing_error(name, processes_by_value, lines)
        return notes[self._first_process]["token"]

    def _differing_error(
        self,
        name: str,
        processes_by_value: Mapping[str, Sequence[int]],
        lines: Sequence[str],
    ) -> CheckpointError:
        """The error for an argument `name` that differs between processes.

        `processes_by_value` has the processes by their value of it. For "leaves" the
        values are digests: the first process of each value sends its `lines`, which
        describe one array each, and the error shows the first line that differs.
        """
        values = tuple(processes_by_value)
        advice = "give all of them the same"
        if name in ("plan", "map"):
            advice = f"`hosts.assert_same_plan({name})` says where they differ"
        if name == "leaves":
            # The first lines that differ say more than the digests of all.
            first_processes = [
                processes[0] for processes in processes_by_value.values()
            ]
            shown_lines = lines if self.me in first_processes else []
            notes = self._in_thread(self._round, {"lines": shown_lines})
            rows = it.zip_longest(
                *[notes[process]["lines"] for process in first_processes],
                fillvalue="nothing more",
            )
            values = next(row for row in rows if len(set(row)) > 1)
        listed = ", ".join(
            f"{value} on {named(processes)}"
            for value, processes in zip(
                values, processes_by_value.values(), strict=True
            )
        )
        return self._final_error(
            f"the processes save with different `{name}`: {listed}; {advice}. Nothing"
            " was written."
        )

    def wait(
        self,
        futures: Iterable[concurrent.futures.Future[Any]],
        advance: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Waits until all processes have finished their work. Returns the number of
        bytes that they wrote in total.

        `futures` are the writes of this process: each returns the bytes that it wrote,
        or `None`. `advance` is called with these bytes, for a progress line.
        """
        unfinished = set(futures)
        wrote_bytes = 0
        while True:
            done, unfinished = concurrent.futures.wait(
                unfinished, _ROUND_SECONDS, concurrent.futures.FIRST_EXCEPTION
            )
            for future in done:
                nbytes = future.result() or 0
                advance(nbytes)
                wrote_bytes += nbytes
            note = {"is_busy": bool(unfinished), "wrote": wrote_bytes}
            notes = self._in_thread(self._round, note).values()
            if not any(note["is_busy"] for note in notes):
                return sum(note["wrote"] for note in notes)

    def run_on_first(self, work: Callable[[], None]) -> None:
        """Runs `work` on the process with the lowest number while the others wait."""
        with concurrent.futures.ThreadPoolExecutor(1, "shardfx-save") as pool:
            futures = [pool.submit(work)] if self.is_first else []
            self.wait(futures)

    def finish(
        self,
        futures: Iterable[concurrent.futures.Future[Any]],
        advance: Callable[[int], None],
        total_bytes: int,
        commit: Callable[[Mapping[int, str]], None],
        text_of_process: Callable[[], str] | None = None,
    ) -> None:
        """Waits until all processes have written their bytes. Then the first process
        alone calls `commit`, with the text that `text_of_process` returns on each
        process, by its number.

        `futures` and `advance` are those of `wait`. `total_bytes` is the size of all
        arrays. Raises `CheckpointError` if all processes together wrote fewer bytes,
        and if `commit` fails.
        """
        wrote_bytes = self.wait(futures, advance)
        if wrote_bytes < total_bytes:
            raise self._final_error(
                f"the processes wrote {wrote_bytes} of {total_bytes} bytes to"
                f" {self.target}, as nobody holds the first replica of some array;"
                " place the arrays alike on all of them. Nothing was changed there."
            )
        texts: dict[int, str] = {}
        if text_of_process is not None:
            note_of_text = {"text": text_of_process()}
            notes = self._in_thread(self._round, note_of_text)
            texts = {}
            for process, answer in notes.items():
                texts[process] = answer["text"]
        # From here on, only the first process decides: an error or a death elsewhere
        # causes no loss.
        self._is_over = True
        if self.is_first:
            commit_texts = ft.partial(commit, texts)
            done = self._thread.submit(self._commit, commit_texts)
            try:
                done.result()
            finally:
                concurrent.futures.wait([done])
        elif error := self._in_thread(self._share_result):
            raise CheckpointError(error)

    def _commit(self, commit: Callable[[], None]) -> None:
        """Calls `commit` on the first process, and tells the others how it ended."""
        try:
            commit()
        finally:
            error = sys.exception()
            error_text = ""
            if error is not None:
                error_text = self._text_of_failure(self.me, _error_text(error))
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._share_result(error_text)

    def _share_result(self, error_text: str = "") -> str:
        """Tells all processes how the commit ended: the text of its error, or "" if it
        succeeded. Returns the text.

        The first process, which commits, passes the text as `error_text`. The other
        processes pass nothing.
        """
        texts, _ = self._exchange("result", error_text)
        return texts.get(
            self._first_process,
            f"{named([self._first_process])} gave no sign of life for"
            f" {_SILENT_SECONDS:g} s after everything was written to {self.target}: it"
            " has died, or hangs. If the new checkpoint is there, it is complete.",
        )

    def _first_round(self, note: Mapping[str, Any]) -> dict[int, Any]:
        """The round in which the processes find each other. It waits as long as the
        user allows; the rounds after it have a name of their own and a shorter limit.
        """
        notes = self._round(note)
        # With a name for this save alone, a process that hangs and joins a round late
        # cannot meet a later save.
        self._round_prefix = (
            f"{self._round_prefix}/{notes[self._first_process]['token']}"
        )
        self._timeout_seconds = _SILENT_SECONDS
        self._silence_text = (
            f"gave no sign of life for {_SILENT_SECONDS:g} s while saving to"
            f" {self.target}: it has died, or hangs. Nothing was changed there; save"
            " again with processes that live."
        )
        return notes

    def _exchange(self, name: str, text: str) -> tuple[dict[int, str], str]:
        """Sends `text` to the other processes. Returns the texts that came in time by
        process, and the names of the late processes, or "".
        """
        return exchanged(
            client=self._client,
            name=f"{self._round_prefix}/{name}",
            text=text,
            seconds=self._timeout_seconds,
            me=self.me,
            processes=self.members,
        )

    def _round(self, note: Mapping[str, Any]) -> dict[int, Any]:
        """Exchanges a note with the other processes. Returns the notes of all by
        process. Raises `CheckpointError` if one is late, or if one has failed: its note
        is then `{"error": text}`.
        """
        texts, late = self._exchange("round", json.dumps(note))
        if late:
            raise self._final_error(f"{late} {self._silence_text}")
        notes = {}
        for process, text in texts.items():
            notes[process] = json.loads(text)
        for process, answer in notes.items():
            if "error" in answer:
                raise self._final_error(self._text_of_failure(process, answer["error"]))
        return notes

    def _in_thread(self, call: Callable[..., Any], *args: object) -> Any:
        """The result of `call`, run in the thread of the exchanges. Raises
        `CheckpointError` if the coordination service fails.
        """
        try:
            return self._thread.submit(call, *args).result()
        except jax.errors.JaxRuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise self._final_error(
                f"JAX's coordination service does not answer ({first_line:.200}): its"
                " process, the one with number 0, has ended, or the network fails;"
                " start the job again."
            ) from error

    def _text_of_failure(self, process: int, error_text: str) -> str:
        return (
            f"saving to {self.target} failed on process {process}, with {error_text};"
            " nothing was changed there."
        )

    def _final_error(self, text: str) -> CheckpointError:
        """An error that all processes know or that cannot be told: `__exit__` does not
        send it.
        """
        self._is_over = True
        return CheckpointError(text)


def _error_text(error: BaseException) -> str:
    text = type(error).__name__
    if str(error):
        text += f": {error}"[:1000]
    return text.removesuffix(".")


def lines_of(leaves: Sequence[tuple[str, Any]]) -> list[str]:
    """A line of text for each array, with its path, dtype and shape, for the processes
    to compare.

    `leaves` has pairs of a path and an array. An array that is spread over processes
    also has its sharding in the line.
    """
    lines = []
    for path, value in leaves:
        # A value that is complete on every process may be on other devices on each.
        is_spread = isinstance(value, jax.Array) and not value.is_fully_addressable
        sharding = None
        if is_spread:
            sharding = value.sharding
        description = _array_description(value.dtype, value.shape, sharding)
        lines.append(f"leaf `{path}` is {description}")
    return lines


# A model has many arrays of few kinds.
@ft.lru_cache(maxsize=256)
def _array_description(dtype: DType, shape: tuple[int, ...], sharding: Any) -> str:
    """A text that differs for arrays of another dtype, shape or sharding, devices
    included. `sharding` is `None` for an array that is whole on each process.
    """
    text = f"{dtype}{list(shape)}"
    if sharding is None:
        return text
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return (
            f"{text} in {sharding} on devices"
            f" {sorted(device.id for device in sharding.device_set)}"
        )
    # The text of a mesh does not say where each device is on it.
    device_ids = (str(device.id) for device in sharding.mesh.devices.flat)
    order = digest_of(device_ids)[:8]
    return (
        f"{text} in {sharding.spec} on mesh {dict(sharding.mesh.shape)} with device"
        f" order {order}"
    )


def digest_of(lines: Iterable[str]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 digest of `lines`."""
    return hashlib.sha256(
        "\n".join(lines).encode("utf-8", "surrogatepass")
    ).hexdigest()[:16]
