"""The steps of a training run, in a directory or in a store: which there are, and how
one is removed.
"""

import os
import re
import secrets

from ._address import Address, Where, below
from ._objects import ObjectPlace
from ._parts import SET_INDEX
from ._staging import remove_partial


# As `save` names them: without leading zeros.
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


class StepFiles:
    """The steps in a directory. Each is a directory that `save` renamed when it was
    complete.
    """

    def __init__(self, directory: str):
        self.directory = directory

    def path(self, step: int) -> str:
        return os.path.join(self.directory, f"step-{step}")

    def numbers(self) -> tuple[int, ...]:
        """The numbers of the complete steps, in order."""
        names = os.listdir(self.directory) if os.path.isdir(self.directory) else []
        numbers = []
        for name in names:
            match = _STEP.fullmatch(name)
            if match is not None and _is_complete(os.path.join(self.directory, name)):
                numbers.append(int(match[1]))
        return tuple(sorted(numbers))

    def holds(self, step: int) -> bool:
        return step in self.numbers()

    def note(self, step: int) -> None:
        """Takes notice of a step that was saved."""

    def remove(self, step: int) -> None:
        """Removes the directory of a step, which is renamed first."""
        # A process that is killed here leaves a directory that `left_over` finds, and
        # no partial checkpoint.
        name = f".step-{step}.partial-{secrets.token_hex(8)}"
        partial = os.path.join(self.directory, name)
        os.rename(self.path(step), partial)
        remove_partial(partial)


def _is_complete(directory: str) -> bool:
    """Whether a directory holds what `save` writes."""
    return any(
        os.path.isfile(os.path.join(directory, name))
        for name in ("model.safetensors", SET_INDEX)
    )


class StepObjects:
    """The steps below an address of a store. An index makes each exist.

    A listing may lag behind. So the steps that were saved here are asked for.
    """

    def __init__(self, where: Where, address: Address, timeout_seconds: float):
        self._where = where
        self._place = ObjectPlace(address, timeout_seconds)
        self._saved: tuple[int, ...] = ()
        self.directory = self._place.directory

    def path(self, step: int) -> Where:
        return below(self._where, f"step-{step}")

    def _index_key(self, step: int) -> str:
        return self._place.address.below(f"step-{step}/{SET_INDEX}").path

    def numbers(self) -> tuple[int, ...]:
        """The numbers of the complete steps, in order: those with an index in the
        listing, and those that were saved here and are there, though the listing lags.
        """
        numbers = set()
        for key in self._place.keys_below(self._place.address.path):
            directory, _, name = key.partition("/")
            match = _STEP.fullmatch(directory)
            if match is not None and name == SET_INDEX:
                numbers.add(int(match[1]))
        late = [step for step in self._saved if step not in numbers]
        numbers |= {step for step in late if self.holds(step)}
        return tuple(sorted(numbers))

    def holds(self, step: int) -> bool:
        return self._place.holds(self._index_key(step))

    def note(self, step: int) -> None:
        """Takes notice of a step that was saved."""
        self._saved = (*self._saved, step)

    def remove(self, step: int) -> None:
        """Removes the objects of a step, its index first."""
        # Without its index the step does not exist. A process that is killed here
        # leaves data that `left_over` finds.
        others = []
        for number in self._saved:
            if number != step:
                others.append(number)
        self._saved = tuple(others)
        self._place.delete(self._index_key(step))
        step_address = self._place.address.below(f"step-{step}")
        self._place.delete_below(step_address.path)
