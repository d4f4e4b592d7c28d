"""A transfer plan as JSON: what it was planned from, and its pieces, which are planned anew when it is read."""

import json

import numpy as np

from ..._convert import Counted, TreeMap
from ..._ground.errors import PlanFormatError
from ..._plan import ShardPlan
from .planning import plan_transfer
from .transfer import Form, TransferPlan


_VERSION = 2


def to_json(plan: TransferPlan) -> str:
    """A transfer plan as JSON text: both jobs' plans, the map, and the pieces as columns of whole numbers.

    **Arguments:**

    - `plan`: the plan, or one receiver's part.
    """
    asked = {
        "src": plan.src.to_json(),
        "dst": plan.dst.to_json(),
        "map": None if plan.map is None else plan.map.to_json(),
        "processes": (plan.senders, plan.receivers),
        "receiver": plan.receiver,
        "limit_bytes": plan.limit_bytes,
    }
    return json.dumps({"version": _VERSION, "digest": plan.digest, "asked": asked, "pieces": _pieces(plan)})


def from_json(text: str) -> TransferPlan:
    """The plan that `to_json` wrote. It is planned again, and the text has to be what that gives, piece by piece.

    **Arguments:**

    - `text`: the JSON text.

    **Raises:**

    `PlanFormatError` for text that is no such plan.
    """
    try:
        data = json.loads(text)
        if data["version"] != _VERSION:
            raise PlanFormatError(f"a TransferPlan of version {data['version']!r:.20}; this reads version {_VERSION}.")
        made = _planned(**data["asked"])
        if (data["digest"], data["pieces"]) != (made.digest, _pieces(made)):
            raise ValueError("it is not what planning gives: it was damaged, or planned by another version")
    except PlanFormatError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise PlanFormatError(
            f"this is no TransferPlan's JSON ({type(error).__name__}: {error}); write it with `shardfx.sync.to_json`."
        ) from error
    return made


def _planned(
    src: str, dst: str, map: str | None, processes: list[list[int]], receiver: int | None, limit_bytes: int
) -> TransferPlan:
    if any(type(number) is not int for number in (*processes[0], *processes[1], limit_bytes)):
        raise ValueError("processes or a limit that are no whole numbers")
    ends = ShardPlan.from_json(src), ShardPlan.from_json(dst)
    made = None if map is None else TreeMap.from_json(map)
    counts = (processes[0], processes[1])
    return plan_transfer(*ends, made, processes=counts, receiver=receiver, limit_bytes=limit_bytes)


def _pieces(plan: TransferPlan) -> str:
    kinds = [
        {
            "names": kind.names,
            "rank": kind.rank,
            "buffers": kind.buffers,
            "forms": [_form(form) for form in kind.forms],
            "columns": kind.rows.T.tolist(),
        }
        for kind in plan.kinds
    ]
    sources = [[path, one.shape, str(one.dtype)] for path, one in plan.sources.items()]
    leaves = [[*leaf[:2], str(leaf.dtype), *leaf[3:]] for leaf in plan.leaves]
    return json.dumps({"sources": sources, "leaves": leaves, "kinds": kinds}, separators=(",", ":"))


def _form(form: Form) -> list[object]:
    value = form.value
    casts = [list(to) if isinstance(to, Counted) else str(np.dtype(to)) for to in value.casts]
    scales = None if form.scales is None else str(form.scales)
    own = [value.path, value.number, value.scale, casts]
    return [own, form.factors, form.rank, form.casts, str(form.sent), scales]
