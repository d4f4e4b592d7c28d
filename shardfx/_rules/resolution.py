"""Resolves logical names to a PartitionSpec. No other module interprets AxisRules.

A mode, such as "decode", is a name for rules that apply only in this mode, before the
rules without a mode.
"""

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

from jax.sharding import PartitionSpec

from .._ground.errors import RuleError, SpecError, UnmatchedError
from .._ground.misuse import called
from .._ground.reason import Code, Decision, Reason, reason_for
from .._ground.spec import (
    UNCONSTRAINED,
    axes_of_entries,
    entries_of,
    entry_axes,
    trimmed,
)
from .._ground.text import plural
from .axis_rules import (
    AxisRules,
    alias_chain,
    all_rules,
    check_axis_rules,
    rules_of_mode,
)
from .pairs import Rule, Target, near, repeated
from .strategies import Atomic, Units


_PLAIN = frozenset([str, type(None)])
Policy: TypeAlias = Literal["replicate", "keep", "unconstrained", "raise"]


@called("resolve(names, rules)")
def resolve(
    names: Sequence[object] | PartitionSpec,
    rules: AxisRules,
    *,
    mode: str | None = None,
    unmatched: Policy = "replicate",
) -> Decision:
    """The PartitionSpec that `rules` give to an array whose dimensions have these
    logical names.

    Rules are read in order. A rule applies if its name is among `names`, the name has
    no target yet, and none of the rule's mesh axes is in use. So the order of the rules
    decides which dimension gets an axis, not the order of the dimensions. This is the
    algorithm of `flax.linen.logical_to_mesh_axes`.

    **Arguments:**

    - `names`: one entry per dimension: a logical name, `None`,
      `PartitionSpec.UNCONSTRAINED`, or a tuple of names, whose axes are joined on the
      dimension in their order. `atomic(name, unit)` counts as `name`: a unit matters
      only where an array's size is known.
    - `rules`: the rules.
    - `mode`: one of the modes of `rules`, whose rules come first; `None` for the rules
      without a mode alone.
    - `unmatched`: the treatment of a name without any rule. "replicate": it gets
      `None`, with a reason. "keep": it becomes a mesh axis itself, and rules that
      request this axis are not applied. "unconstrained": the compiler chooses its
      sharding. "raise": an error.

    **Returns:**

    A [`shardfx.Decision`][]: the spec, and a reason for each name that got no axis
    although a rule requests one.

    **Raises:**

    `RuleError` for rules of another type and for an unknown mode or policy, `SpecError`
    for a name that occurs twice or an invalid entry, `UnmatchedError` with "raise".

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import AxisRules, resolve

        decision = resolve(
            ("vocab", "embed", "typo"), AxisRules([("vocab", "tensor"), ("embed", "tensor")])
        )
        assert decision.spec == P("tensor")
        assert [reason.code.name for reason in decision.reasons] == ["blocked", "unmatched"]
        ```
    """
    if isinstance(names, AxisRules):
        raise RuleError(
            "the rules are given first, of type AxisRules: write `resolve(names, rules)`."
        )
    check_axis_rules("rules", rules)
    return _resolve(_entries(names), rules, mode, unmatched)


def units_of(names: Sequence[object] | PartitionSpec, rules: AxisRules) -> Units | None:
    """The units of an array's dimensions, from `atomic` entries and from the `units` of
    `rules`; `None` if all are 1. The unit of a name is also the unit of its aliases.
    The unit of a dimension with several names is the least common multiple of theirs.
    """
    if _is_plain(names) and not rules.units:
        return None
    return _units_of(_entries(names), rules)


