"""Logical axis names to mesh axes: an ordered list of rules, and the one function that reads it."""

import dataclasses
import difflib
import functools as ft
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import equinox as eqx
from jax.sharding import PartitionSpec

from ._errors import RuleError, SpecError, UnmatchedError
from ._reason import Code, Decision, Reason, reason
from ._spec import UNCONSTRAINED, Atomic, canonical_entry, entry_axes, trimmed


# `None`, a mesh axis, several mesh axes, or UNCONSTRAINED.
Target: TypeAlias = Any
Rule: TypeAlias = tuple[str, Target]
_Rules: TypeAlias = Mapping[str, Target] | Iterable[Any]
Policy: TypeAlias = Literal["replicate", "keep", "unconstrained", "raise"]


class AxisRules(eqx.Module):
    """Which mesh axes each logical axis name may use, in order of priority.

    A value: it hashes, compares with `==`, and can be closed over or passed to a jitted function. Nothing can
    change it; every method returns another one.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import AxisRules, resolve

        rules = AxisRules(
            [("batch", ("data", "fsdp")), ("heads", "tensor"), ("embed", "fsdp"), ("embed", "tensor")],
            modes={"decode": [("batch", None)]},
        )
        assert resolve(("batch", "heads"), rules).spec == P(("data", "fsdp"), "tensor")
        assert resolve(("batch", "embed"), rules).spec == P(("data", "fsdp"), "tensor")
        assert resolve(("batch", "embed"), rules, mode="decode").spec == P(None, "fsdp")
        ```
    """

    rules: tuple[Rule, ...] = eqx.field(static=True)
    modes: tuple[tuple[str, tuple[Rule, ...]], ...] = eqx.field(static=True)
    units: tuple[tuple[str, int], ...] = eqx.field(static=True)
    aliases: tuple[tuple[str, str], ...] = eqx.field(static=True)

    def __init__(
        self,
        rules: _Rules = (),
        *,
        modes: Mapping[str, Any] | Iterable[Any] | None = None,
        units: Mapping[str, int] | Iterable[Any] | None = None,
        aliases: Mapping[str, str] | Iterable[Any] | None = None,
    ):
        """**Arguments:**

        - `rules`: `(logical name, target)` pairs, the ones with priority first. A target is a mesh axis, a
            tuple of them, `None` (replicate, and stop looking) or `PartitionSpec.UNCONSTRAINED`. A name may
            occur several times: its later rules are fallbacks.
        - `modes`: mapping from a mode, as "train", to rules that come before `rules` in that mode.
            that it does not mention behaves as in `rules`; one that it maps to `None` is replicated.
        - `units`: mapping from a logical name to how many elements must stay together, `head_dim` for fused
            heads.
        - `aliases`: mapping from a name to the name whose rules it shares, in every mode.

        **Raises:**

        `RuleError` for a rule that is no pair, a target that is none of the above or repeats a mesh axis, a
        unit that is no positive integer, and for aliases that go in a circle.
        """
        self.rules = _rules(rules, "rules")
        by_mode = _pairs(modes or (), "modes")
        self.modes = tuple((mode, _rules(given, f"mode {mode!r}")) for mode, given in by_mode)
        self.units = tuple(_pairs(units or (), "units"))
        self.aliases = tuple(_pairs(aliases or (), "aliases"))

    def __check_init__(self):
        for what, pairs in (("modes", self.modes), ("units", self.units), ("aliases", self.aliases)):
            if repeated := _repeated([key for key, _ in pairs]):
                raise RuleError(f"`{what}` gives {repeated[0]!r} twice; give it once.")
        for name, unit in self.units:
            if not isinstance(unit, int) or isinstance(unit, bool) or unit < 1:
                raise RuleError(f"`units[{name!r}]` is {unit!r}; a unit is a positive number of elements.")
        for name, of in self.aliases:
            if not isinstance(of, str):
                raise RuleError(f"the alias {name!r} is of {of!r}; it shares the rules of one logical name.")
            if name in dict(self.rules):
                raise RuleError(f"{name!r} is to be an alias of {of!r}, but has rules; use `rules.without({name!r})`.")
            _chain(name, self)

    @property
    def names(self) -> tuple[str, ...]:
        """Every logical name that has a rule or is an alias, in order of first appearance."""
        listed = [*self.rules, *(rule for _, rules in self.modes for rule in rules), *self.aliases]
        return tuple(dict.fromkeys(name for name, _ in listed))

    def extend(self, rules: _Rules = (), *, modes: Any = None) -> "AxisRules":
        """New AxisRules: these, then `rules` as fallbacks with less priority.

        **Arguments:**

        - `rules`: as in `AxisRules(...)`.
        - `modes`: mode to rules, each put after the rules that the mode has; a new mode is added.
        """
        return _stacked(self, AxisRules(rules, modes=modes))

    def prepend(self, rules: _Rules = (), *, modes: Any = None) -> "AxisRules":
        """New AxisRules: `rules` with priority, then these. So a rule can override one that is there.

        **Arguments:**

        - `rules`: as in `AxisRules(...)`.
        - `modes`: mode to rules, each put before the rules that the mode has; a new mode is added.
        """
        return _stacked(AxisRules(rules, modes=modes), self)

    def without(self, *names: str) -> "AxisRules":
        """New AxisRules: these, with every rule, unit and alias of `names` taken out, in all modes.

        **Arguments:**

        - `names`: logical names or aliases. Aliases of a removed name stay, and share what rules it gets.

        **Raises:**

        `RuleError` for a name that has neither rules nor a unit.
        """
        known = dict.fromkeys([*self.names, *(name for name, _ in self.units)])
        for name in names:
            if name not in known:
                raise RuleError(f"`without({name!r})`: no rule has that name{_near(name, tuple(known))}.")
        return self._with(
            rules=_drop(self.rules, names),
            modes=tuple((mode, _drop(rules, names)) for mode, rules in self.modes),
            units=_drop(self.units, names),
            aliases=_drop(self.aliases, names),
        )

    def with_alias(self, name: str, of: str) -> "AxisRules":
        """New AxisRules in which `name` shares the rules of `of`, in every mode, and its unit.

        Where an array uses several names that share rules, `of` comes first, then its aliases in the order in
        which they were made.

        **Arguments:**

        - `name`: the new name. It must have no rules of its own, save what a mode puts before those of `of`.
        - `of`: a logical name or another alias, looked up when names are resolved: it may get rules later.

        **Raises:**

        `RuleError` if `name` is taken, or if the aliases would go in a circle.
        """
        return self._with(aliases=(*self.aliases, (name, of)))

    def merge(self, other: "AxisRules") -> "AxisRules":
        """These rules and those of `other`, fallbacks kept, if they do not contradict each other.

        **Arguments:**

        - `other`: the rules to add. Where both have rules for a name (in one mode), one list of targets must
            begin with the other; the longer one holds.

        **Returns:**

        New AxisRules: these rules in their order, then what only `other` has.

        **Raises:**

        `RuleError` that names the contradiction, in rules, modes, units or aliases.
        """
        modes, others = dict(self.modes), dict(other.modes)
        merged = {
            mode: _merged(modes.get(mode, ()), others.get(mode, ()), f"mode {mode!r}") for mode in {**modes, **others}
        }
        return AxisRules(
            _merged(self.rules, other.rules, "rules"),
            modes=merged,
            units=_agreed(self.units, other.units, "unit of"),
            aliases=_agreed(self.aliases, other.aliases, "alias"),
        )

    @classmethod
    def last_wins(cls, rules: _Rules) -> "AxisRules":
        """AxisRules read as a dictionary: the last target given for a name is its only one.

        **Arguments:**

        - `rules`: as in `AxisRules(...)`. The rule of a name stands where the name came first.
        """
        return cls(dict(_rules(rules, "rules")))

    def _with(self, **fields: Any) -> "AxisRules":
        given = {"modes": self.modes, "units": self.units, "aliases": self.aliases, **fields}
        return AxisRules(given.pop("rules", self.rules), **given)


