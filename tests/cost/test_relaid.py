"""How XLA brings arrays from one layout to another, held against what it compiles."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx import MeshSpec, traffic
from shardfx._cost.layout import MeshParts
from shardfx._cost.price import Prices, total
from shardfx._cost.relaid import steps


SIDES = (16, 24, 32, 40)


def drawn(draw, axes, rank):
    """A layout: each axis cuts one dimension, or none."""
    names, found = list(axes), [()] * rank
    draw.shuffle(names)
    for axis in names:
        at = draw.randrange(rank + 1)
        if at < rank:
            found[at] = (*found[at], axis)
    return tuple(found)


def spec_of(layout):
    return P(*[axes or None for axes in layout])


def compiled_bytes(mesh, sides, source, target):
    shardings = [NamedSharding(mesh, spec_of(layout)) for layout in (source, target)]
    move = jax.jit(lambda x: x, in_shardings=shardings[0], out_shardings=shardings[1])
    return traffic(move.lower(jax.ShapeDtypeStruct(sides, jnp.float32)).compile(), mesh).wire_bytes


@pytest.mark.parametrize(
    "sizes, rank, count",
    [((2, 2, 2), 2, 25), ((2, 2, 2), 3, 60), ((2, 2, 2), 4, 25), ((2, 4), 3, 25), ((4, 2), 2, 15), ((8,), 3, 6)],
)
def test_what_is_sent_is_what_the_compiler_sends(sizes, rank, count):
    spec = MeshSpec(dict(zip("abc", sizes, strict=False)))
    mesh, axes = spec.build(jax.devices()), MeshParts(spec)
    draw, prices, sides = random.Random(rank), Prices(axes, scatters=False), SIDES[:rank]
    size = float(4 * np.prod(sides))
    for _ in range(count):
        source, target = drawn(draw, spec.axis_names, rank), drawn(draw, spec.axis_names, rank)
        own, wanted = (tuple(map(axes.of, layout)) for layout in (source, target))
        found = total(prices.moves(size, own, (), wanted))
        assert found == pytest.approx(compiled_bytes(mesh, sides, source, target), rel=1e-6), (source, target)


@pytest.mark.parametrize(
    "source, target",
    [
        ((("a", "b"), ("c",), ()), ((), (), ("a", "b", "c"))),
        ((("c",), (), ()), ((), ("b",), ("a",))),
        ((("a",), ("b",)), (("a", "c", "b"), ())),
    ],
)
def test_where_no_way_is_known_each_device_gets_all(source, target):
    spec = MeshSpec({"a": 2, "b": 2, "c": 2})
    axes = MeshParts(spec)
    own, wanted = (tuple(map(axes.of, layout)) for layout in (source, target))
    found = steps(axes, own, wanted)
    assert {step.kind for step in found} == {"all-gather"}
    assert axes.shards(found[-1].result) == 1


layouts = st.integers(0, 2**32).map(random.Random)


@given(layouts, st.sampled_from([(2, 2, 2), (6, 4), (2, 3, 5), (12,), (4, 2, 3)]), st.integers(1, 4))
def test_steps_follow_on_each_other_and_end_where_the_target_can_be_cut(draw, sizes, rank):
    spec = MeshSpec(dict(zip("abc", sizes, strict=False)))
    axes = MeshParts(spec)
    source, target = (tuple(map(axes.of, drawn(draw, spec.axis_names, rank))) for _ in range(2))
    found = steps(axes, source, target)
    for one, other in itertools.pairwise(found):
        cut = zip(one.result, other.before, strict=True)
        assert all(after[: len(before)] == before for before, after in cut) or other.kind == "collective-permute"
    last = found[-1].result if found else source
    assert all(wanted[: len(own)] == own for own, wanted in zip(last, target, strict=True))
    for step in found:
        used = [part for parts in step.result for part in parts]
        assert len(used) == len(set(used))
