import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from shardfx import MeshSpec, PathRules, plan, plan_reshard, reshard
from shardfx._reshard import flight
from shardfx.errors import (
    LeafTypeError,
    MeshError,
    MoveError,
    PlanMismatchError,
    SpecError,
)
from tests.reshard.layouts import assert_equal, host, mesh, put, sharding, struct


@pytest.mark.parametrize("donate", [False, True])
def test_a_failure_in_the_middle_says_what_moved(donate):
    source = put({name: host((8,)) for name in "abcd"}, sharding((8,), "a"))
    source["c"].delete()
    text = (
        "the sources of these were donated"
        if donate
        else "the tree itself is untouched"
    )
    with pytest.raises(
        MoveError,
        match=(
            r"stopped at leaf `c` \(RuntimeError: Array has been deleted.* after 2 of 4"
            r" leaves: `a`, `b`; "
        )
        + text,
    ) as caught:
        reshard(source, sharding((4,), "a"), donate=donate)
    expected = {"a": host((8,)), "b": host((8,))}
    assert_equal(caught.value.moved, expected)
    np.testing.assert_array_equal(source["d"], host((8,)))
    assert source["a"].is_deleted() == donate


def test_a_failure_without_a_text_says_its_kind(monkeypatch):
    def full(*args, **kwargs):
        raise MemoryError

    source = put({name: host((8,)) for name in "ab"}, sharding((8,), "a"))
    monkeypatch.setattr(flight, "labelled", full)
    with pytest.raises(MoveError, match=r"stopped at leaf `a` \(MemoryError\) after 0"):
        reshard(source, sharding((4,), "a"))


@pytest.mark.parametrize(
    "make_target, error, message",
    [
        (
            lambda: sharding((3,), "a"),
            SpecError,
            r"`w`: dim 0 of shape \(8,\) does not divide .* pad it to 9",
        ),
        (
            lambda: sharding((4,), None, "a"),
            SpecError,
            "`w`: .* more entries than the shape",
        ),
        (lambda: P("a"), LeafTypeError, "`dst` .* at `w`, .*, which is no sharding"),
        (
            lambda: NamedSharding(MeshSpec({"a": 4}).abstract(), P("a")),
            MeshError,
            "`w`: the target .* without devices; use `plan.on",
        ),
    ],
)
def test_errors_come_before_anything_moves(make_target, error, message):
    source = put({"v": host((8,)), "w": host((8,))}, sharding((8,), "a"))
    with pytest.raises(error, match=message):
        reshard(source, {"v": sharding((4,), "a"), "w": make_target()}, donate=True)
    assert not source["v"].is_deleted()


@pytest.mark.parametrize(
    "limit, error, message",
    [
        (
            "1GB",
            LeafTypeError,
            (
                "must be a whole number, not '1GB' of type str; give a number of bytes,"
                " such as"
            ),
        ),
        (
            -1,
            MoveError,
            (
                "`memory_limit_bytes=-1` is negative. Nothing was moved; give a number"
                " of bytes, such as"
            ),
        ),
    ],
)
def test_a_memory_limit_that_is_none(limit, error, message, as_users_run_it):
    with pytest.raises(error, match=message):
        reshard(
            jax.device_put(host((8,)), sharding((8,), "a")),
            sharding((8,), "a"),
            memory_limit_bytes=limit,
        )


def test_sums_that_are_not_taken_yet_are_an_error():
    """A move of their summands would read one device's for the sum."""
    end = mesh((2, 4), axis_types=(AxisType.Explicit,) * 2)
    cases = (P("a", "b"), P("b"))
    remaining, right = (
        jax.device_put(host((8, 8)), NamedSharding(end, spec)) for spec in cases
    )
    unreduced = NamedSharding(end, P("a", unreduced=frozenset({"b"})))
    reduced = NamedSharding(end, P("a"))
    sums = jax.jit(lambda x, y: jnp.einsum("ij,jk->ik", x, y, out_sharding=unreduced))(
        remaining, right
    )
    plain = jax.device_put(host((8, 8)), reduced)
    message = (
        r"leaf `w`: .* has the unreduced axes \['b'\].*; add the array up first with"
        r" `jax.sharding.reshard\(x, "
    )
    for move in (reshard, plan_reshard):
        for source, target in (
            (sums, reduced),
            (plain, unreduced),
            (sums, sharding((4,), "a")),
        ):
            with pytest.raises(SpecError, match=message):
                move({"w": source}, {"w": target})
        with pytest.raises(SpecError, match=message):
            move({"w": sums}, {"w": sums.sharding}, lost=[gone()])
    with pytest.raises(SpecError, match=message):
        reshard({"w": host((8, 8))}, {"w": unreduced})
    assert reshard(sums, sums.sharding) is sums
    assert plan_reshard(sums, sums.sharding).in_place == ("",)
    moved = jax.sharding.reshard(sums, reduced)
    tree = reshard(moved, sharding((4,), "a"))
    expected = host((8, 8)) @ host((8, 8))
    assert_equal(
        tree,
        expected,
    )


def test_another_tree_is_an_error():
    placed = jax.device_put(host((8,)), sharding((8,), "a"))
    source = {"v": placed}
    with pytest.raises(PlanMismatchError, match="`dst` is no prefix of the tree"):
        reshard(source, {"w": sharding((8,), "a")})
    rules = PathRules([("w", P("a"))])
    with pytest.raises(PlanMismatchError, match="the plan has no `v`"):
        reshard(
            source,
            plan({"w": host((8,))}, mesh((8,)), paths=rules),
        )
    rules = PathRules([("v", P("a"))])
    with pytest.raises(PlanMismatchError, match="has no devices"):
        reshard(source, plan(source, MeshSpec({"a": 8}), paths=rules))


def gone():
    return jax.devices()[0]


@pytest.mark.parametrize(
    "lost, message",
    [
        (
            lambda: [0, 1],
            (
                r"`lost` holds 0, of type int, not a device; give an iterable of jax"
                r" devices, such as `lost="
            ),
        ),
        (
            lambda: gone(),
            (
                "`lost` must be of type Iterable, not .*Device; give an iterable of jax"
                " devices, such as"
            ),
        ),
        (lambda: [gone(), {gone()}], "`lost` holds .*, of type set, not a device"),
    ],
)
def test_lost_must_be_devices(lost, message, as_users_run_it):
    source = jax.device_put(host((8,)), sharding((8,)))
    target = sharding((8,), "a")
    for move in (reshard, plan_reshard):
        with pytest.raises(LeafTypeError, match=message):
            move(source, target, lost=lost())


def test_lost_may_be_any_iterable_of_devices():
    tree = [struct((8,), sharding((8,))), struct((16,), sharding((8,)))]
    for lost in (iter, frozenset, np.array):
        move = plan_reshard(tree, sharding((8,), "a"), lost=lost([gone()]))
        assert 0 not in [sender for sender, _ in move.links]
        assert move.wire_bytes
        arrays = jax.tree.map(lambda x: jax.device_put(host(x.shape), x.sharding), tree)
        moved = reshard(arrays, sharding((8,), "a"), lost=lost([gone()]))
        expected = [host((8,)), host((16,))]
        assert_equal(
            moved,
            expected,
        )
