"""The plan of a transfer as data: the parts of arrays that each process sends to each
process of another job.
"""

import dataclasses
import functools as ft
from collections.abc import Mapping
from typing import Any

from .codec import digest_of, fields_of, text_of
from .kinds import PROCESS, PlanFields, SentLeaf, SourceLeaf, TransferKind


@dataclasses.dataclass(frozen=True, eq=False)
class TransferPlan:
    """The parts of arrays that each process of one job sends to each process of another
    job. It is made by [`shardfx._reshard.sync.plan_transfer`][].

    **Arguments:**

    - `settings`: a hash of the meshes, the processes and the limit.
    - `mesh`: the axes of the sending job's mesh, with their sizes.
    - `senders`, `receivers`: the process of each device of the two jobs, in the order
      of their meshes.
    - `receiver`: the receiving process, if the plan covers only one; `None` for all.
    - `memory_limit_bytes`: the most bytes that are sent to a process at a time.
    - `sources`: the arrays of the sending job, by path.
    - `leaves`: the arrays of the receiving job.
    - `kinds`: the plans of the leaves. Leaves that differ only in the paths of their
      sources share one.
    """

    __module__ = "shardfx.sync"

    settings: str
    mesh: tuple[tuple[str, int], ...]
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    receiver: int | None
    memory_limit_bytes: int
    sources: Mapping[str, SourceLeaf]
    kinds: tuple[TransferKind, ...]
    leaves: tuple[SentLeaf, ...]

    @ft.cached_property
    def digest(self) -> str:
        """A hash of the plan. A plan for all receivers and a plan for one of them have
        the same hash.
        """
        return digest_of(self.settings, self.leaves)

    @ft.cached_property
    def known(self) -> dict[object, object]:
        """A cache of values that the sender or the receiver computes from the plan, for
        later revisions.
        """
        return {}

    @property
    def wire_bytes(self) -> int:
        """The bytes that all processes of the sending job send in total, after casts."""
        bytes_of_kind = [kind.wire_bytes for kind in self.kinds]
        return sum(bytes_of_kind[leaf.kind] for leaf in self.leaves)

    def senders_to(self, receiver: int) -> list[int]:
        """The numbers of the processes that send to a receiving process, in ascending
        order. If it needs no bytes, the first process tells it of new revisions.
        """
        senders: set[int] = set()
        for kind in self.kinds:
            processes = kind.rows[kind.receivers == receiver, PROCESS]
            senders.update(processes.tolist())
        # Constants are sent by nobody.
        senders.discard(-1)
        return sorted(senders or {min(self.senders)})

    def to_json(self) -> str:
        """The plan as JSON text with a checksum, for [`shardfx.sync.TransferPlan.from_json`][]."""
        return text_of(self._fields)

    @staticmethod
    def from_json(text: str) -> "TransferPlan":
        """Reads a plan from the text that `to_json` returned. It checks that the plan
        writes each element of each shard exactly once.

        **Arguments:**

        - `text`: the text.

        **Raises:**

        `PlanFormatError` for any other text.
        """
        return TransferPlan(**fields_of(text)._asdict())

    @property
    def _fields(self) -> PlanFields:
        """The plan's own fields, without what was computed from them."""
        return PlanFields(**self.__getstate__())

    def __getstate__(self) -> dict[str, Any]:
        # What was computed from the plan stays behind: it refers to memory of this
        # process.
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
