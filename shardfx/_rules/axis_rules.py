"""Ordered rules from logical axis names to mesh axes, as an immutable value."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import equinox as eqx

from .._ground.errors import RuleError, check_type, whole_number
from .._ground.misuse import called, lacking, refused
from .._ground.spec import entry_axes
from .merging import merged_pairs, merged_rules
from .pairs import Rule, Target, declared_axes, near, read_pairs, read_rules, repeated


RulesLike: TypeAlias = Mapping[str, Target] | Iterable[Any]


class AxisRules(eqx.Module):
    """The mesh axes that each logical axis name may use, in order of priority.

    A mode, such as "decode", is a name for additional rules. If names are resolved in
    it, its rules come first.

    AxisRules are immutable and hashable, and compare with `==`. A jitted function can
    close over them or take them as an argument. Every method returns new AxisRules. The
    fields are the constructor's arguments as tuples of pairs, such as (alias, logical
    name) in `aliases`; `mesh_axes` is a tuple of names.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import AxisRules, resolve

        rules = AxisRules(
            [
                ("batch", ("data", "fsdp")),
                ("heads", "tensor"),
                ("embed", "fsdp"),
                ("embed", "tensor"),
            ],
            modes={"decode": [("batch", None)]},
        )
        assert resolve(("batch", "heads"), rules).spec == P(("data", "fsdp"), "tensor")
        assert resolve(("batch", "embed"), rules).spec == P(("data", "fsdp"), "tensor")
        assert resolve(("batch", "embed"), rules, mode="decode").spec == P(None, "fsdp")
        ```
    """

    __module__ = "shardfx"

    rules: tuple[Rule, ...] = eqx.field(static=True)
    modes: tuple[tuple[str, tuple[Rule, ...]], ...] = eqx.field(static=True)
    units: tuple[tuple[str, int], ...] = eqx.field(static=True)
    aliases: tuple[tuple[str, str], ...] = eqx.field(static=True)
    mesh_axes: tuple[str, ...] = eqx.field(static=True)

    @called("AxisRules([('embed', 'data')])")
    def __init__(
        self,
        rules: RulesLike = (),
        *,
        modes: Mapping[str, object] | Iterable[object] | None = None,
        units: Mapping[str, int] | Iterable[object] | None = None,
        aliases: Mapping[str, str] | Iterable[object] | None = None,
        mesh_axes: Iterable[object] = (),
    ):
        """**Arguments:**

        - `rules`: `(logical name, target)` pairs, the ones with priority first. A
          target is a mesh axis, a tuple of mesh axes, `None` (replicate) or
          `PartitionSpec.UNCONSTRAINED`. A name may occur several times: its later rules
          are fallbacks. No rule after `None` is used, so `prepend([(name, None)])`
          overrides all of its rules.
        - `modes`: mapping from a mode, such as "train" or "decode", to rules that come
          before `rules` in that mode. A name that a mode does not mention behaves as in
          `rules`; a name that the mode maps to `None` is replicated.
        - `units`: mapping from a logical name to the number of elements that no shard
          may split, such as `head_dim`.
        - `aliases`: mapping from an alias to the logical name whose rules the alias has
          in every mode.
        - `mesh_axes`: the mesh axes that a mesh may lack, so that one set of rules
          serves several meshes. [`shardfx.plan`][] raises for any other axis that its
          mesh lacks, because that axis is probably misspelled.

        **Raises:**

        `RuleError` for a rule that is no pair; for a target of another type, or one
        that repeats a mesh axis; for a unit that is no positive integer; for an axis
        that is no name; for circular aliases.
        """
        self.rules = read_rules(rules, "rules")
        by_mode = read_pairs(modes or (), "modes")
        self.modes = tuple(
            (mode, read_rules(mode_rules, f"mode {mode!r}"))
            for mode, mode_rules in by_mode
        )
        self.units = tuple(
            (name, _whole(unit)) for name, unit in read_pairs(units or (), "units")
        )
        self.aliases = tuple(read_pairs(aliases or (), "aliases"))
        self.mesh_axes = declared_axes(mesh_axes)

    def __check_init__(self):
        """Raises `RuleError` for a mode, unit or alias that is given twice, an invalid
        unit, and an alias that is circular or has rules without a mode.
        """
        for what, pairs in (
            ("modes", self.modes),
            ("units", self.units),
            ("aliases", self.aliases),
        ):
            if duplicates := repeated([key for key, _ in pairs]):
                raise RuleError(
                    f"`{what}` gives {duplicates[0]!r} twice; give it once."
                )
        for name, unit in self.units:
            if not isinstance(unit, int) or isinstance(unit, bool) or unit < 1:
                raise RuleError(
                    f"`units[{name!r}]` is {unit!r}; a unit is a positive number of"
                    " elements."
                )
        for name, aliased in self.aliases:
            if not name or not isinstance(aliased, str):
                raise RuleError(
                    f"{name!r} cannot be an alias of {aliased!r}; both are logical names,"
                    " and not empty."
                )
            if name in dict(self.rules):
                raise RuleError(
                    f"{name!r} is to be an alias of {aliased!r}, but has rules; use"
                    f" `rules.without({name!r})`."
                )
            alias_chain(name, self)

    if not TYPE_CHECKING:
        __getitem__ = refused("rules[{}]", "`dict(rules.rules)[{}]`")
        __contains__ = refused("{} in rules", "`{} in rules.names`")
        __iter__ = refused(
            "iter(rules)",
            "`rules.rules`, a tuple of pairs; other AxisRules join by `rules.merge(other)`",
        )
        __class_getitem__ = classmethod(
            refused("AxisRules[{}]", "`AxisRules([{}])`, with parentheses")
        )
        __add__ = refused(
            "rules + {}",
            "`rules.extend({})`, or of other AxisRules `rules.merge(other)`",
        )
        __getattr__ = lacking(
            {
                "append": "`rules.extend([(name, target)])`, which returns new rules",
                "add": "`rules.extend([(name, target)])`, which returns new rules",
                "update": "`rules.extend([(name, target)])`, which returns new rules",
                "get": "`dict(rules.rules).get(name)`",
                "items": "`rules.rules`, a tuple of pairs",
                "keys": "`rules.names`",
            }
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Every logical name that has a rule or is an alias, in order of first
        appearance.
        """
        return tuple(
            dict.fromkeys(name for name, _ in (*all_rules(self), *self.aliases))
        )

    @called("rules.extend([('embed', 'data')])")
    def extend(
        self,
        rules: RulesLike = (),
        *,
        modes: Any = None,
        mesh_axes: Iterable[Any] = (),
    ) -> "AxisRules":
        """New AxisRules with `rules` after these, as fallbacks with less priority.

        **Arguments:**

        - `rules`: pairs of a logical name and a target, as in `AxisRules(...)`.
        - `modes`: mapping from a mode, which may be new, to rules. They come after the
          mode's present rules.
        - `mesh_axes`: more mesh axes that a mesh may lack without an error, besides those in
          these AxisRules.

        **Returns:**

        New AxisRules: the present rules, followed by `rules`.

        !!! Example

            ```python
            from shardfx import AxisRules

            rules = AxisRules([("mlp", "tensor")]).extend([("mlp", "fsdp"), ("embed", None)])
            assert rules.rules == (("mlp", "tensor"), ("mlp", "fsdp"), ("embed", None))
            ```
        """
        return _joined(self, AxisRules(rules, modes=modes, mesh_axes=mesh_axes))

    @called("rules.prepend([('embed', 'data')])")
    def prepend(
        self,
        rules: RulesLike = (),
        *,
        modes: Any = None,
        mesh_axes: Iterable[Any] = (),
    ) -> "AxisRules":
        """New AxisRules with `rules` before these, so that `rules` override them.

        **Arguments:**

        - `rules`: pairs of a logical name and a target, as in `AxisRules(...)`.
        - `modes`: mapping from a mode, which may be new, to rules. They come before the
          mode's present rules.
        - `mesh_axes`: more mesh axes that a mesh may lack without an error, besides those in
          these AxisRules.

        **Returns:**

        New AxisRules: `rules`, followed by the present rules.

        !!! Example

            ```python
            from jax.sharding import PartitionSpec as P
            from shardfx import AxisRules, resolve

            train = AxisRules([("batch", "data"), ("embed", "fsdp")])
            serve = train.prepend([("embed", None)])
            assert resolve(("batch", "embed"), serve).spec == P("data")
            ```
        """
        return _joined(AxisRules(rules, modes=modes, mesh_axes=mesh_axes), self)

    def without(self, *names: str) -> "AxisRules":
        """New AxisRules without any rule, unit or alias of `names`, in all modes.

        **Arguments:**

        - `names`: logical names or aliases. An alias of a removed name stays, for rules
          that the name may get later.

        **Returns:**

        New AxisRules.

        **Raises:**

        `RuleError` for a name that has neither rules nor a unit and is no alias.

        !!! Example

            ```python
            from shardfx import AxisRules

            rules = AxisRules([("embed", "fsdp"), ("mlp", "tensor")]).without("embed")
            assert rules.names == ("mlp",)
            ```
        """
        known_names = (*self.names, *(name for name, _ in self.units))
        for name in names:
            if name not in known_names:
                raise RuleError(
                    f"`without({name!r})`: there is no rule, unit or alias of that"
                    f" name{near(str(name), known_names)}."
                )
        return dataclasses.replace(
            self,
            rules=_without(self.rules, names),
            modes=tuple((mode, _without(rules, names)) for mode, rules in self.modes),
            units=_without(self.units, names),
            aliases=_without(self.aliases, names),
        )

    def drop(self, *numbers: int, mode: str | None = None) -> "AxisRules":
        """New AxisRules without the rules at these positions. [`shardfx.lint`][]
        reports rules that can never apply.

        **Arguments:**

        - `numbers`: positions of rules, counted from 0.
        - `mode`: the mode in whose rules the positions are; `None` for the rules
          without a mode.

        **Returns:**

        New AxisRules.

        **Raises:**

        `RuleError` for an unknown mode, or for a position without a rule.

        !!! Example

            ```python
            from shardfx import AxisRules

            rules = AxisRules([("embed", None), ("embed", "fsdp"), ("mlp", "tensor")]).drop(1)
            assert rules.rules == (("embed", None), ("mlp", "tensor"))
            ```
        """
        mode_rules = rules_of_mode(self, mode)
        check_positions(len(mode_rules), numbers, "drop")
        return self._with_rules(mode, without_positions(mode_rules, numbers))

    def replace(
        self,
        number: int,
        target: Target,
        *,
        mode: str | None = None,
    ) -> "AxisRules":
        """New AxisRules with another target for the rule at one position.

        **Arguments:**

        - `number`: the position of the rule, counted from 0.
        - `target`: a mesh axis, a tuple of mesh axes, `None` (replicate) or
          `PartitionSpec.UNCONSTRAINED`.
        - `mode`: the mode in whose rules the position is; `None` for the rules without
          a mode.

        **Returns:**

        New AxisRules.

        **Raises:**

        `RuleError` for an unknown mode, a position without a rule, or an invalid
        target.

        !!! Example

            ```python
            from shardfx import AxisRules

            rules = AxisRules([("embed", "fdsp"), ("mlp", "tensor")]).replace(0, "fsdp")
            assert rules.rules == (("embed", "fsdp"), ("mlp", "tensor"))
            ```
        """
        mode_rules = list(rules_of_mode(self, mode))
        check_positions(len(mode_rules), (number,), "replace")
        mode_rules[number] = (mode_rules[number][0], target)
        return self._with_rules(mode, mode_rules)

    def with_alias(self, name: str, of: str) -> "AxisRules":
        """New AxisRules in which `name` has the rules and the unit of `of`, in every
        mode.

        If an array has several names with the same rules, `of` has priority, then its
        aliases in the order of addition.

        **Arguments:**

        - `name`: the new name. It may have rules of its own only in modes, where they
          come before the rules of `of`.
        - `of`: a logical name or another alias. Its rules may be added later.

        **Returns:**

        New AxisRules with the alias.

        **Raises:**

        `RuleError` if `name` is empty or in use, or if the aliases would be circular.

        !!! Example

            ```python
            from jax.sharding import PartitionSpec as P
            from shardfx import AxisRules, resolve

            rules = AxisRules([("embed", "fsdp")]).with_alias("embed_out", of="embed")
            assert resolve(("embed_out",), rules).spec == P("fsdp")
            ```
        """
        return dataclasses.replace(self, aliases=(*self.aliases, (name, of)))

    def merge(self, other: "AxisRules") -> "AxisRules":
        """The union of two sets of rules, with their fallbacks. Rules that contradict
        each other are an error.

        **Arguments:**

        - `other`: the rules to add. If both sets have rules for a name in one mode, the
          targets of one set must be a prefix of the targets of the other. The longer
          list is used.

        **Returns:**

        New AxisRules: the rules of this set in their order, then the rules that only
        `other` has.

        **Raises:**

        `RuleError` with the contradiction in rules, modes, units or aliases.

        !!! Example

            ```python
            from shardfx import AxisRules

            rules = AxisRules([("mlp", "tensor")]).merge(AxisRules([("embed", "fsdp")]))
            assert rules.names == ("mlp", "embed")
            ```
        """
        check_axis_rules("other", other)
        rules = merged_rules(self.rules, other.rules, "rules")
        modes = dict(self.modes)
        for mode, mode_rules in other.modes:
            modes[mode] = merged_rules(
                modes.get(mode, ()), mode_rules, f"mode {mode!r}"
            )
        return AxisRules(
            rules,
            modes=modes,
            units=merged_pairs(self.units, other.units, "unit of"),
            aliases=merged_pairs(self.aliases, other.aliases, "alias"),
            mesh_axes=self.mesh_axes + other.mesh_axes,
        )

    @classmethod
    def last_wins(cls, rules: RulesLike) -> "AxisRules":
        """AxisRules in which the last of several pairs with one name counts, as in a
        dictionary.

        **Arguments:**

        - `rules`: pairs of a logical name and a target. A name has the position of its
          first pair and the target of its last pair.

        **Returns:**

        AxisRules with one rule per name.

        !!! Example

            ```python
            from shardfx import AxisRules

            rules = AxisRules.last_wins([("embed", "data"), ("embed", "model")])
            assert rules.rules == (("embed", "model"),)
            ```
        """
        return cls(dict(read_rules(rules, "rules")))

    def _with_rules(self, mode: str | None, rules: list[Rule]) -> "AxisRules":
        """These AxisRules with other rules in `mode`; `None` for those without a mode."""
        if mode is None:
            changed = {"rules": rules}
        else:
            changed = {"modes": {**dict(self.modes), mode: rules}}
        return dataclasses.replace(self, **changed)


def rules_of_mode(rules: AxisRules, mode: str | None) -> tuple[Rule, ...]:
    """The rules of `mode` alone; for `None` the rules without a mode. Raises
    `RuleError` for an unknown mode.
    """
    check_mode(rules, mode)
    if mode is None:
        return rules.rules
    return dict(rules.modes)[mode]


def check_mode(rules: AxisRules | None, mode: object) -> None:
    """Raises `RuleError` if a mode is given that `rules` lack."""
    if mode is None:
        return
    if rules is None:
        raise RuleError(
            f"`mode={mode!r}` is a mode of `axes`, which are not given; pass"
            f" `axes=AxisRules(..., modes={{{mode!r}: [...]}})`, or leave `mode` out."
        )
    modes = tuple(name for name, _ in rules.modes)
    if mode not in modes:
        raise RuleError(
            f"mode {mode!r} is unknown; these rules have"
            f" {modes}{near(str(mode), modes)}. Add it with"
            f" `rules.extend(modes={{{mode!r}: []}})`, or leave `mode` out."
        )


def check_positions(count: int, numbers: tuple[int, ...], what: str) -> None:
    """Raises `RuleError` unless each of `numbers` is an index of one of `count` rules.
    `what` is the method's name, for the message.
    """
    for number in numbers:
        if whole_number(number) is None or not 0 <= number < count:
            raise RuleError(
                f"`{what}({number!r})`: rules are numbered from 0, and these {count} have"
                f" no rule {number!r}."
            )


def without_positions(rules: Sequence[Any], positions: Collection[int]) -> list[Any]:
    """The rules, without those at some positions."""
    return [rule for number, rule in enumerate(rules) if number not in positions]


def axes_in(rules: AxisRules) -> tuple[tuple[str, str], ...]:
    """Pairs of a logical name and a mesh axis that the name may use in some mode, in
    the order of the rules.
    """
    pairs: dict[tuple[str, str], None] = {}
    for name, target in all_rules(rules):
        for axis in entry_axes(target):
            pairs[name, axis] = None
    return tuple(pairs)


def all_rules(rules: AxisRules) -> tuple[Rule, ...]:
    """The rules without a mode, and then the rules of every mode."""
    pairs = list(rules.rules)
    for _, mode_rules in rules.modes:
        pairs += mode_rules
    return tuple(pairs)


def check_axis_rules(what: str, value: object) -> None:
    """Raises `RuleError` unless `value`, the argument named `what`, is AxisRules."""
    check_type(
        what=what,
        value=value,
        expected=AxisRules,
        error=RuleError,
        fix="wrap it: `AxisRules([...])`",
    )


def alias_chain(name: str, rules: AxisRules) -> tuple[str, ...]:
    """`name`, the name that it is an alias of, and so on, up to a name that is no
    alias.

    Raises `RuleError` if the aliases form a circle.
    """
    aliases = dict(rules.aliases)
    chain = (name,)
    while chain[-1] in aliases:
        chain = (*chain, aliases[chain[-1]])
        if chain[-1] in chain[:-1]:
            circle = " -> ".join(repr(link) for link in chain)
            raise RuleError(
                f"the aliases go in a circle: {circle}; let one name a logical axis"
                " with rules."
            )
    return chain


def _whole(unit: object) -> Any:
    """A whole number of NumPy or JAX as one of Python; any other value as it is."""
    number = whole_number(unit)
    return unit if number is None else number


def _without(pairs: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
    """The pairs whose first entry, a logical name, is none of `names`."""
    return tuple(pair for pair in pairs if pair[0] not in names)


def _joined(first: AxisRules, second: AxisRules) -> AxisRules:
    """AxisRules with the rules of `first` and, after them in each mode, those of
    `second`, which have less priority.
    """
    modes = dict(first.modes)
    for mode, mode_rules in second.modes:
        modes[mode] = modes.get(mode, ()) + mode_rules
    return AxisRules(
        first.rules + second.rules,
        modes=modes,
        units=first.units + second.units,
        aliases=first.aliases + second.aliases,
        mesh_axes=first.mesh_axes + second.mesh_axes,
    )
