"""Dimensions as sequences of parts, and which parts must be cut alike.

A dimension begins as one part. Where a reshape splits or fuses it, the part becomes several, slowest first. Parts that
an operation ties together are one class: a union-find whose members can be split further at any time.
"""

from collections.abc import Sequence


class Parts:
    """All parts of all dimensions, and the classes that they form."""

    def __init__(self):
        self.sizes: list[int] = []
        self._parent: list[int] = []
        self._children: dict[int, tuple[int, ...]] = {}

    def new(self, size: int) -> int:
        """A part of `size` elements."""
        self.sizes.append(size)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def find(self, part: int) -> int:
        """The part that stands for the class of this one."""
        while self._parent[part] != part:
            self._parent[part] = self._parent[self._parent[part]]
            part = self._parent[part]
        return part

    def leaves(self, part: int) -> list[int]:
        """The classes that a part consists of, slowest first; none for a part of one element."""
        part = self.find(part)
        if part in self._children:
            return [leaf for child in self._children[part] for leaf in self.leaves(child)]
        return [part] if self.sizes[part] > 1 else []

    def align(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Ties two sequences of parts that hold the same elements in the same order; splits where they differ.

        Returns whether it got to the end. From the first pair of sizes of which neither divides the other, nothing
        is tied.
        """
        ours, theirs = list(reversed(left)), list(reversed(right))
        while ours and theirs:
            a, b = self.find(ours[-1]), self.find(theirs[-1])
            if self.sizes[a] == 1 or a == b:
                ours.pop()
                if a == b:
                    theirs.pop()
            elif self.sizes[b] == 1:
                theirs.pop()
            elif self.sizes[a] == self.sizes[b] and not (a in self._children and b in self._children):
                self._unite(a, b)
                ours.pop()
                theirs.pop()
            elif not self._opened(ours, a, b) and not self._opened(theirs, b, a):
                return False
        return True

    def _opened(self, stack: list[int], part: int, other: int) -> bool:
        """Puts the children of the part in its place, where it is at least as large as the other."""
        size, least = self.sizes[part], self.sizes[other]
        if size < least:
            return False
        if part not in self._children:
            if size % least or size == least:
                return False
            self._children[part] = self.new(least), self.new(size // least)
        stack.pop()
        stack.extend(reversed(self._children[part]))
        return True

    def _unite(self, a: int, b: int) -> None:
        # The one that is split stands for both, so that its children are found.
        root, other = (b, a) if b in self._children else (a, b)
        self._parent[other] = root
