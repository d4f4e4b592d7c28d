"""What a search is asked for: the devices, and a step with arrays."""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .. import chips
from .._ground.errors import LeafTypeError, MeshError
from .emulated import EMULATED


class Asked(NamedTuple):
    """The devices of a search: how many, of which kind, in how many slices; `target` is one slice, if it was named."""

    total: int
    chip: chips.Chip
    target: str | None
    slices: int
    # How many slices as `target` there are.
    targets: int


def asked_for(devices: int | str | Sequence[Any], chip: str | chips.Chip | None, slices: int = 1) -> Asked:
    """What a search is for; `devices` may say how many slices there are, as "tpu:v5p:4x4x4*2"."""
    text, star, many = devices.partition("*") if isinstance(devices, str) else (devices, "", "")
    times = 1
    if star:
        if not re.fullmatch(r"[1-9]\d*", many):
            raise MeshError(f"`devices={devices!r}` does not say how many slices there are; write two as `{text}*2`.")
        times = int(many)
        if slices not in (1, times):
            raise MeshError(f"`devices={devices!r}` has {times} slices, and `slices={slices}`; leave `slices` out.")
    count, kind, target = _hardware(text, chip)
    found = Asked(count * times, kind, target, max(slices, times), times)
    if found.slices < 1 or found.total % found.slices:
        raise MeshError(f"`slices={slices}` does not divide {found.total} devices; each slice has equally many.")
    return found


def _hardware(devices: int | str | Sequence[Any], chip: str | chips.Chip | None) -> tuple[int, chips.Chip, str | None]:
    """How many devices, of which kind, and the slice that they are, if one was named."""
    if isinstance(chip, str) and chip.lower() == "cpu":
        chip = EMULATED
    if isinstance(devices, str):
        found = re.fullmatch(r"(\w+:\w+|cpu):([1-9]\d*(?:x[1-9]\d*)*)", devices)
        if found is None:
            raise MeshError(
                f"`devices={devices!r}` is no slice; write it as `tpu:v5p:4x4x4`, or give a number and `chip=`."
            )
        count = math.prod(map(int, found[2].split("x")))
        if found[1] == "cpu":
            return count, EMULATED if chip is None else chips.find(chip), None
        kind = chips.find(found[1] if chip is None else chip)
        return count * kind.devices_per_chip, kind, devices
    if isinstance(devices, int):
        if devices < 1:
            raise MeshError(f'`devices={devices}` are none; give how many there are, as `devices=8, chip="v5e"`.')
        if chip is None:
            raise MeshError(f'`devices={devices}` does not say which chip; add one, as `chip="v5e"`.')
        return devices, chips.find(chip), None
    here = tuple(devices)
    if not here:
        raise MeshError("`devices` is empty; give JAX's devices, as `devices=jax.devices()`, or how many there are.")
    of_these = EMULATED if here[0].platform == "cpu" else here[0].device_kind
    return len(here), chips.find(of_these if chip is None else chip), None


def device_count(devices: int | str | Sequence[Any], chip: str | chips.Chip | None = None) -> int:
    """How many devices a search for these is for."""
    return asked_for(devices, chip).total


def require_arrays(args: Sequence[Any]) -> None:
    """There must be something to share out."""
    if any(eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct | np.ndarray) for leaf in jax.tree.leaves(args)):
        return
    found = ", ".join(type(arg).__name__ for arg in args) or "nothing"
    raise LeafTypeError(
        f"the arguments of the step hold no arrays ({found}); pass arrays, or structs of them: "
        "`jax.ShapeDtypeStruct((64, 128), jnp.float32)`, or `eqx.filter_eval_shape(make, key)` for a model."
    )


class Tracing:
    """Adds to an error that the user's own function raised what was being done with it."""

    def __init__(self, args: Sequence[Any]):
        self.args = args

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            shapes = "; ".join(eqx.tree_pformat(arg, width=10**6, struct_as_array=True)[:300] for arg in self.args)
            error.add_note(f"`search` traced the step with arguments of these shapes, without running it: {shapes}")
