"""What processes compare before they save: their arguments, and a line for each array."""

import hashlib
import itertools as it
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding


Facts = Mapping[str, str]


def different(facts: Mapping[int, Facts]) -> tuple[str, dict[str, list[int]]] | None:
    """The first argument in which processes differ, and which of them gave what."""
    for name in dict.fromkeys(it.chain.from_iterable(facts.values())):
        groups: dict[str, list[int]] = {}
        for process, given in facts.items():
            groups.setdefault(given.get(name, "nothing"), []).append(process)
        if len(groups) > 1:
            return name, groups
    return None


def lines_of(leaves: Sequence[tuple[str, Any]]) -> list[str]:
    """A line for each array; equal on processes that save the same."""
    texts: dict[Any, str] = {}
    lines = []
    for path, value in leaves:
        # Of what every process has by itself, each may have it on devices of its own.
        where = ""
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            if value.sharding not in texts:
                texts[value.sharding] = f" in {_where(value.sharding)}"
            where = texts[value.sharding]
        lines.append(f"leaf `{path}` is {value.dtype}{list(value.shape)}{where}")
    return lines


def digest_of(lines: Sequence[str]) -> str:
    """Equal for equal lines."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def first_difference(ours: Sequence[str], theirs: Sequence[str], processes: Sequence[int]) -> str:
    """Where the lines of two processes first differ."""
    for one, two in it.zip_longest(ours, theirs, fillvalue="nothing more"):
        if one != two:
            return f": {one} on process {processes[0]}, {two} on process {processes[1]}"
    return ""


def _where(sharding: Any) -> str:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return f"{sharding} on devices {sorted(device.id for device in sharding.device_set)}"
    # The text of a mesh leaves out which device is where on it.
    order = digest_of([str(device.id) for device in sharding.mesh.devices.flat])[:8]
    return f"{sharding.spec} on mesh {dict(sharding.mesh.shape)} with device order {order}"
