"""Strategies that shard an array by its shape, such as `fsdp(...)`, and targets of
rules that combine or modify other targets.
"""

import dataclasses
import itertools as it
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from jax.sharding import PartitionSpec

from .._ground.errors import RuleError, SpecError, number_of_bytes, whole_number
from .._ground.misuse import called, refused
from .._ground.spec import axes_of_entries, entries_of
from .pairs import as_names


# For each dimension of an array, the number of elements that no shard may split, such
# as the width of an attention head; 1 if a shard may end at any element.
Units: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Atomic:
    """A target with `unit`, the number of elements that no shard may split; made by
    [`shardfx.atomic`][]. `unit` is an int for a logical name, else a tuple with one int
    per dimension.
    """

    target: Any
    unit: int | tuple[int, ...]

    @property
    def units(self) -> Units:
        if isinstance(self.unit, tuple):
            return self.unit
        return (self.unit,)


@called("atomic(target, unit)")
def atomic(target: object, unit: int | tuple[int, ...]) -> Atomic:
    """A target under which a dimension of `n * unit` elements is sharded only between
    units.

    **Arguments:**

    - `target`: a logical name, as an entry of a leaf's names, or the target of a path
      rule: a spec or a tuple of names.
    - `unit`: the number of elements in a unit. For a name, an int, such as `head_dim`
      for fused heads. For the target of a path rule, a tuple with one int per
      dimension; 1 allows any split.

    **Returns:**

    A value to use instead of `target`.

    **Raises:**

    `SpecError` for a unit smaller than 1, for a name with a tuple as unit, and for
    another target with an int as unit.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import PathRules, atomic

        PathRules([("k_proj/weight", atomic(P("fsdp", "tensor"), (1, 128))), (".*", P())])
        ```
    """
    is_for_all_dims = isinstance(target, PartitionSpec | tuple)
    sizes = unit if isinstance(unit, tuple) else (unit,)
    if is_for_all_dims != isinstance(unit, tuple):
        raise SpecError(
            f"`atomic({target!r}, {unit!r})`: a name takes one int, a whole spec or"
            " tuple of names takes a tuple of ints, one per dimension."
        )
    whole_sizes = []
    for size in sizes:
        whole_size = whole_number(size)
        if whole_size is None or whole_size < 1:
            raise SpecError(
                f"`atomic({target!r}, {unit!r})`: a unit is a positive number of"
                " elements."
            )
        whole_sizes.append(whole_size)
    if isinstance(unit, tuple):
        return Atomic(target, tuple(whole_sizes))
    return Atomic(target, whole_sizes[0])


def pipeline(first: object, second: object) -> "Pipeline":
    """A Pipeline of the targets on both sides of `|`, the left side first."""
    steps = [*steps_of(first), *steps_of(second)]
    for step in steps:
        if isinstance(step, Optional):
            raise RuleError(
                "`optional` is about a whole rule, and here it is one side of `|`; write"
                f" `optional({' | '.join(map(_code_of, steps))})`."
            )
    if not all(isinstance(step, Strategy) for step in steps[1:]):
        raise RuleError(
            f"{' | '.join(map(repr, steps))}: only the first target may be a spec,"
            " names, `replicate` or a callable; the ones after `|` refine it, as"
            " `fsdp(...)` does."
        )
    return Pipeline(tuple(steps))


def _code_of(target: object) -> str:
    """The Python code that makes a target, without `optional`."""
    bare_target = bare(target)
    if isinstance(bare_target, Strategy):
        return bare_target.code
    return repr(bare_target)


