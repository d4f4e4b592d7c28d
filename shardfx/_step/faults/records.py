"""The records of faults, read from the package's TOML files."""

import dataclasses
import functools as ft
import importlib.resources
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

import jax


@dataclasses.dataclass(frozen=True)
class ArrayPredicate:
    """What specs and shapes answer: an array of this form is sharded along both of its
    main dimensions.

    - `kind`: "square" is a matrix of two equal dimensions, which may be stacked.
      "kernel" is the kernel of a convolution over two or more dimensions; its main
      dimensions are its channels.
    - `unused_axes`: the fewest mesh axes of two or more devices that shard no dimension
      of the array.
    - `alone`: whether no array of the same stack may be sharded the other way round, as
      the second matrix of a pair is.
    """

    kind: Literal["square", "kernel"]
    unused_axes: int = 0
    alone: bool = False


@dataclasses.dataclass(frozen=True)
class OperationPredicate:
    """What only the step answers: how the arrays of one of its operations are sharded.

    - `sharded`: the dimensions that are sharded. "windows" are those along which a
      convolution slides, "channels" are both channel dimensions of its kernel.
      "groups" is the dimension over which the gradient of a grouped kernel sums.
      "unevenly" is any dimension that its shards do not divide.
    - `unused_axes`: the fewest mesh axes of two or more devices that shard no dimension
      of the first operand.
    """

    sharded: Literal["windows", "channels", "groups", "unevenly"]
    unused_axes: int = 0


@dataclasses.dataclass(frozen=True)
class Runs:
    """The versions of JAX with which the program of a fault was run, by what came of
    it.
    """

    wrong: tuple[str, ...] = ()
    right: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Fault:
    """A program that XLA's partitioner computes wrongly, with some version of JAX.

    - `id`: its name, such as "residual-order".
    - `pattern`: what the program is.
    - `operations`: StableHLO's names of the operations that go wrong.
    - `effect`: what comes out wrong, and by how much.
    - `met_by`: who meets it.
    - `mended_by`: what makes the numbers right.
    - `repro`: the file of its program in the repository.
    - `arrays`, `operation`: its predicates; `None` if only a run shows the fault.
    - `runs`: the versions of JAX that were run, by partitioner: "shardy" or "gspmd".
    - `flagged`, `wrong`: how many programs that a predicate selects were run, and how
      many of them were wrong.
    """

    id: str
    pattern: str
    operations: tuple[str, ...]
    effect: str
    met_by: str
    mended_by: str
    repro: str
    arrays: ArrayPredicate | None
    operation: OperationPredicate | None
    runs: Mapping[str, Runs]
    flagged: int = 0
    wrong: int = 0

    def is_right_with(self, version: str) -> bool:
        """Whether the program was run with this version of JAX and was right."""
        return version in self.runs.get("shardy", Runs()).right

    @property
    def is_precise(self) -> bool:
        """Whether at least half of the programs that the predicate selects are wrong."""
        return self.flagged > 0 and 2 * self.wrong >= self.flagged

    @property
    def versions_text(self) -> str:
        """The versions of JAX that were run, and the installed one if it was not."""
        runs = self.runs.get("shardy", Runs())
        parts = []
        if runs.wrong:
            parts.append(f"wrong with JAX {', '.join(runs.wrong)}")
        if runs.right:
            parts.append(f"right with JAX {', '.join(runs.right)}")
        if jax.__version__ not in (*runs.wrong, *runs.right):
            parts.append(f"not run with JAX {jax.__version__}")
        return ", ".join(parts)


@ft.lru_cache(maxsize=1)
def fault_records() -> tuple[Fault, ...]:
    """All records, by the names of their files."""
    folder = importlib.resources.files("shardfx._step.faults").joinpath("records")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    texts = [
        file.read_text(encoding="utf-8")
        for file in files
        if file.name.endswith(".toml")
    ]
    return tuple(fault_of(tomllib.loads(text)) for text in texts)


def fault_of(record: Mapping[str, Any]) -> Fault:
    """The fault of a record as TOML has it. Raises `TypeError` for a field that the
    language of records does not have.
    """
    fields = dict(record)
    # The counts `flagged` and `wrong`.
    fields.update(fields.pop("precision", {}))
    arrays = fields.pop("arrays", None)
    if arrays is not None:
        arrays = ArrayPredicate(**arrays)
    operation = fields.pop("operation", None)
    if operation is not None:
        operation = OperationPredicate(**operation)
    runs = {}
    for partitioner, versions in fields.pop("runs", {}).items():
        runs[partitioner] = Runs(**{key: tuple(versions[key]) for key in versions})
    operations = tuple(fields.pop("operations"))
    return Fault(
        arrays=arrays,
        operation=operation,
        runs=runs,
        operations=operations,
        **fields,
    )
