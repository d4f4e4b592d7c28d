"""The plan that was saved with a checkpoint."""

import json
import os

from .._ground.errors import CheckpointError
from .._ground.misuse import called
from .._plan import ShardPlan
from . import _safetensors as safetensors
from ._address import Address, Where, address_of, shown
from ._files import inside, member, place, read_json
from ._formats import read_index
from ._objects import ObjectPlace
from ._parts import PLAN_FILE_KEY, SET_INDEX
from ._place import Place
from ._staging import PLAN


@called("saved_plan(path)")
def saved_plan(path: Where, like: object = None) -> ShardPlan:
    """The plan that `save` wrote with a checkpoint.

    **Arguments:**

    - `path`: the path that was given to `save`.
    - `like`: the planned tree. Without it, nodes other than dicts, lists and tuples,
      such as modules, become dicts.

    **Returns:**

    The plan, without devices; place it on devices with [`shardfx.ShardPlan.on`][].

    **Raises:**

    `CheckpointError` if there is no plan, `PlanFormatError` if it is damaged.
    """
    name = shown(path)
    address = address_of(path)
    if isinstance(address, Address):
        text = _plan_in_store(address)
        if text is None:
            raise _no_plan(name)
        return ShardPlan.from_json(text, like)
    path = address
    if os.path.isfile(os.path.join(path, PLAN)):
        where = place(path, None)
        # The text is first parsed as untrusted JSON, then by the plan's own reader.
        content = read_json(where, inside(where, PLAN))
        text = json.dumps(content)
    elif os.path.isfile(os.path.join(path, SET_INDEX)):
        # It may have been copied from a store.
        text = _plan_of_set(place(path, None))
    else:
        text = (
            None
            if os.path.isdir(path)
            else read_index(path).metadata.get(safetensors.PLAN_KEY)
        )
    if text is None:
        raise _no_plan(name)
    return ShardPlan.from_json(text, like)


def _no_plan(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name} holds no plan: `save(path, tree, plan)` writes one, unless by a map, or"
        " of arrays on no mesh or on several."
    )


def _plan_in_store(address: Address) -> str | None:
    """The text of the plan of a checkpoint in a store; `None` if it has none."""
    if address.name.endswith(".safetensors"):
        spec = {**address.spec, "path": address.path}
        return read_index(spec).metadata.get(safetensors.PLAN_KEY)
    return _plan_of_set(ObjectPlace(address))


def _plan_of_set(where: Place) -> str | None:
    """The text of the plan that the index of a set names; `None` if it names none."""
    content = read_json(where, where.inside(SET_INDEX))
    name = member(content, "metadata", PLAN_FILE_KEY)
    if not isinstance(name, str):
        return None
    return json.dumps(read_json(where, where.inside(name)))