def _piped(second: object, first: object) -> "Pipeline":
    """The Pipeline for `first | second`, where Python asks the right side."""
    return pipeline(first, second)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A strategy that shards an array by its shape. After another target of a rule, it
    adds mesh axes to that sharding.

    `axes` are the mesh axes to shard over. Arrays of fewer than `min_bytes` bytes are
    not changed. The dimensions `skip_dims`, in ascending order, are never sharded. With
    `max_bytes`, the axes are added one by one, in order, until a device holds at most so
    many bytes of the array; 0 adds all. Its name in text, JSON and code is that of its
    class in lower case.
    """

    axes: tuple[str, ...]
    min_bytes: int = 0
    skip_dims: tuple[int, ...] = ()
    max_bytes: int = 0

    __or__ = pipeline
    __ror__ = _piped

    def open_dims(self, shape: Sequence[int]) -> list[int]:
        """The dimensions that the strategy may shard, whether or not a target before it
        has sharded them. The strategy shards the one of them that its axes divide into
        the most shards.
        """
        return [dim for dim in range(len(shape)) if dim not in self.skip_dims]

    def preference(self, size: int) -> int:
        """Ranks dimensions that the strategy's axes divide into equally many shards:
        the highest preference is sharded. `size` is the dimension's size in the shard
        that a target before the strategy leaves on a device.
        """
        return size

    @property
    def text(self) -> str:
        """The strategy's name and axes as text."""
        return f"{type(self).__name__.lower()}({', '.join(self.axes)})"

    @property
    def code(self) -> str:
        """The Python code that makes the strategy."""
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        arguments = [repr(axes)]
        if self.min_bytes:
            arguments.append(str(self.min_bytes))
        if self.skip_dims:
            dims = self.skip_dims[0] if len(self.skip_dims) == 1 else self.skip_dims
            arguments.append(f"skip_dims={dims}")
        if self.max_bytes:
            arguments.append(f"max_bytes={self.max_bytes}")
        return f"{type(self).__name__.lower()}({', '.join(arguments)})"


class Fsdp(Strategy):
    """The strategy that shards the largest free dimension that its axes divide; made by
    [`shardfx.fsdp`][].
    """


# The classes of all strategies, by the name that each has in text, JSON and code.
STRATEGIES: Final[dict[str, type[Strategy]]] = {"fsdp": Fsdp}


def strategy_of(
    name: str,
    axes: str | Iterable[str],
    min_bytes: int = 0,
    skip_dims: int | Iterable[int] = (),
    max_bytes: int = 0,
) -> Strategy:
    """Makes the strategy that `STRATEGIES` lists under `name`; raises `RuleError` for
    invalid arguments.
    """
    if isinstance(axes, Iterable):
        axes = as_names(axes)
    else:
        axes = (axes,)
    are_names = all(isinstance(axis, str) and axis for axis in axes)
    if not axes or not are_names or len(set(axes)) < len(axes):
        raise RuleError(
            f"`{name}({axes!r})` needs the name of one mesh axis, or of several"
            " different ones."
        )
    byte_counts = {}
    for argument, count in (("min_bytes", min_bytes), ("max_bytes", max_bytes)):
        # `fsdp("data", "tensor")` passes an axis where a number of bytes is expected.
        if isinstance(count, str):
            all_axes = (*axes, count)
            raise RuleError(
                f"`{name}({axes[0]!r}, {count!r})`: several axes are a tuple,"
                f" `{name}({all_axes!r})`; `{argument}` is a number of bytes, such as"
                " `2**20` for 1 MiB."
            )
        number = number_of_bytes(count)
        if number is None:
            raise RuleError(
                f"`{name}(..., {argument}={count!r:.60})`: give a number of bytes, such as"
                " `2**20` for 1 MiB, or 0 for no limit."
            )
        if number < 0:
            raise RuleError(
                f"`{name}(..., {argument}={count})`: a number of bytes is not negative."
            )
        byte_counts[argument] = number
    dims: tuple[Any, ...] = (skip_dims,)
    if isinstance(skip_dims, Iterable) and not isinstance(skip_dims, str):
        dims = tuple(skip_dims)
    numbered_dims = list(map(whole_number, dims))
    if any(dim is None or dim < 0 for dim in numbered_dims):
        fix = (
            "dimensions are numbered from 0, as in `skip_dims=0` or `skip_dims=(0, 1)`."
        )
        raise RuleError(f"`{name}(..., skip_dims={skip_dims!r})`: {fix}")
    return STRATEGIES[name](
        axes=axes,
        skip_dims=tuple(sorted({dim for dim in numbered_dims if dim is not None})),
        **byte_counts,
    )


def checked_bytes(what: str, value: object) -> int:
    """The argument named `what`, a number of bytes, as an int. Raises `RuleError` for
    any other value, and for a negative one.
    """
    number = number_of_bytes(value)
    if number is None or number < 0:
        raise RuleError(
            f"`{what}` is a number of bytes, not {value!r:.80}; write `2**20` for 1 MiB."
        )
    return number


