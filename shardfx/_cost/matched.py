"""How a product is carried out: which of its loops the devices share, as XLA's partitioner decides it.

The partitioner looks at how many pieces there are before it looks at which devices hold them. What an operand and the
result cut alike stays, and the other operand gives those devices up; then what both operands cut into as many pieces
is added up, whether or not the same devices hold them. Everything else is gathered.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .factors import Dims, Rule
from .layout import MeshParts, Parts


# What cuts each factor of an operation.
Cut = dict[int, Parts]


class Side(NamedTuple):
    """One operand: what cuts its factors, and how many bytes one device has of it."""

    cut: Cut
    local_bytes: float


def can_match(rule: Rule, cuts: Iterable[Cut]) -> bool:
    """Whether an operation is a product of two arrays, and what cuts them and the result is each shared or summed."""
    return (
        rule.is_product
        and len(rule.operands) >= 2
        and len(rule.results) == 1
        and all(dim for dims in (*rule.operands[:2], *rule.results) for dim in dims)
        and all(rule.kinds[factor] in ("pass", "sum") for cut in cuts for factor in cut)
    )


class Matched(NamedTuple):
    """How a product is carried out.

    **Arguments:**

    - `cut`: what cuts each factor while it runs.
    - `sides`: what cut those of its operands on their way there.
    - `among`: for each operand, whether it is brought there among the devices that the other operand's match left; else
        among all.
    """

    cut: Cut
    sides: tuple[Cut, Cut]
    among: tuple[bool, ...]


def matched(rule: Rule, axes: MeshParts, left: Side, right: Side, wanted: Mapping[int, Parts]) -> Matched:
    """What cuts each factor while a product runs.

    **Arguments:**

    - `rule`: of the product.
    - `axes`: of the mesh.
    - `left`, `right`: its operands.
    - `wanted`: what cuts the factors of its result.
    """
    return _Match(rule, axes, left, right, wanted).way()


class _Match:
    def __init__(self, rule: Rule, axes: MeshParts, left: Side, right: Side, wanted: Mapping[int, Parts]):
        self.axes, self.wanted = axes, wanted
        self.sides = (dict(left.cut), dict(right.cut))
        self.bytes = [left.local_bytes, right.local_bytes]
        # No slice goes through a convolution.
        self.has_windows = not set(rule.kinds) <= {"pass", "sum"}
        factors = [_factors(dims) for dims in (*rule.operands[:2], rule.results[0])]
        self.order = [[dim[0] for dim in dims] for dims in rule.operands[:2]]
        self.both = [f for f in factors[0] if f in factors[1]]
        self.free = [[f for f in own if f in factors[2] and f not in self.both] for own in factors[:2]]
        self.summed = [f for f in self.both if f not in factors[2]]
        self.taken: set[int] = set()

    def way(self) -> Matched:
        found: Cut = {}
        for factor in self.both:
            self.agree(factor, found)
        # Devices that share a batch are told apart first, and those that share a sum last.
        among: dict[int, bool] = {}
        is_apart = any(factor in found for factor in self.both if factor not in self.summed)
        # The same devices first, then as many.
        for exact in (True, False):
            for side in self.order_of([self.matching(side, exact=exact) for side in (0, 1)]):
                own = {f: parts for f, parts in self.matching(side, exact=exact).items() if f not in found}
                if not own:
                    continue
                found.update(own)
                for factor, wanted in own.items():
                    if not set(wanted) <= set(self.sides[side][factor]):
                        self.sides[side][factor] = wanted
                self.taken.update(_all(own))
                if self.give_up(1 - side, _all(own)):
                    among[1 - side] = is_apart
                is_apart = True
        for factor in self.both:
            if factor not in found:
                self.meet(factor, found)
        self.follow(found)
        if any(found.get(factor) for factor in self.summed):
            self.keep(found)
        apart = tuple(among.get(side, bool(is_apart or found)) for side in (0, 1))
        return Matched({factor: parts for factor, parts in found.items() if parts}, self.sides, apart)

    def agree(self, factor: int, found: Cut) -> None:
        """What both operands have cut alike stays."""
        left, right = (side.get(factor, ()) for side in self.sides)
        if left == right and left:
            found[factor] = left
            self.taken.update(left)

    def matching(self, side: int, *, exact: bool) -> Cut:
        """What is to cut the factors that one operand cuts into as many pieces as the result, or into finer ones.

        Where the devices that the result wants are taken by a sum, it is those of the operand. `exact` asks for the
        same devices, not for as many.
        """
        found: Cut = {}
        for factor in self.free[side]:
            own, parts = self.sides[side].get(factor, ()), self.wanted.get(factor, ())
            if not own or not parts:
                continue
            is_free = self.taken.isdisjoint(parts)
            if exact:
                if is_free and own == parts:
                    found[factor] = parts
            elif is_free and (self.axes.count(own) == self.axes.count(parts) or set(parts) < set(own)):
                found[factor] = parts
            elif not is_free and self.taken.isdisjoint(own) and self.axes.count(own) % self.axes.count(parts) == 0:
                found[factor] = own
        return found

    def order_of(self, matching: Sequence[Cut]) -> tuple[int, int]:
        """The operand whose match counts first: one whose free dimensions all match, or that costs the other less."""
        counts = [self.axes.count(_all(own)) for own in matching]
        held = [self.axes.count(part for f in self.free[at] for part in self.sides[at].get(f, ())) for at in (0, 1)]
        fits = [bool(matching[at]) and counts[at] == held[at] for at in (0, 1)]
        if fits[0] != fits[1]:
            return (0, 1) if fits[0] else (1, 0)
        return (0, 1) if counts[0] * self.bytes[1] < counts[1] * self.bytes[0] or not matching[1] else (1, 0)

    def give_up(self, side: int, parts: Parts) -> bool:
        """Brings an operand off the devices that the other one's match takes: onto others, if there are as many.

        Returns whether it was on any of them.
        """
        cut = self.sides[side]
        overlap = [part for own in cut.values() for part in own if part in parts]
        if not overlap:
            return False
        held = {part for own in cut.values() for part in own}
        spare = [
            part for part in range(len(self.axes.sizes)) if part not in held and part not in self.taken - set(parts)
        ]
        spare = [part for part in spare if part not in parts or part not in held]
        count, need = self.axes.count(spare), self.axes.count(parts)
        if count % need == 0 and count > 1:
            for factor in reversed(self.order[side]):
                own = cut.get(factor, ())
                if set(parts) <= set(own):
                    self.replace(side, factor, tuple(spare))
                    return True
            free = [part for part in spare if part not in parts]
            for factor, own in list(cut.items()):
                new = tuple(_another(part, parts, free, self.axes) for part in own)
                self.replace(side, factor, tuple(part for part in new if part >= 0))
            return True
        for factor, own in list(cut.items()):
            left = tuple(part for part in own if part not in parts)
            # What a convolution gives up in part it gives up whole.
            self.replace(side, factor, () if self.has_windows and len(left) < len(own) else left)
        return True

    def replace(self, side: int, factor: int, parts: Parts) -> None:
        before = self.axes.count(self.sides[side].get(factor, ()))
        self.sides[side][factor] = parts
        self.bytes[side] *= before / self.axes.count(parts)

    def meet(self, factor: int, found: Cut) -> None:
        """A factor that both operands have: what cuts it into as many pieces is brought to the larger operand's way."""
        left, right = (side.get(factor, ()) for side in self.sides)
        if factor not in self.summed:
            parts = self.wanted.get(factor, ())
            found[factor] = parts if self.taken.isdisjoint(parts) else ()
        elif left and self.axes.count(left) == self.axes.count(right):
            found[factor] = left if self.bytes[0] > self.bytes[1] else right
        else:
            return
        self.taken.update(found[factor])

    def follow(self, found: Cut) -> None:
        """What only the result cuts. Where that is not all, and something is in the way, operands are gathered."""
        left = self.axes.count(part for part in range(len(self.axes.sizes)) if part not in self.taken)
        rest = [[factor for factor in own if factor not in found] for own in self.free]
        wanted = [tuple(part for factor in own for part in self.wanted.get(factor, ())) for own in rest]
        is_bare = all(factor in found or not cut for side in self.sides for factor, cut in side.items())
        for own, parts in zip(rest, wanted, strict=True):
            is_all = self.axes.count(parts) == left
            if not parts or not self.taken.isdisjoint(parts) or (self.has_windows and not is_all):
                continue
            if not is_bare and not is_all:
                for side in self.sides:
                    side.update({factor: () for factor in side if factor not in found})
            found.update({factor: self.wanted.get(factor, ()) for factor in own})
            self.taken.update(parts)

    def keep(self, found: Cut) -> None:
        """Beside a sum, what an operand cuts stays where the result is cut alike, but finer."""
        for side, own in enumerate(self.free):
            for factor in own:
                parts = self.sides[side].get(factor, ())
                if parts and factor not in found and self.taken.isdisjoint(parts):
                    if self.wanted.get(factor, ())[: len(parts)] == parts:
                        found[factor] = parts
                        self.taken.update(parts)


def _all(cut: Cut) -> Parts:
    return tuple(part for parts in cut.values() for part in parts)


def _another(part: int, gone: Parts, free: list[int], axes: MeshParts) -> int:
    """The part that takes another's place; -1 if none does."""
    if part not in gone:
        return part
    found = next((other for other in free if axes.sizes[other] == axes.sizes[part]), -1)
    if found >= 0:
        free.remove(found)
    return found


def _factors(dims: Dims) -> list[int]:
    return [factor for dim in dims for factor in dim]
