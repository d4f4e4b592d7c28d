"""Loops: what they carry lies after each turn as it did before."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ..hlo_text import Instruction, arrays_in
from .cuts import Cut
from .held import Context, Held, Result, view_of
from .matching import expressed
from .results import held_of, leaves_of, required_view
from .shardings import axes_of, shardings_in
from .values import Global, Loop, unchanged
from .verdict import Unjudged


# Turns of a loop after which what it carries has to be settled.
_TURNS = 6
# Goes through a computation of the program of one device with these arguments.
Run: TypeAlias = Callable[[str, Sequence[Result]], Result]


class Loops:
    """The loops of a program. `run` goes through one of its computations."""

    def __init__(self, context: Context, run: Run):
        self.context = context
        self.run = run
        self.taken: list[int] = []

    def loop(self, instruction: Instruction, initial: Result) -> tuple[Result, ...]:
        """The results of a loop. Raises `Unjudged` if it is none of the whole program's,
        or if a turn changes how its values lie.
        """
        starts = list(leaves_of(initial))
        names = dict(instruction.called)
        reason = "no loop of the whole program starts like this"
        for loop in self.context.whole.values.loops:
            if len(loop.initial) != len(starts) or loop.number in self.taken:
                continue
            if not _may_be(instruction, loop):
                continue
            state = self._initial_state(loop, starts, instruction, names["body"])
            if state is None:
                continue
            self.taken.append(loop.number)
            try:
                results = self._turned(loop, starts, state, names)
            finally:
                self.taken.pop()
            if results is not None:
                return tuple(results)
            reason = "a loop whose turns change how its values lie"
        # What is inside is judged as far as it goes.
        raise Unjudged(reason)

    def _initial_state(
        self,
        loop: Loop,
        starts: Sequence[Result],
        instruction: Instruction,
        body: str,
    ) -> list[Result] | None:
        """What the devices hold at the start of a turn; `None` if the loop of the whole
        program starts with other values.
        """
        same = unchanged(self.context.module, body, len(starts))
        shardings = shardings_in(loop.instruction.attributes)
        shapes = [array.shape for array in arrays_in(instruction.result)]
        state: list[Result] = []
        for place, (start, array, carried) in enumerate(
            zip(starts, loop.initial, loop.carried, strict=True)
        ):
            if not isinstance(start, Held):
                state.append(start)
                continue
            if place in same and carried == array:
                state.append(start)
                continue
            seen = expressed(self.context, start, array)
            if seen is None or seen.idiom is not None or seen.rest:
                return None
            sharding = shardings[place] if len(shardings) == len(starts) else ""
            state.append(self._carried(seen, array, carried, sharding, shapes[place]))
        return state

    def _carried(
        self,
        seen: Held,
        initial: Global,
        carried: Global,
        sharding: str,
        shape: tuple[int, ...],
    ) -> Result:
        """An array at the start of a turn. Where nothing changes along a dimension of
        the first one, a guess from the loop's sharding, which the turn has to confirm.
        """
        del initial
        if not seen.is_finished:
            raise Unjudged("a loop that starts with an unfinished sum")
        guess: list[Cut] | None = None
        cuts = []
        for place, axis in enumerate(seen.axes):
            if axis is not None:
                cuts.append(axis.cut)
                continue
            if guess is None:
                guess = axes_of(self.context.cuts, sharding, carried.shape, shape)
            cuts.append(guess[place])
        return held_of(carried, shape, cuts)

    def _turned(
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
                settled = self._after_turn(now, turned, loop.ahead[place])
                if settled is None:
                    return None
                if settled != now:
                    state[place] = settled
                    is_settled = False
            if is_settled:
                return self._loop_results(loop, starts, state, goes_on)
        return None

    def _after_turn(
        self, now: Result, turned: Result, array: Global
    ) -> "Result | None":
        """What a loop carries after a turn; `None` if a turn changes it."""
        if not isinstance(now, Held):
            return now
        if not isinstance(turned, Held):
            return turned
        if turned is now:
            return now
        seen = expressed(self.context, turned, array)
        if seen is None or view_of(seen) != required_view(seen, array):
            raise Unjudged("a loop whose turn is not matched with the whole program's")
        if not seen.is_finished or seen.idiom is not None or seen.rest:
            raise Unjudged("a loop that carries an unfinished sum")
        for before, after in zip(now.axes, seen.axes, strict=True):
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


def _may_be(instruction: Instruction, loop: Loop) -> bool:
    return instruction.op_name == loop.instruction.op_name and _arrays_count(
        instruction
    ) == _arrays_count(loop.instruction)


def _arrays_count(instruction: Instruction) -> int:
    return len(arrays_in(instruction.result))
