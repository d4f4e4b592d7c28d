"""Loops: what they carry lies after each turn as it did before."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ..hlo_text import Instruction, arrays_in
from .cuts import Cut
from .elements import expressed
from .held import Context, Held, Result, require_whole_scalar, view_of
from .record import Failures, Record
from .results import held_of, leaves_of, required_view
from .shardings import cuts_of, shardings_in
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
    """The loops of a program, and the `record` of what its judge finds.

    The judge's method `run` is passed to each call. An attribute for it would make a
    cycle with the judge, and the programs would stay in memory until the garbage
    collector finds it.
    """

    def __init__(self, context: Context, record: Record):
        self.context = context
        self.record = record
        # The numbers of the loops whose turns are being judged.
        self.taken: list[int] = []
        # For each loop of the whole program, the body that was judged as its.
        self.judged_bodies: dict[int, str] = {}

    def loop(
        self,
        instruction: Instruction,
        initial: Result,
        run: Run,
    ) -> tuple[Result, ...]:
        """The results of the loop `instruction`, which starts with `initial`. Raises
        `Unjudged` if it is none of the whole program's, or if a turn changes how its
        values lie. `run` goes through a computation of the program.
        """
        starting_leaves = list(leaves_of(initial))
        called_names = dict(instruction.called)
        trials = self._trials(instruction, starting_leaves, called_names["body"])
        if not trials:
            raise Unjudged("no loop of the whole program starts like this")
        if len(trials) > 1:
            best = self._best(trials, starting_leaves, called_names, run)
        else:
            best = trials[0]
        self.judged_bodies[best.loop.number] = called_names["body"]
        return self._results_as(best, starting_leaves, called_names, run)

    def _trials(
        self,
        instruction: Instruction,
        starting_leaves: Sequence[Result],
        body: str,
    ) -> list[_Trial]:
        """The loops of the whole program that the loop `instruction` may be, which
        starts with the arrays `starting_leaves`: those of its name that start with
        these arrays. Several calls of a function have one name, and an array that is
        not judged may be any. Loops that were not judged as another body come first,
        and of them those with most equal arrays.
        """
        trials: list[_Trial] = []
        for loop in self.context.whole_program.values.loops:
            if len(loop.initial) != len(starting_leaves) or loop.number in self.taken:
                continue
            if not _has_form_of(instruction, loop):
                continue
            trial = self._trial(loop, starting_leaves, instruction, body)
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
        starting_leaves: Sequence[Result],
        called_names: Mapping[str, str],
        run: Run,
    ) -> _Trial:
        """The trial in whose turns least is not judged, and least wrong. What the turns
        note in the record is forgotten. `called_names` has the loop's computations:
        "condition" and "body".
        """
        best = trials[0]
        fewest: Failures | None = None
        for trial in trials:
            record_before = self.record.copy()
            try:
                self._results_as(trial, starting_leaves, called_names, run)
            except Unjudged:
                continue
            finally:
                failures = self.record.failures_since(record_before)
                self.record.restore(record_before)
            if fewest is None or failures < fewest:
                best = trial
                fewest = failures
            if fewest == (0, 0):
                break
        return best

    def _results_as(
        self,
        trial: _Trial,
        starting_leaves: Sequence[Result],
        called_names: Mapping[str, str],
        run: Run,
    ) -> tuple[Result, ...]:
        """The results of a loop, if it is the loop of `trial` in the whole program.
        Raises `Unjudged` if what it carries does not settle.
        """
        if isinstance(trial.state, Unjudged):
            raise trial.state
        self.taken.append(trial.loop.number)
        try:
            results = self._settled_results(
                loop=trial.loop,
                starting_leaves=starting_leaves,
                state=trial.state,
                called_names=called_names,
                run=run,
            )
        finally:
            self.taken.pop()
        if results is None:
            # What is inside is judged as far as it goes.
            raise Unjudged("a loop whose turns change how its values lie")
        return tuple(results)

    def _trial(
        self,
        loop: Loop,
        starting_leaves: Sequence[Result],
        instruction: Instruction,
        body: str,
    ) -> _Trial | None:
        """What the devices hold at the start of a turn, if the loop `instruction` of
        the program of one device, which starts with `starting_leaves`, is `loop` of the
        whole program; `None` if that starts with other arrays.
        """
        unchanged_places = unchanged(self.context.module, body, len(starting_leaves))
        shardings = shardings_in(loop.instruction.attributes)
        shard_shapes = [array.shape for array in arrays_in(instruction.result)]
        state: list[Result] = []
        matches = 0
        mismatches = 0
        reason: Unjudged | None = None
        for place, (leaf, array, carried) in enumerate(
            zip(starting_leaves, loop.initial, loop.carried, strict=True)
        ):
            if not isinstance(leaf, Held):
                state.append(leaf)
                continue
            held_array = expressed(self.context, leaf, array)
            if place in unchanged_places and carried == array:
                # The turns judge what they only read. Another array is a hint that the
                # loop is another, and no more.
                if held_array is None:
                    mismatches += 1
                else:
                    matches += 1
                state.append(leaf)
                continue
            if (
                held_array is None
                or held_array.idiom is not None
                or held_array.dropped_axes
            ):
                return None
            sharding = (
                shardings[place] if len(shardings) == len(starting_leaves) else ""
            )
            try:
                held = self._carried(held_array, carried, sharding, shard_shapes[place])
            except Unjudged as error:
                reason = error
                held = leaf
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
        """An array at the start of a turn, which is `carried` in the whole program and
        has the shape `shape` on one device. It lies as `held_array` does, with which
        the loop starts. Where nothing changes along a dimension of that, the cut is a
        guess from the loop's sharding, which the turn has to confirm.
        """
        if not held_array.is_finished:
            raise Unjudged("a loop that starts with an unfinished sum")
        guessed_cuts: list[Cut] | None = None
        cuts = []
        for place, axis in enumerate(held_array.axes):
            if axis is not None:
                cuts.append(axis.cut)
                continue
            if guessed_cuts is None:
                guessed_cuts = cuts_of(
                    self.context.cuts, sharding, carried.shape, shape
                )
            cuts.append(guessed_cuts[place])
        return held_of(carried, shape, cuts)

    def _settled_results(
        self,
        loop: Loop,
        starting_leaves: Sequence[Result],
        state: Sequence[Result],
        called_names: Mapping[str, str],
        run: Run,
    ) -> list[Result] | None:
        """The results of `loop`, once a turn leaves what it carries as it was; `None`
        if it does not settle, or if its condition is not the whole program's. `state`
        is what the devices hold at the start of a turn.
        """
        state = list(state)
        for _ in range(_TURNS):
            goes_on = run(called_names["condition"], [tuple(state)])
            if isinstance(goes_on, Held):
                if goes_on.root != loop.goes_on.view.root:
                    return None
                require_whole_scalar(goes_on, "a loop")
            turned_leaves = list(leaves_of(run(called_names["body"], [tuple(state)])))
            is_settled = True
            for place, (before_turn, after_turn) in enumerate(
                zip(state, turned_leaves, strict=True)
            ):
                if after_turn is before_turn and _is_unchanged(loop, place):
                    continue
                held_after = self._after_turn(
                    before_turn, after_turn, loop.after_turn[place]
                )
                if held_after is None:
                    return None
                if held_after != before_turn:
                    state[place] = held_after
                    is_settled = False
            if is_settled:
                return self._loop_results(loop, starting_leaves, state, goes_on)
        return None

    def _after_turn(
        self,
        before_turn: Result,
        after_turn: Result,
        array: Global,
    ) -> "Result | None":
        """What a loop carries at the start of the next turn, where `before_turn` was
        before this one and `after_turn` is after it; `None` if the turn changes how it
        lies. `array` is what the whole program's loop carries after the turn.
        """
        if not isinstance(before_turn, Held):
            return before_turn
        if not isinstance(after_turn, Held):
            return after_turn
        held_array = expressed(self.context, after_turn, array)
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
        for axis_before, axis_after in zip(
            before_turn.axes, held_array.axes, strict=True
        ):
            if axis_before is None or axis_after is None:
                continue
            if axis_before.cut is not axis_after.cut:
                return None
        return before_turn

    def _loop_results(
        self,
        loop: Loop,
        starting_leaves: Sequence[Result],
        state: Sequence[Result],
        goes_on: Result,
    ) -> list[Result]:
        """The results of a loop whose `state` a turn leaves as it is. What no turn
        changes is what it started with. `goes_on` is the result of its condition.
        """
        results: list[Result] = []
        for place, held in enumerate(state):
            array = loop.results[place]
            if not isinstance(held, Held) or held is starting_leaves[place]:
                results.append(held)
                continue
            if not isinstance(goes_on, Held):
                results.append(goes_on)
                continue
            cuts = []
            for axis, size in zip(held.axes, held.shape, strict=True):
                cuts.append(self.context.cuts.whole(size) if axis is None else axis.cut)
            results.append(held_of(array, held.shape, cuts))
        return results


def _is_unchanged(loop: Loop, place: int) -> bool:
    """Whether a turn of the whole program leaves an array of the loop as it is."""
    return loop.after_turn[place] == loop.carried[place]


def _has_form_of(instruction: Instruction, loop: Loop) -> bool:
    """Whether a loop has the name and the number of arrays of one of the whole
    program.
    """
    return instruction.op_name == loop.instruction.op_name and _arrays_count(
        instruction
    ) == _arrays_count(loop.instruction)


def _arrays_count(instruction: Instruction) -> int:
    """How many arrays an instruction returns."""
    return len(arrays_in(instruction.result))