def resolve(
    names: Sequence[Any] | PartitionSpec,
    rules: AxisRules,
    *,
    mode: str | None = None,
    unmatched: Policy = "replicate",
) -> Decision:
    """The PartitionSpec that `rules` give to an array whose dimensions have these logical names.

    Rules are read in order. One applies if its name is among `names`, has no target yet, and none of its mesh
    axes is taken. So the order of the rules decides who gets an axis, never the order of the dimensions. This
    is the algorithm of `flax.linen.logical_to_mesh_axes`.

    **Arguments:**

    - `names`: one entry per dimension: a logical name, `None`, `PartitionSpec.UNCONSTRAINED`,
        `atomic(name, unit)`, or a tuple of names, whose axes are joined on the dimension in their order.
    - `rules`: the rules.
    - `mode`: which of the modes of `rules` applies; `None` for the base rules alone.
    - `unmatched`: what becomes of a name without any rule. "replicate": `None`, with a reason. "keep": it is
        taken as a mesh axis, which no rule may use then. "unconstrained": the compiler decides. "raise": an
        error.

    **Returns:**

    A [`shardfx.Decision`][]: the spec, and a reason for each name that got no axis although it asked for one.

    **Raises:**

    `RuleError` for an unknown mode or policy, `SpecError` for a name that occurs twice or an entry of another
    kind, `UnmatchedError` under "raise".

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import AxisRules, resolve

        decision = resolve(("vocab", "embed", "typo"), AxisRules([("vocab", "tensor"), ("embed", "tensor")]))
        assert decision.spec == P("tensor")
        assert [reason.code.name for reason in decision.reasons] == ["blocked", "unmatched"]
        ```
    """
    return _resolve(_entries(names), rules, mode, unmatched)


