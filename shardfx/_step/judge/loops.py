"""Loops: what they carry lies after each turn as it did before."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ..hlo_text import Instruction, arrays_in
from .cuts import Cut
from .held import Context, Held, Result, view_of
from .matching import expressed
from .record import Failures, Record
from .results import held_of, leaves_of, required_view
from .shardings import axes_of, shardings_in
from .values import Global, Loop, unchanged
from .verdict import Unjudged


# Turns of a loop after which what it carries has to be settled.
_TURNS = 6
# Loops of one name that are tried.
_MOST_TRIALS = 4
# Goes through a computation of the program of one device with these arguments.
Run: TypeAlias = Callable[[str, Sequence[Result]], Result]


class _Trial(NamedTuple):
    """A loop of the whole program that a loop of the program of one device may be.

    - `state`: what the devices hold at the start of a turn; the reason if that is not
      judged.
    - `matches`, `mismatches`: how many of the arrays that both start with are known to
      be equal, and to be different.
    """

    loop: Loop
    state: Sequence[Result] | Unjudged
    matches: int
    mismatches: int


class Loops:
    """The loops of a program. `run` goes through one of its computations, and notes in
    `record` what it finds.
    """

    def __init__(self, context: Context, run: Run, record: Record):
        self.context = context
        self.run = run
        self.record = record
        # The numbers of the loops whose turns are being judged.
        self.taken: list[int] = []
        # For each loop of the whole program, the body that was judged as its.
        self.judged_bodies: dict[int, str] = {}

    def loop(self, instruction: Instruction, initial: Result) -> tuple[Result, ...]:
        """The results of a loop. Raises `Unjudged` if it is none of the whole program's,
        or if a turn changes how its values lie.
        """
        starts = list(leaves_of(initial))
        names = dict(instruction.called)
        trials = self._trials(instruction, starts, names["body"])
        if not trials:
            raise Unjudged("no loop of the whole program starts like this")
        if len(trials) > 1:
            best = self._best(trials, starts, names)
        else:
            best = trials[0]
        self.judged_bodies[best.loop.number] = names["body"]
        return self._results_as(best, starts, names)

    def _trials(
        self,
        instruction: Instruction,
        starts: Sequence[Result],
        body: str,
    ) -> list[_Trial]:
        """The loops of the whole program that may be this one: those that have its name
        and start with its arrays. Several calls of a function have one name, and an
        array that is not judged may be any. Those come first that no other loop is,
        and of them those with most equal arrays.
        """
        trials: list[_Trial] = []
        for loop in self.context.whole_program.values.loops:
            if len(loop.initial) != len(starts) or loop.number in self.taken:
                continue
            if not _has_form_of(instruction, loop):
                continue
            trial = self._trial(loop, starts, instruction, body)
            if trial is not None:
                trials.append(trial)

        fewest = min((trial.mismatches for trial in trials), default=0)
        likely = [trial for trial in trials if trial.mismatches == fewest]

        def rank(trial: _Trial) -> tuple[bool, int]:
            is_another = self.judged_bodies.get(trial.loop.number, body) != body
            return is_another, -trial.matches

        return sorted(likely, key=rank)[:_MOST_TRIALS]

    def _best(
        self,
        trials: Sequence[_Trial],
        starts: Sequence[Result],
        names: Mapping[str, str],
    ) -> _Trial:
        """The trial in whose turns least is not judged, and least wrong. What the turns
        note in the record is forgotten.
        """
        best = trials[0]
        fewest: Failures | None = None
        for trial in trials:
            before = self.record.copy()
            try:
                self._results_as(trial, starts, names)
            except Unjudged:
                continue
            finally:
                failures = self.record.failures_since(before)
                self.record.restore(before)
            if fewest is None or failures < fewest:
                best = trial
                fewest = failures
            if fewest == (0, 0):
                break
        return best

    def _results_as(
        self,
        trial: _Trial,
        starts: Sequence[Result],
        names: Mapping[str, str],
    ) -> tuple[Result, ...]:
        """The results of a loop, if it is the loop of a trial. Raises `Unjudged` if
        what it carries does not settle.
        """
        if isinstance(trial.state, Unjudged):
            raise trial.state
        self.taken.append(trial.loop.number)
        try:
            results = self._settled_results(trial.loop, starts, trial.state, names)
        finally:
            self.taken.pop()
        if results is None:
            # What is inside is judged as far as it goes.
            raise Unjudged("a loop whose turns change how its values lie")
        return tuple(results)

    def _trial(
        self,
        loop: Loop,
        starts: Sequence[Result],
        instruction: Instruction,
        body: str,
    ) -> _Trial | None:
        """What the devices hold at the start of a turn, if the loop `instruction` of the
        program of one device, which starts with `starts`, is `loop` of the whole program;
        `None` if that starts with other arrays.
        """
        unchanged_places = unchanged(self.context.module, body, len(starts))
        shardings = shardings_in(loop.instruction.attributes)
        shapes = [array.shape for array in arrays_in(instruction.result)]
        state: list[Result] = []
        matches = 0
        mismatches = 0
        reason: Unjudged | None = None
        for place, (start, array, carried) in enumerate(
            zip(starts, loop.initial, loop.carried, strict=True)
        ):
            if not isinstance(start, Held):
                state.append(start)
                continue
            held_array = expressed(self.context, start, array)
            if place in unchanged_places and carried == array:
                # The turns judge what they only read. Another array is a hint that the
                # loop is another, and no more.
                if held_array is None:
                    mismatches += 1
                else:
                    matches += 1
                state.append(start)
                continue
            if (
                held_array is None
                or held_array.idiom is not None
                or held_array.dropped_axes
            ):
                return None
            sharding = shardings[place] if len(shardings) == len(starts) else ""
            try:
                held = self._carried(held_array, carried, sharding, shapes[place])
            except Unjudged as error:
                reason = error
                held = start
            matches += 1
            state.append(held)
        return _Trial(
            loop=loop,
            state=state if reason is None else reason,
            matches=matches,
            mismatches=mismatches,
        )

    def _carried(
        self,
        held_array: Held,
        carried: Global,
        sharding: str,
        shape: tuple[int, ...],
    ) -> Result:
        """An array at the start of a turn. Where nothing changes along a dimension of
        the first one, a guess from the loop's sharding, which the turn has to confirm.
        """
        if not held_array.is_finished:
            raise Unjudged("a loop that starts with an unfinished sum")
        guess: list[Cut] | None = None
        cuts = []
        for place, axis in enumerate(held_array.axes):
            if axis is not None:
                cuts.append(axis.cut)
                continue
            if guess is None:
                guess = axes_of(self.context.cuts, sharding, carried.shape, shape)
            cuts.append(guess[place])
        return held_of(carried, shape, cuts)

    def _settled_results(
        self,
        loop: Loop,
        starts: Sequence[Result],
        state: Sequence[Result],
        names: Mapping[str, str],
    ) -> list[Result] | None:
        """The results of a loop, once a turn leaves what it carries as it was; `None` if
        it does not settle, or if its condition is not the whole program's.
        """
        state = list(state)
        for _ in range(_TURNS):
            goes_on = self.run(names["condition"], [tuple(state)])
            if isinstance(goes_on, Held) and goes_on.root != loop.goes_on.view.root:
                return None
            after = list(leaves_of(self.run(names["body"], [tuple(state)])))
            is_settled = True
            for place, (now, turned) in enumerate(zip(state, after, strict=True)):
                held_after = self._after_turn(now, turned, loop.after_turn[place])
                if held_after is None:
                    return None
                if held_after != now:
                    state[place] = held_after
                    is_settled = False
            if is_settled:
                return self._loop_results(loop, starts, state, goes_on)
        return None

    def _after_turn(
        self,
        now: Result,
        turned: Result,
        array: Global,
    ) -> "Result | None":
        """What a loop carries at the start of the next turn, where `now` was before
        this one and `turned` is after it; `None` if the turn changes how it lies.
        `array` is what the whole program's loop carries after the turn.
        """
        if not isinstance(now, Held):
            return now
        if not isinstance(turned, Held):
            return turned
        if turned is now:
            return now
        held_array = expressed(self.context, turned, array)
        if held_array is None or view_of(held_array) != required_view(
            held_array, array
        ):
            raise Unjudged("a loop whose turn is not matched with the whole program's")
        if (
            not held_array.is_finished
            or held_array.idiom is not None
            or held_array.dropped_axes
        ):
            raise Unjudged("a loop that carries an unfinished sum")
        for before, after in zip(now.axes, held_array.axes, strict=True):
            if before is None or after is None:
                continue
            if before.cut is not after.cut:
                return None
        return now

    def _loop_results(
        self,
        loop: Loop,
        starts: Sequence[Result],
        state: Sequence[Result],
        goes_on: Result,
    ) -> list[Result]:
        """The results of a loop whose `state` a turn leaves as it is. What no turn
        changes is what it started with.
        """
        results: list[Result] = []
        for place, held in enumerate(state):
            array = loop.results[place]
            if not isinstance(held, Held) or held is starts[place]:
                results.append(held)
                continue
            if not isinstance(goes_on, Held):
                results.append(goes_on)
                continue
            cuts = [
                self.context.cuts.whole(size) if axis is None else axis.cut
                for axis, size in zip(held.axes, held.shape, strict=True)
            ]
            results.append(held_of(array, held.shape, cuts))
        return results


def _has_form_of(instruction: Instruction, loop: Loop) -> bool:
    """Whether a loop has the name and the number of arrays of one of the whole program."""
    return instruction.op_name == loop.instruction.op_name and _arrays_count(
        instruction
    ) == _arrays_count(loop.instruction)


def _arrays_count(instruction: Instruction) -> int:
    """How many arrays an instruction returns."""
    return len(arrays_in(instruction.result))
