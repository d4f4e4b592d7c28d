"""Checks that all processes have the same plan."""

import hashlib
import itertools as it
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._convert import TreeMap
from .._ground.errors import (
    LeafTypeError,
    MapError,
    PlanFormatError,
    PlanMismatchError,
)
from .._ground.processes import absent, coordination
from .._plan import ShardPlan, differences


def assert_same_plan(plan: ShardPlan | TreeMap, *, wait_seconds: float = 120.0) -> None:
    """Raises on every process unless all processes have the same plan on the same order
    of devices, or the same map.

    Every process calls `assert_same_plan` once, before it runs a program under the
    plan. Processes with different plans compile different programs, whose collectives
    wait for each other for ever. The processes exchange hashes of 32 bytes, and the
    plans only if their hashes differ.

    **Arguments:**

    - `plan`: the plan of this process, or its [`shardfx.TreeMap`][].
    - `wait_seconds`: the seconds that a process waits for the others to call
      `assert_same_plan`.

    **Raises:**

    `PlanMismatchError` that names two processes and the first leaf or rule in which
    their plans differ, or that names the processes that did not call
    `assert_same_plan`.

    !!! Example

        ```python
        import jax.numpy as jnp
        from shardfx import hosts, MeshSpec, PathRules, plan

        mesh, rules = MeshSpec({"data": 8}), PathRules.parse("w->data")
        hosts.assert_same_plan(plan({"w": jnp.ones(8)}, mesh, paths=rules))
        ```
    """
    if not isinstance(plan, ShardPlan | TreeMap):
        raise LeafTypeError(
            f"`assert_same_plan` compares a ShardPlan or a TreeMap, not"
            f" {type(plan).__name__}; pass what `shardfx.plan(tree, mesh, ...)` returns."
        )
    if jax.process_count() == 1:
        return
    _meet(wait_seconds)
    if isinstance(plan, TreeMap) or plan.jax_mesh is None:
        devices = ""
    else:
        devices = str([*plan.jax_mesh.device_ids.flat])
    identity = f"{type(plan).__name__} {plan.digest} {devices}"
    digest = hashlib.sha256(identity.encode()).digest()
    digests = _exchange(digest)
    if len(set(digests)) == 1:
        return
    # Processes with the plan of process 0 compare it with the first that differs, and
    # the others with process 0.
    this_process = jax.process_index()
    if digests[this_process] == digests[0]:
        differs = [other_digest != digests[0] for other_digest in digests]
        other = differs.index(True)
    else:
        other = 0
    kind = type(plan).__name__
    text = f"{kind}\n{devices}\n{plan.to_json()}"
    texts = _exchange(text.encode("utf-8", "surrogatepass"))
    their_text = texts[other].decode("utf-8", "surrogatepass")
    their_kind, their_devices, theirs = their_text.split("\n", 2)
    if their_kind == kind:
        differing = _differences(plan, theirs)
    else:
        differing = ["one has a plan, the other a map"]
    in_order = (
        f"the devices of the mesh are {devices} in one, {their_devices} in the other"
    )
    first, *others = differing or [in_order]
    what = "map" if isinstance(plan, TreeMap) else "plan"
    further = f" (and {len(others)} more)" if others else ""
    raise PlanMismatchError(
        f"the {what}s of process {this_process} and process {other} differ:"
        f" {first}{further};"
        f" make the {what} from the same values on every process."
    )


def _differences(plan: ShardPlan | TreeMap, theirs: str) -> Sequence[str]:
    """A text for each leaf or rule in which `plan` differs from the plan or map with
    the JSON `theirs`.

    It is empty if only the devices of two plans differ.
    """
    try:
        if isinstance(plan, ShardPlan):
            return differences(plan, ShardPlan.from_json(theirs))
        their_map = TreeMap.from_json(theirs)
        rules = (str(plan).splitlines(), str(their_map).splitlines())
    except (MapError, PlanFormatError) as error:
        return [f"the other cannot be read here ({error})"]
    texts = []
    for ours, other in it.zip_longest(*rules, fillvalue="nothing more"):
        if ours != other:
            texts.append(f"`{ours.strip()}` in one, `{other.strip()}` in the other")
    return texts or ["what they cast, or the order of their rules"]


def _meet(wait_seconds: float) -> None:
    """Waits until every process has called `_meet`. Raises `PlanMismatchError` after
    `wait_seconds`.
    """
    client = coordination()
    if client is None:
        return  # the runtime connects its processes without a coordinator
    fix = (
        "call it once on every process, before the first step; or give a longer"
        " `wait_seconds`"
    )
    try:
        absent_processes = absent(
            client, "shardfx.assert_same_plan", wait_seconds, jax.process_index()
        )
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0][:200]
        raise PlanMismatchError(
            f"the processes do not all call `assert_same_plan` ({first}); {fix}."
        ) from error
    if absent_processes:
        raise PlanMismatchError(
            f"{absent_processes} did not call `assert_same_plan` within"
            f" {wait_seconds:g} s; {fix}."
        )


def _exchange(message: bytes) -> list[bytes]:
    """Sends `message` to all processes. Returns the messages of all processes, in order
    of process index.
    """
    length = np.array([len(message)], np.int32)
    lengths = np.ravel(multihost_utils.process_allgather(length))
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(padded))
    rows = gathered.reshape(len(lengths), -1)
    return [bytes(row[:count]) for row, count in zip(rows, lengths, strict=True)]
