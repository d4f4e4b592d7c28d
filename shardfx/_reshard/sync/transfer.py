"""The plan of a transfer as data: the parts of arrays that each process sends to each
process of another job.
"""

import dataclasses
import functools as ft
from collections.abc import Mapping

from ..._convert import Struct
from .kinds import PROCESS, SentLeaf, SentPiece, TransferKind, hash_of, with_names


@dataclasses.dataclass(frozen=True, eq=False)
class TransferPlan:
    """The parts of arrays that each process of one job sends to each process of another
    job. It is made by [`shardfx._reshard.sync.plan_transfer`][].

    **Arguments:**

    - `settings`: a hash of the meshes, the processes and the limit.
    - `senders`, `receivers`: the process of each device of the two jobs, in the order
      of their meshes.
    - `receiver`: the receiving process, if the plan covers only one; `None` for all.
    - `limit_bytes`: the most bytes that are sent to a process at a time.
    - `sources`: by path, the shape and dtype of each array that is read (for PRNG keys,
      of their key data).
    - `leaves`: the arrays of the receiving job.
    - `kinds`: the plans of the leaves. Leaves that differ only in the paths of their
      sources share one.
    """

    __module__ = "shardfx.sync"

    settings: str
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    receiver: int | None
    limit_bytes: int
    sources: Mapping[str, Struct]
    kinds: tuple[TransferKind, ...]
    leaves: tuple[SentLeaf, ...]

    @ft.cached_property
    def digest(self) -> str:
        """A hash of the plan. A plan for all receivers and a plan for one of them have
        the same hash.
        """
        return hash_of([self.settings, *[leaf.digest for leaf in self.leaves]])

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

    def rounds(self, sender: int, receiver: int) -> list[list[SentPiece]]:
        """The parts of arrays that one process sends another, as a list for each round
        (the parts that are sent together).

        A round has at most `limit_bytes`, or one larger part. The `sender` -1 stands
        for constants, which are not sent.
        """
        transfers_of_kind = [
            [
                tuple(map(kind.transfer, numbers))
                for numbers in kind.sent(sender, receiver)
            ]
            for kind in self.kinds
        ]
        sizes_of_kind = [
            [places[0].bytes for places in transfers] for transfers in transfers_of_kind
        ]
        rounds: list[list[SentPiece]] = []
        remaining_bytes = 0
        for number, leaf in enumerate(self.leaves):
            names = dict(zip(self.kinds[leaf.kind].names, leaf.names, strict=True))
            transfers = transfers_of_kind[leaf.kind]
            for places, size in zip(transfers, sizes_of_kind[leaf.kind], strict=True):
                if not rounds or size > remaining_bytes:
                    rounds.append([])
                    remaining_bytes = self.limit_bytes
                named = tuple([with_names(transfer, names) for transfer in places])
                rounds[-1].append(SentPiece(leaf=number, places=named))
                remaining_bytes -= size
        return rounds

    def senders_to(self, receiver: int) -> list[int]:
        """The numbers of the processes that send bytes to a receiving process, in
        ascending order.
        """
        senders: set[int] = set()
        for kind in self.kinds:
            processes = kind.rows[kind.receivers == receiver, PROCESS]
            senders.update(processes.tolist())
        # Constants are sent by nobody.
        return sorted(senders - {-1})