def one_per_dim(names: Sequence[object], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The names of an array with one entry for each dimension of `shape`.

    `...` in `names` stands for all dimensions without a name, and `()` means that no
    dimension has a name. Dimensions without a name are replicated. Raises `SpecError`
    for names of another length: padding would shift them unnoticed.
    """
    entries = tuple(names)
    rank = len(shape)
    if not entries:
        return entries
    # The positions of `...`, and the number of dimensions that they have to stand for.
    dots = [position for position, entry in enumerate(entries) if entry is ...]
    if len(dots) > 1:
        text = names_text(entries)
        raise SpecError(
            f"the names {text} hold `...` {len(dots)} times; it can stand for"
            " dimensions in one place."
        )
    missing = rank - len(entries) + len(dots)
    if dots and missing >= 0:
        return (*entries[: dots[0]], *[None] * missing, *entries[dots[0] + 1 :])
    if missing:
        count = plural(len(entries) - len(dots), "logical name")
        raise SpecError(
            f"{count} {names_text(entries)} for an array of rank {rank}, shape {shape};"
            " give one per dimension, and `...` for the dimensions that are whole."
            " Where `jax.vmap` adds a dimension, `field(stacked=...)` names it; where"
            " it maps over one, leave the name out and pass `jax.vmap(...,"
            " spmd_axis_name=...)`."
        )
    return entries


def names_text(names: object) -> str:
    """The logical names of an array as Python code, with `...` for `Ellipsis`."""
    if not isinstance(names, tuple | list) or isinstance(names, PartitionSpec):
        if names is ...:
            return "..."
        return repr(names)
    inner = ", ".join(map(names_text, names))
    if len(names) == 1:
        return f"({inner},)"
    return f"({inner})"


def unknown_names(
    names: Sequence[object] | PartitionSpec,
    rules: AxisRules,
) -> tuple[str, ...]:
    """The logical names in `names` that have no rule in any mode."""
    return tuple(slot.name for slot in _unruled(names, rules))


def check_known(
    names: Sequence[object] | PartitionSpec,
    rules: AxisRules,
    or_pass: str = ', or pass `unmatched="replicate"`',
) -> None:
    """Raises `UnmatchedError` if a name has no rule in any mode, because the name is
    then probably misspelled.

    `or_pass` is the part of the message about an argument that accepts such names;
    empty if the caller has none.
    """
    _raise_unmatched(_unruled(names, rules), rules, or_pass)


def _unruled(
    names: Sequence[object] | PartitionSpec,
    rules: AxisRules,
) -> "list[_Slot]":
    """The logical names in `names` that have no rule in any mode, each with its
    dimension.
    """
    return _without_rule(_slots(_entries(names), rules), all_rules(rules))


def _without_rule(slots: Iterable["_Slot"], rules: Iterable[Rule]) -> "list[_Slot]":
    """Those of `slots` whose name, and all names that it is an alias of, have none of
    `rules`.
    """
    ruled = {name for name, _ in rules}
    return [slot for slot in slots if ruled.isdisjoint(slot.chain)]


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One logical name of an array, and the dimension that has it. `chain` is the name,
    then the name that it is an alias of, and so on. Rules for each of these names
    apply.
    """

    name: str
    dim: int
    chain: tuple[str, ...]


# A model has only a few dozen different tuples of names, each of them many times.
@ft.lru_cache(maxsize=4096)
def _resolve(
    entries: tuple[object, ...],
    rules: AxisRules,
    mode: str | None,
    unmatched: str,
) -> Decision:
    """The spec that the rules give to an array with the names `entries`, one per
    dimension, and the reasons; see `resolve`, which has checked the arguments but
    `mode` and `unmatched`.

    A slot is a logical name with its dimension, and with its `chain`: the name, the
    name that it is an alias of, and so on. `targets` and `users`, which `_assign`
    fills, have the target of each name, and the slot that uses each mesh axis. A name
    without a rule is in them from the start under "keep" and "unconstrained".
    """
    if unmatched not in ("replicate", "keep", "unconstrained", "raise"):
        raise RuleError(
            f'`unmatched={unmatched!r}`: use "replicate", "keep", "unconstrained" or'
            ' "raise".'
        )
    active = _active(rules, mode)
    slots = _slots(entries, rules)
    unruled = _without_rule(slots, active)
    if unmatched == "raise":
        _raise_unmatched(unruled, rules, ', or pass `unmatched="replicate"`')
    targets: dict[str, Target] = {}
    users: dict[str, _Slot] = {}
    if unmatched == "keep":
        # The last of two aliases of one axis comes first here, so that the first alias
        # overwrites it.
        users = {slot.chain[-1]: slot for slot in reversed(unruled)}
        targets = {slot.name: axis for axis, slot in users.items()}
    elif unmatched == "unconstrained":
        targets = {slot.name: UNCONSTRAINED for slot in unruled}
    _assign(
        active=active,
        base_count=len(rules.rules),
        mode=mode,
        slots=slots,
        targets=targets,
        users=users,
    )
    spec = trimmed([_entry(entry, targets) for entry in entries])
    reasons = []
    for slot in slots:
        if targets.get(slot.name) is None:
            reasons += _reasons(slot, active, users)
    return Decision(spec, tuple(sorted(reasons, key=lambda why: why.dim or 0)))


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The outcome of one rule for one logical name of an array.

    **Arguments:**

    - `name`, `dim`: the logical name, and its dimension.
    - `mode`: the mode that has the rule, such as "decode"; `None` if the rule is in
      `AxisRules.rules`.
    - `number`: the index of the rule among the rules of `mode`, or in
      `AxisRules.rules`.
    - `rule`: the rule.
    - `outcome`: "applied"; "blocked", if another name already uses one of the rule's
      mesh axes; "settled", if an earlier rule has given the name a target.
    - `taken`: the mesh axes of the rule that are already in use, each with the name and
      the dimension that use it.
    """

    __module__ = "shardfx.results"

    name: str
    dim: int
    mode: str | None
    number: int
    rule: Rule
    outcome: Literal["applied", "blocked", "settled"]
    taken: tuple[tuple[str, str, int], ...]


def attempts(
    names: Sequence[object] | PartitionSpec,
    rules: AxisRules,
    mode: str | None,
) -> tuple[Attempt, ...]:
    """The rules that [`shardfx.resolve`][] tries for the names of an array, each with
    its outcome, in order.
    """
    attempts_made = _assign(
        active=_active(rules, mode),
        base_count=len(rules.rules),
        mode=mode,
        slots=_slots(_entries(names), rules),
        targets={},
        users={},
    )
    return tuple(attempts_made)


def _assign(
    active: tuple[Rule, ...],
    base_count: int,
    mode: str | None,
    slots: tuple[_Slot, ...],
    targets: dict[str, Target],
    users: dict[str, _Slot],
) -> list[Attempt]:
    """Gives each logical name the target of the first rule whose mesh axes are free.
    Returns the outcome of each rule.

    `active` are the rules of `mode` followed by the `base_count` rules without a mode.
    A slot is a logical name with its dimension; the rules of all names in its `chain`
    (the name, the name that it is an alias of, and so on) apply to it. The function
    adds the target of each slot's name to `targets`; names that are already in
    `targets` keep theirs. It adds each mesh axis in use to `users`, with the slot that
    uses the axis.
    """
    attempts_made = []
    mode_count = len(active) - base_count
    for number, (name, target) in enumerate(active):
        # The index of the rule among those of its mode, or those without a mode.
        is_of_mode = number < mode_count
        rule_mode = mode if is_of_mode else None
        index = number if is_of_mode else number - mode_count
        for slot in slots:
            if name not in slot.chain:
                continue
            axes = entry_axes(target)
            taken = _taken(axes, users)
            outcome = "applied"
            if slot.name in targets:
                outcome = "settled"
            elif taken:
                outcome = "blocked"
            attempt = Attempt(
                name=slot.name,
                dim=slot.dim,
                mode=rule_mode,
                number=index,
                rule=(name, target),
                outcome=outcome,
                taken=taken,
            )
            attempts_made.append(attempt)
            if outcome == "applied":
                targets[slot.name] = target
                users.update((axis, slot) for axis in axes)
    return attempts_made


def _taken(
    axes: Iterable[str],
    users: Mapping[str, _Slot],
) -> tuple[tuple[str, str, int], ...]:
    """Those of `axes` that are in use, each with the logical name that uses it, and the
    dimension of this name. `users` has by mesh axis the slot (name and dimension) that
    uses it.
    """
    taken = []
    for axis in axes:
        user = users.get(axis)
        if user is not None:
            taken.append((axis, user.name, user.dim))
    return tuple(taken)


def _reasons(
    slot: _Slot,
    active: tuple[Rule, ...],
    users: dict[str, _Slot],
) -> list[Reason]:
    """The reason why the logical name of `slot` got no mesh axis; empty if rules for
    the name request none.

    Either no rule has the name, or other names use the mesh axes that its rules
    request. `active` are the rules in the order in which they are tried; those for any
    name in `slot.chain`, the name and the names that it is an alias of, apply. `users`
    has by mesh axis the slot that uses it.
    """
    targets = [target for name, target in active if name in slot.chain]
    if not targets:
        what = f"logical name `{slot.name}`"
        return [reason_for(Code.unmatched, slot.dim, (slot.name,), what=what)]
    # No rule after the target `None` is tried.
    mapped_targets = itertools.takewhile(lambda target: target is not None, targets)
    axes = tuple(dict.fromkeys(axes_of_entries(mapped_targets)))
    if not axes:
        return []
    taken = ", ".join(
        f"`{axis}` is used by `{user}` on dim {dim}"
        for axis, user, dim in _taken(axes, users)
    )
    what = f"logical name `{slot.name}` ({taken})"
    return [reason_for(Code.blocked, slot.dim, axes, what=what)]


def _entry(entry: object, assigned: Mapping[str, Target]) -> Any:
    """The entry of the spec for one dimension, from its entry among the names.
    `assigned` has the target of each logical name.
    """
    if entry is None or entry is UNCONSTRAINED:
        return entry
    targets = [assigned.get(name) for name in _members(entry)]
    axes = tuple(axes_of_entries(targets))
    # An axis that a rule requests has priority over a name that leaves the choice to
    # the compiler.
    if not axes and UNCONSTRAINED in targets:
        return UNCONSTRAINED
    return axes


def _slots(entries: tuple[object, ...], rules: AxisRules) -> tuple[_Slot, ...]:
    """The logical names of an array, in the order in which a rule gives them mesh axes.
    `entries` has one entry per dimension, such as a name or a tuple of names. Names
    that are no aliases come first, in the order of their dimensions; then aliases, in
    the order in which `rules` declare them. Raises `SpecError` if a name occurs twice.
    """
    slots = []
    for dim, entry in enumerate(entries):
        for name in _members(entry):
            named_slot = _Slot(
                name=name,
                dim=dim,
                chain=alias_chain(name, rules),
            )
            slots.append(named_slot)
    if duplicates := repeated([slot.name for slot in slots]):
        raise SpecError(
            f"logical name `{duplicates[0]}` occurs twice in {entries}; one mesh axis cannot"
            " shard two dimensions, so give the second a name of its own"
            " (`rules.with_alias(...)` makes one), or `None`."
        )
    alias_order = {name: i for i, (name, _) in enumerate(rules.aliases)}
    return tuple(sorted(slots, key=lambda slot: alias_order.get(slot.name, -1)))


def _entries(names: Any) -> tuple[Any, ...]:
    """The names of an array as a hashable tuple. Raises `SpecError` unless they are a
    sequence of valid entries.
    """
    if _is_plain(names):
        return names
    if isinstance(names, PartitionSpec):
        names = entries_of(names)
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise SpecError(
            "the names of an array are a tuple with one entry per dimension, not"
            f" {names!r}; write `({names!r},)` for an array of rank 1."
        )
    entries = []
    for entry in names:
        if isinstance(entry, list):
            entry = tuple(entry)
        _members(entry)  # raises for an invalid entry, such as a list in a tuple
        entries.append(entry)
    return tuple(entries)


def _is_plain(names: object) -> bool:
    """Whether `names` is a tuple of only strings and `None`. Most names are."""
    return type(names) is tuple and _PLAIN.issuperset(map(type, names))


def members_of(names: Any) -> tuple[str, ...]:
    """Every logical name in the names of an array, in order. The result is empty if
    `names` is `None`.
    """
    entries = () if names is None else names
    members: list[str] = []
    for entry in entries:
        if entry is not ...:
            members += _members(entry)
    return tuple(members)


def _members(entry: Any) -> tuple[str, ...]:
    """The logical names of one entry, in order. `None` inside a tuple is left out."""
    if entry is None or entry is UNCONSTRAINED:
        return ()
    names = []
    for member in _parts(entry):
        if isinstance(member, Atomic):
            names.append(member.target)
        elif member is not None:
            names.append(member)
    if not all(isinstance(name, str) for name in names):
        raise SpecError(
            f"{entry!r} is no entry of an array's names; use a logical name, a flat"
            " tuple of names, `None`, `PartitionSpec.UNCONSTRAINED` or `atomic(name,"
            " unit)`. Names with `...` need an array's rank: `plan.sharding(names,"
            " shape)`."
        )
    return tuple(names)


def _parts(entry: object) -> tuple[Any, ...]:
    """The members of an entry of names: itself, unless it is a tuple."""
    if isinstance(entry, tuple):
        return entry
    return (entry,)


@ft.lru_cache(maxsize=4096)
def _units_of(entries: tuple[object, ...], rules: AxisRules) -> Units | None:
    """The unit of each dimension, the number of elements that no shard may split;
    `None` if all are 1. `entries` has for each dimension a name, a tuple of names or
    `None`. A unit comes from an `atomic` name or from `rules.units`.
    """
    unit_by_name = dict(rules.units)
    units_of_dims = []
    for entry in entries:
        unit = 1
        for member in _parts(entry):
            if isinstance(member, Atomic):
                unit = math.lcm(unit, cast(int, member.unit))
        for member in _members(entry):
            for name in alias_chain(member, rules):
                unit = math.lcm(unit, unit_by_name.get(name, 1))
        units_of_dims.append(unit)
    if any(unit > 1 for unit in units_of_dims):
        return tuple(units_of_dims)
    return None


@ft.lru_cache(maxsize=256)
def _active(rules: AxisRules, mode: str | None) -> tuple[Rule, ...]:
    """The rules of a mode, followed by the rules without a mode, in the order in which
    they are tried.
    """
    if mode is None:
        return rules.rules
    return rules_of_mode(rules, mode) + rules.rules


def _raise_unmatched(unruled: "list[_Slot]", rules: AxisRules, or_pass: str) -> None:
    """Raises `UnmatchedError` for logical names without a rule; nothing if `unruled` is
    empty. `or_pass` is the part of the message about an argument that accepts such
    names.
    """
    texts = []
    for slot in unruled:
        near_name = near(slot.name, rules.names)
        texts.append(f"`{slot.name}` (dim {slot.dim}){near_name}")
    if texts:
        raise UnmatchedError(
            f"no rule for the logical names {', '.join(texts)}. The rules have"
            f" {rules.names}; "
            f"add one with `rules.extend([({unruled[0].name!r}, None)])`{or_pass}. For"
            " mesh axes use a PartitionSpec."
        )