def units_of(names: Sequence[Any] | PartitionSpec, rules: AxisRules) -> tuple[int, ...] | None:
    """How many elements of each dimension must stay together, from `atomic` entries and the rules' units.

    **Arguments:**

    - `names`: as in [`shardfx.resolve`][].
    - `rules`: their `units` count for the names they mention and for aliases of these.

    **Returns:**

    One int per dimension, the least common multiple where several names lie on one; `None` if all are 1.
    """
    return _units_of(_entries(names), rules)


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One logical name of an array: where it stands, and the names whose rules it obeys."""

    name: str
    dim: int
    chain: tuple[str, ...]


# Bounded, and over values alone: the plan of a model asks for the same few dozen kinds of leaf all the time.
@ft.lru_cache(maxsize=4096)
def _resolve(entries: tuple[Any, ...], rules: AxisRules, mode: str | None, unmatched: str) -> Decision:
    if unmatched not in ("replicate", "keep", "unconstrained", "raise"):
        raise RuleError(f'`unmatched={unmatched!r}`: use "replicate", "keep", "unconstrained" or "raise".')
    active = _active(rules, mode)
    slots = _slots(entries, rules)
    ruled = {name for name, _ in active}
    orphans = [slot for slot in slots if ruled.isdisjoint(slot.chain)]
    if orphans and unmatched == "raise":
        _raise_unmatched(orphans, rules)
    given: dict[str, Target] = {}
    user: dict[str, _Slot] = {}
    if unmatched == "keep":
        # The last of two aliases of one axis comes first here, so that the first one overwrites it.
        user = {slot.chain[-1]: slot for slot in reversed(orphans)}
        given = {slot.name: axis for axis, slot in user.items()}
    elif unmatched == "unconstrained":
        given = {slot.name: UNCONSTRAINED for slot in orphans}
    _assign(active, slots, given, user)
    spec = trimmed([_entry(entry, given) for entry in entries])
    reasons = [why for slot in slots if given.get(slot.name) is None for why in _reasons(slot, active, user)]
    return Decision(spec, tuple(sorted(reasons, key=lambda why: why.dim or 0)))


def _assign(
    active: tuple[Rule, ...], slots: tuple[_Slot, ...], given: dict[str, Target], user: dict[str, _Slot]
) -> None:
    for name, target in active:
        for slot in slots:
            if name not in slot.chain or slot.name in given:
                continue
            axes = entry_axes(target)
            if any(axis in user for axis in axes):
                continue
            given[slot.name] = target
            user.update((axis, slot) for axis in axes)


def _reasons(slot: _Slot, active: tuple[Rule, ...], user: dict[str, _Slot]) -> list[Reason]:
    """Why `slot` got nothing: it has no rule, or all were blocked before one said `None` or the rules ended."""
    targets = [target for name, target in active if name in slot.chain]
    if not targets:
        return [reason(Code.unmatched, slot.dim, (slot.name,), what=f"logical name `{slot.name}`")]
    wanted = itertools.takewhile(lambda target: target is not None, targets)
    axes = tuple(dict.fromkeys(axis for target in wanted for axis in entry_axes(target)))
    taken = ", ".join(
        f"`{axis}` is used by `{user[axis].name}` on dim {user[axis].dim}" for axis in axes if axis in user
    )
    return [reason(Code.blocked, slot.dim, axes, what=f"logical name `{slot.name}` ({taken})")] if axes else []


def _entry(entry: Any, given: Mapping[str, Target]) -> Any:
    if entry is None or entry is UNCONSTRAINED:
        return entry
    targets = [given.get(name) for name in _members(entry)]
    axes = tuple(axis for target in targets for axis in entry_axes(target))
    # An axis that a rule demands outweighs a member that leaves the choice to the compiler.
    return UNCONSTRAINED if not axes and UNCONSTRAINED in targets else axes


def _slots(entries: tuple[Any, ...], rules: AxisRules) -> tuple[_Slot, ...]:
    """The names in `entries`; those that share rules are in an order that no dimension has a part in."""
    placed = [(name, dim) for dim, entry in enumerate(entries) for name in _members(entry)]
    slots = [_Slot(name, dim, _chain(name, rules)) for name, dim in placed]
    if repeated := _repeated([slot.name for slot in slots]):
        raise SpecError(
            f"logical name `{repeated[0]}` occurs twice in {entries}; one mesh axis cannot shard two "
            "dimensions, so give the second a name of its own (`rules.with_alias(...)` makes one), or `None`."
        )
    order = {name: i for i, (name, _) in enumerate(rules.aliases)}
    return tuple(sorted(slots, key=lambda slot: order.get(slot.name, -1)))


def _entries(names: Any) -> tuple[Any, ...]:
    """`names` as hashable values, each entry of a known kind."""
    if isinstance(names, PartitionSpec):
        names = names.partitions
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise SpecError(
            f"the names of an array are a tuple with one entry per dimension, not {names!r}; "
            f"write `({names!r},)` for an array of rank 1."
        )
    entries = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in names)
    try:
        hash(entries)
    except TypeError:
        [_members(entry) for entry in entries]  # Raises: a list in a tuple, or a dict, is no entry.
    return entries


def _members(entry: Any) -> tuple[str, ...]:
    """The logical names of one entry, in order; `None` in a tuple stands for nothing."""
    if entry is None or entry is UNCONSTRAINED:
        return ()
    members = entry if isinstance(entry, tuple) else (entry,)
    names = tuple(member.target if isinstance(member, Atomic) else member for member in members if member is not None)
    if not all(isinstance(name, str) for name in names):
        raise SpecError(
            f"{entry!r} is no entry of an array's names; use a logical name, a flat tuple of names, `None`, "
            "`PartitionSpec.UNCONSTRAINED` or `atomic(name, unit)`."
        )
    return names


@ft.lru_cache(maxsize=4096)
def _units_of(entries: tuple[Any, ...], rules: AxisRules) -> tuple[int, ...] | None:
    units = dict(rules.units)
    found = []
    for entry in entries:
        members = entry if isinstance(entry, tuple) else (entry,)
        own = [cast(int, member.unit) for member in members if isinstance(member, Atomic)]
        named = [units.get(name, 1) for member in _members(entry) for name in _chain(member, rules)]
        found.append(math.lcm(*own, *named))
    return tuple(found) if any(unit > 1 for unit in found) else None


@ft.lru_cache(maxsize=256)
def _active(rules: AxisRules, mode: str | None) -> tuple[Rule, ...]:
    """The rules in force: those of the mode, then the base rules."""
    modes = dict(rules.modes)
    if mode is not None and mode not in modes:
        raise RuleError(
            f"mode {mode!r} is unknown; these rules have {tuple(modes)}{_near(mode, tuple(modes))}. "
            f"Add it with `rules.extend(modes={{{mode!r}: []}})`, or leave `mode` out."
        )
    return rules.rules if mode is None else modes[mode] + rules.rules


def _chain(name: str, rules: AxisRules) -> tuple[str, ...]:
    """`name`, the name that it is an alias of, and so on."""
    aliases = dict(rules.aliases)
    chain = (name,)
    while chain[-1] in aliases:
        chain = (*chain, aliases[chain[-1]])
        if chain[-1] in chain[:-1]:
            circle = " -> ".join(repr(link) for link in chain)
            raise RuleError(f"the aliases go in a circle: {circle}; let one of them name a mesh axis.")
    return chain


def _raise_unmatched(orphans: list[_Slot], rules: AxisRules) -> None:
    lines = [f"`{slot.name}` (dim {slot.dim}){_near(slot.name, rules.names)}" for slot in orphans]
    raise UnmatchedError(
        f"no rule for the logical names {', '.join(lines)}. The rules have {rules.names}; "
        f'add one with `rules.extend([({orphans[0].name!r}, None)])`, or pass `unmatched="replicate"`.'
    )


def _near(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f" (did you mean {' or '.join(repr(match) for match in close)}?)" if close else ""


def _pairs(given: Any, what: str) -> list[tuple[str, Any]]:
    pairs = given.items() if isinstance(given, Mapping) else given
    checked = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise RuleError(f"`{what}`: {pair!r} is no pair that begins with a name; write (name, value).")
        checked.append((pair[0], pair[1]))
    return checked


def _rules(given: Any, what: str) -> tuple[Rule, ...]:
    return tuple((name, _target(name, target, what)) for name, target in _pairs(given, what))


def _target(name: str, target: Any, what: str) -> Target:
    several = isinstance(target, list | tuple) and all(isinstance(axis, str) for axis in target)
    if not (several or target is None or target is UNCONSTRAINED or isinstance(target, str)):
        raise RuleError(
            f"`{what}`: ({name!r}, {target!r}) has no valid target; use a mesh axis, a tuple of mesh axes, "
            "`None` or `PartitionSpec.UNCONSTRAINED`."
        )
    if repeated := _repeated(entry_axes(target)):
        raise RuleError(f"`{what}`: ({name!r}, {target!r}) uses mesh axis `{repeated[0]}` twice; use it once.")
    return canonical_entry(target)


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for i, name in enumerate(names) if name in names[:i]]


def _drop(pairs: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(pair for pair in pairs if pair[0] not in names)


def _stacked(first: AxisRules, second: AxisRules) -> AxisRules:
    one, two = dict(first.modes), dict(second.modes)
    return AxisRules(
        first.rules + second.rules,
        modes={mode: one.get(mode, ()) + two.get(mode, ()) for mode in {**one, **two}},
        units=first.units + second.units,
        aliases=first.aliases + second.aliases,
    )


def _merged(one: tuple[Rule, ...], two: tuple[Rule, ...], what: str) -> tuple[Rule, ...]:
    known: dict[str, list[Target]] = {}
    for name, target in one:
        known.setdefault(name, []).append(target)
    added = []
    for name, target in two:
        # Each rule of `two` meets the next one of the same name in `one`, until that side has no more.
        left = known.get(name)
        if not left:
            added.append((name, target))
        elif left.pop(0) != target:
            mine, theirs = ([to for key, to in rules if key == name] for rules in (one, two))
            raise RuleError(
                f"`merge`: {what} map {name!r} to {mine} on one side and to {theirs} on the other; "
                f"use `without({name!r})` on the side that should give way."
            )
    return one + tuple(added)


def _agreed(one: tuple[Any, ...], two: tuple[Any, ...], what: str) -> dict[str, Any]:
    merged = dict(one)
    for name, value in two:
        if merged.setdefault(name, value) != value:
            raise RuleError(
                f"`merge`: the {what} {name!r} is {merged[name]!r} on one side and {value!r} on the other; "
                f"use `without({name!r})` on the side that should give way."
            )
    return merged
