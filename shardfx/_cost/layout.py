"""Where arrays lie while a step is estimated: for each dimension the parts of mesh axes that cut it, major to minor.

A mesh axis is split into parts of prime size, so that an axis of 16 can cut 8 heads and the 2 queries of each.
"""

import math
from collections.abc import Iterable, Sequence

from ..topology._mesh import MeshSpec
from .factors import Dim, Rule


Parts = tuple[int, ...]
Layout = tuple[Parts, ...]


class MeshParts:
    """The axes of a mesh in parts of prime size, major to minor; a part's number says where it is."""

    def __init__(self, mesh: MeshSpec):
        self.mesh = mesh
        self.sizes: list[int] = []
        self.axis: list[str] = []
        self.between_slices: list[bool] = []
        self._of: dict[str, Parts] = {}
        for name, size, slices in zip(mesh.axis_names, mesh.axis_sizes, mesh.dcn_sizes, strict=True):
            start = len(self.sizes)
            for count, between in ((slices, True), (size // slices, False)):
                primes = _primes(count)
                self.sizes += primes
                self.axis += [name] * len(primes)
                self.between_slices += [between] * len(primes)
            self._of[name] = tuple(range(start, len(self.sizes)))

    def of(self, axes: Iterable[str]) -> Parts:
        """The parts of some mesh axes, in their order; none of those that the mesh has not."""
        return tuple(part for axis in axes for part in self._of.get(axis, ()))

    def names(self, parts: Iterable[int]) -> tuple[str, ...]:
        """The mesh axes that parts are of, in the mesh's order."""
        found = {self.axis[part] for part in parts}
        return tuple(name for name in self.mesh.axis_names if name in found)

    def count(self, parts: Iterable[int]) -> int:
        """How many devices differ along parts."""
        return math.prod([self.sizes[part] for part in parts])

    def slices(self, parts: Iterable[int]) -> int:
        """In how many slices they are."""
        return math.prod([self.sizes[part] for part in parts if self.between_slices[part]])

    def shards(self, layout: Layout) -> int:
        """Into how many pieces a layout cuts an array."""
        return math.prod([self.sizes[part] for parts in layout for part in parts])

    def split(self, parts: Parts, dim: Dim, sizes: Sequence[int]) -> list[tuple[int, Parts]]:
        """The parts that cut a dimension, as those that cut each of its factors.

        What comes after a factor that is cut, but not all through, cuts nothing of the factors behind it; parts that
        fit no factor are left out.
        """
        if len(dim) == 1:
            return [(dim[0], parts)] if sizes[dim[0]] % self.count(parts) == 0 else []
        found: list[tuple[int, Parts]] = []
        at = 0
        for factor in dim:
            left, start = sizes[factor], at
            while at < len(parts) and left % self.sizes[parts[at]] == 0:
                left //= self.sizes[parts[at]]
                at += 1
            if at > start:
                found.append((factor, parts[start:at]))
            if left > 1:
                break
        return found

    def joined(self, by_factor: dict[int, Parts], dim: Dim, sizes: Sequence[int]) -> Parts:
        """The other way: what cuts a dimension whose factors are cut so."""
        if len(dim) == 1:
            return by_factor.get(dim[0], ())
        found: Parts = ()
        for factor in dim:
            own = by_factor.get(factor, ())
            found += own
            if self.count(own) < sizes[factor]:
                break
        return found

    def layout(self, by_factor: dict[int, Parts], dims: Sequence[Dim], rule: Rule) -> Layout:
        """How an array lies where the factors are cut so."""
        if not by_factor:
            return ((),) * len(dims)
        # Most dimensions are one factor. This runs for every array of a step, under every plan that is estimated.
        cut, sizes = by_factor.get, rule.sizes
        return tuple([cut(dim[0], ()) if len(dim) == 1 else self.joined(by_factor, dim, sizes) for dim in dims])


def _primes(count: int) -> list[int]:
    found, at = [], 2
    while count > 1:
        while count % at == 0:
            found.append(at)
            count //= at
        at += 1
    return found