@dataclasses.dataclass(frozen=True)
class Replicate:
    """The target under which every device holds the whole array; its one instance is
    [`shardfx.replicate`][].
    """

    __or__ = pipeline
    __ror__ = _piped
    if not TYPE_CHECKING:
        __call__ = refused("replicate()", "`replicate`, which is a value")

    def __repr__(self) -> str:
        return "replicate"


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Several targets, applied from left to right; made by `|`."""

    steps: tuple[Any, ...]

    __or__ = pipeline
    __ror__ = _piped


replicate = Replicate()


def steps_of(target: object) -> tuple[Any, ...]:
    """The targets that `|` joins in `target`, or `target` itself alone."""
    if isinstance(target, Pipeline):
        return target.steps
    return (target,)


@dataclasses.dataclass(frozen=True)
class Optional:
    """The target of a rule that may match no array; made by [`shardfx.optional`][]."""

    target: Any


@called("optional(target)")
def optional(target: object) -> Optional:
    """A target for a path rule that may match no array of a tree.

    [`shardfx.plan`][] raises if a path rule shards no array, since this is usually a
    mistake. `optional` exempts a rule from this check, for example in a set of rules
    for several models.

    **Arguments:**

    - `target`: any target of a rule in [`shardfx.PathRules`][].

    **Returns:**

    A value to use instead of `target`.

    !!! Example

        ```python
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, PathRules, optional, plan

        rules = PathRules([("lm_head", optional(P("tensor"))), ("embed", P("tensor"))])
        # This model has no lm_head
        plan({"embed": jnp.ones((64, 8))}, MeshSpec({"tensor": 4}), paths=rules)
        ```
    """
    if isinstance(target, Optional):
        return target
    return Optional(target)


def bare(target: object) -> Any:
    """The target inside of an `Optional`, or `target` itself if it is no `Optional`."""
    if isinstance(target, Optional):
        return target.target
    return target


def axes_of_target(target: object) -> tuple[str, ...]:
    """The mesh axes that the target of a path rule names; none for logical names and
    callables.
    """
    if isinstance(target, Optional | Atomic):
        return axes_of_target(target.target)
    if isinstance(target, Pipeline):
        return tuple(it.chain.from_iterable(map(axes_of_target, target.steps)))
    if isinstance(target, Strategy):
        return target.axes
    if isinstance(target, PartitionSpec):
        return tuple(axes_of_entries(entries_of(target)))
    return ()


@called("fsdp('data')", min_size="`min_bytes=`", axis="`axes=`")
def fsdp(
    axes: str | Iterable[str],
    min_bytes: int = 0,
    *,
    skip_dims: int | Iterable[int] = (),
    max_bytes: int = 0,
) -> Strategy:
    """The strategy of fully sharded data parallelism: shard the largest free dimension
    that the axes divide.

    A dimension is not free if a rule of `AxisRules` replicates its name, or if it
    indexes stacked layers: a `lax.scan` over a sharded dimension gathers the arrays of
    all layers at once. `field(stacked=...)` declares such dimensions in a module,
    `skip_dims` names them for all other trees.

    **Arguments:**

    - `axes`: the mesh axis, or axes, to shard over.
    - `min_bytes`: arrays of fewer bytes are not changed.
    - `skip_dims`: dimensions that are not sharded: 0 for arrays of stacked layers.
    - `max_bytes`: shard only until a device holds at most so many bytes of the array:
      the axes are added one by one, in order. 0 adds all.

    **Returns:**

    A target for [`shardfx.PathRules`][]. After another target,
    `P(None, "tensor") | fsdp("data")`, it adds its axes to a dimension that the other
    target leaves unsharded.

    **Raises:**

    `RuleError` without an axis, for an axis that occurs twice, and for a negative
    number in `min_bytes`, `skip_dims` or `max_bytes`.

    !!! Example

        ```python
        from shardfx import PathRules, fsdp

        PathRules(
            [
                ("norm|bias", ()),
                ("layers", fsdp("data", skip_dims=0)),  # stacked for `lax.scan`
                ("experts", fsdp(("data", "tensor"), max_bytes=2**26)),
                (".*", fsdp("data", min_bytes=2**20)),
            ]
        )
        ```
    """
    return strategy_of(
        name="fsdp",
        axes=axes,
        min_bytes=min_bytes,
        skip_dims=skip_dims,
        max_bytes=max_bytes,
    )
