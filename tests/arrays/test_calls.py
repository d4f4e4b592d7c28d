"""Each call gets its own arguments, whatever the call before it was."""

import collections

import jax
import numpy as np
import pytest

from shardfx import filter_jit


A, B, C = (np.full(2, value, np.float32) for value in (1.0, 2.0, 3.0))
Pair = collections.namedtuple("Pair", "x y")

# Each pair has as many leaves of the same types, or holds what is no leaf.
OTHERS = [
    (([A, B],), ((A, B),)),
    (([A, B],), ([A],)),
    (([A, B],), ([A, [B]],)),
    (([A, B],), ([A, None],)),
    (([A, B],), (A, B)),
    (({"a": A, "b": B},), ({"a": A, "c": B},)),
    (({"a": A, "b": B},), ({"b": A, "a": B},)),
    (({"a": A, "b": B},), (collections.OrderedDict(a=A, b=B),)),
    (([A], [B, C]), ([A, B], [C])),
    (([A, 1],), ([A, True],)),
    (([A, 1],), ([A, 2],)),
    ((A, 1.0), (A, 1)),
    ((Pair(A, B),), ((A, B),)),
]


@pytest.mark.parametrize("first, second", OTHERS, ids=str)
def test_each_call_gets_its_own_arguments(first, second):
    run = filter_jit(lambda *args: args)
    for args in (first, second, first, second):
        with jax.disable_jit():  # each would be a program
            found = run(*args)
        assert jax.tree.structure(found) == jax.tree.structure(args)
        pairs = [*zip(jax.tree.leaves(found), jax.tree.leaves(args), strict=True)]
        assert all(np.array_equal(a, b) and isinstance(b, np.ndarray) or (type(a), a) == (type(b), b) for a, b in pairs)


def test_defaults_count_and_so_do_names():
    traced = []
    run = filter_jit(lambda x, scale=2.0: traced.append(scale) or x * scale)
    found = [run(A), run(A, 3.0), run(A), run(A, 2.0), run(A, scale=3.0)]
    assert [float(one[0]) for one in found] == [2, 3, 2, 2, 3] and traced == [2.0, 3.0]
