"""The plan that was saved with a checkpoint."""

import contextlib
import json
import os

from .._ground.errors import CheckpointError
from .._ground.misuse import called
from .._plan import ShardPlan
from . import _safetensors as safetensors
from ._address import Address, Where, address_of, shown
from ._files import local_place, member, read_json
from ._formats import read_index
from ._objects import ObjectPlace
from ._parts import PLAN_FILE_KEY, SET_INDEX
from ._place import MissingError, Place
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
    text = _text_of_plan(path)
    if text is None:
        raise CheckpointError(
            f"{shown(path)} holds no plan: `save(path, tree, plan)` writes one, unless"
            " by a map, or of arrays on no mesh or on several."
        )
    return ShardPlan.from_json(text, like)


def _text_of_plan(path: Where) -> str | None:
    """The text of the plan of a checkpoint; `None` if it has none."""
    target = address_of(path)
    place: Place
    if isinstance(target, str) and os.path.isdir(target):
        place = local_place(target, None)
    elif isinstance(target, Address) and not target.name.endswith(".safetensors"):
        place = ObjectPlace(target)
    else:
        return read_index(path).metadata.get(safetensors.PLAN_KEY)
    # In a store the index of the set names the file. It is read first, since a store
    # denies an object that is missing to those who may not list.
    content = None
    with contextlib.suppress(MissingError):
        content = read_json(place, place.inside(SET_INDEX))
    name = member(content, "metadata", PLAN_FILE_KEY)
    # The text is first parsed as untrusted JSON, then by the plan's own reader.
    if isinstance(name, str):
        return json.dumps(read_json(place, place.inside(name)))
    # A save to a disk writes a file of this name.
    with contextlib.suppress(MissingError):
        return json.dumps(read_json(place, place.inside(PLAN)))
    return None
