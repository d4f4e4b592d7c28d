import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from moves import move_of

from shardfx import MeshSpec, PathRules, plan, plan_reshard, reshard
from shardfx.errors import LeafTypeError, MeshError, PlanMismatchError, SpecError
from tests.reshard.layouts import host, mesh, sharding, struct


def test_a_plan_names_what_needs_nothing_and_counts_the_rest():
    src = {
        "w": struct((16, 8), sharding((8,), "a")),
        "b": struct((16,), sharding((8,), "a")),
    }
    dst = {
        "w": struct((16, 8), sharding((8,), None, "a")),
        "b": struct((16,), sharding((8,), "a")),
    }
    move = plan_reshard(src, dst)
    assert move.in_place == ("b",)
    assert move.moves == 1
    (leaf,) = [leaf for leaf in move.leaves if leaf.path == "w"]
    assert [step.kind for step in leaf.steps] == ["all_to_all"]
    assert list(move.steps) == ["w"]
    # Each device has 64 bytes, keeps an eighth and gets the rest.
    assert move.wire_bytes == move.lower_bound_bytes == 56
    assert move.peak_bytes == leaf.peak_bytes + 8 == 136
    text = str(move)
    assert "all_to_all" in text
    assert "nothing to do for 1 array: b" in text
    # These devices are this process's CPU; meshes without devices are taken to be what
    # they will be.
    assert leaf.copied
    assert "1 array takes no steps here, where this CPU plays all devices" in text
    src = MeshSpec({"a": 8}).abstract()
    dst = P(None, "a")
    bare = plan_reshard(
        struct((16, 8), NamedSharding(src, P("a"))),
        struct((16, 8), NamedSharding(src, dst)),
    )
    assert not bare.leaves[0].copied
    assert "take no steps" not in str(bare)
    assert bare.steps.keys() == {""}


def test_rows_of_the_table_tell_layers_of_different_shapes_apart():
    source = sharding((8,), "a")
    target = sharding((2, 4), "b", "a")
    shapes = ((16, 8), (8, 16))
    mlp = {
        "layers": [
            {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=source)}
            for shape in shapes
        ]
    }
    tree = {"blocks": [mlp] * 3}
    reshard_plan = plan_reshard(tree, jax.tree.map(lambda _: target, tree))
    text = str(reshard_plan)
    lines = text.splitlines()
    parts = [line.split("  ")[0] for line in lines[1:3]]
    assert parts == [
        "blocks/{0..2}/layers/0/w",
        "blocks/{0..2}/layers/1/w",
    ]


def test_a_plan_between_device_sets_shows_tiles_and_links():
    src = struct((12, 8), sharding((3,), "a"))
    target_sharding = sharding((2,), "a", order=(6, 7))
    move = plan_reshard(src, struct((12, 8), target_sharding))
    (leaf,) = move.leaves
    assert leaf.how == "tiles"
    assert leaf.links == move.links
    expected = {
        (0, 6): 128,
        (1, 6): 64,
        (1, 7): 64,
        (2, 7): 128,
    }
    assert move.links == expected
    assert move.wire_bytes == 192
    assert "0 -> 6: 128 B" in str(move)
    single = jax.sharding.SingleDeviceSharding(jax.devices()[5])
    reshard_plan = plan_reshard(struct((8,), single), struct((8,), sharding((2,), "a")))
    links = reshard_plan.links
    expected = {(5, 0): 16, (5, 1): 16}
    assert links == expected


def test_plans_without_devices_agree_with_plans_on_devices():
    tree = {
        "w": jax.ShapeDtypeStruct((24, 16), jnp.float32),
        "b": jax.ShapeDtypeStruct((24,), jnp.bfloat16),
    }
    tree |= {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in "pqrs"}
    # From replicas, whose senders are balanced over the tree.
    rules = PathRules([("w", P("x", "y")), ("b", P("x")), (".*", P())])
    for small in (
        {"x": 2, "y": 4},
        {"x": 3, "y": 2},
        {"x": 6, "y": 1},
        {"x": 4, "y": 2},
    ):
        plans = [
            plan(tree, MeshSpec(axes), paths=rules)
            for axes in ({"x": 2, "y": 2}, small)
        ]
        live = [end.on(end.mesh.build(jax.devices()[: end.mesh.size])) for end in plans]
        bare = plan_reshard(*plans)
        there = plan_reshard(*live)
        for field in (
            "wire_bytes",
            "lower_bound_bytes",
            "links",
            "peak_bytes",
            "in_place",
            "moves",
        ):
            assert getattr(bare, field) == getattr(there, field), field


def test_plans_on_several_slices_say_what_crosses():
    tree = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    specs = P(("slices", "chips")), P(None, "chips")
    layouts = {}
    for slices in (1, 2):
        axes = {"slices": 2, "chips": 4}
        target = MeshSpec(axes, dcn={"slices": slices})
        layouts[slices] = [
            plan(tree, target, paths=PathRules([("w", spec)])) for spec in specs
        ]
    apart = plan_reshard(*layouts[2])
    together = plan_reshard(*layouts[1])
    # A slice holds half of the array, each device of it takes in an eighth of the other
    # half: 64 * 64 * 4 / 2 / 4.
    expected = 64 * 64 * 4 // 2 // 4
    assert apart.leaves[0].dcn_bytes == apart.dcn_bytes == expected
    assert together.dcn_bytes == 0
    assert together.wire_bytes <= apart.wire_bytes
    assert "at the peak; 2 KiB of what enters come from other slices" in str(apart)
    assert "other slices" not in str(together)
    structs = layouts[1][1].structs
    reshard_plan = plan_reshard(layouts[2][0], structs)
    dcn_bytes = reshard_plan.dcn_bytes
    assert dcn_bytes == apart.dcn_bytes


def test_plans_and_trees_can_be_mixed():
    placed = jax.device_put(host((8, 8)), sharding((8,), "a"))
    tree = {"w": placed, "n": "no array"}
    rules = PathRules([("w", P(None, "a"))])
    sharding_plan = plan(tree, mesh((8,)), paths=rules)
    expected = plan_reshard(tree, sharding_plan)
    reshard_plan = plan_reshard(tree, {"w": sharding_plan.shardings["w"], "n": None})
    expected_wire_bytes = reshard_plan.wire_bytes
    assert expected.wire_bytes == expected_wire_bytes > 0
    assert plan_reshard(sharding_plan, tree).wire_bytes == expected.wire_bytes


ENDS = {
    "rows": lambda: sharding((8,), "a"),
    "columns": lambda: sharding((8,), None, "a"),
    "grid": lambda: sharding((2, 4), "b", "a"),
    "replicas": lambda: sharding((2, 4)),
    "half": lambda: sharding((2, 2), "b", "a"),
    "turned": lambda: sharding((8,), "a", order=(7, 6, 5, 4, 3, 2, 1, 0)),
    "other names": lambda: NamedSharding(mesh((8,), "z"), P("z")),
    "hosted rows": lambda: sharding((8,), "a", kind="pinned_host"),
    "hosted grid": lambda: sharding((2, 4), "b", "a", kind="pinned_host"),
    "hosted half": lambda: sharding((2, 2), "b", "a", kind="pinned_host"),
    "alone": lambda: sharding((1,)),
    "single": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
}


@pytest.mark.parametrize("ours", list(ENDS))
@pytest.mark.parametrize("theirs", list(ENDS))
def test_a_plan_says_how_a_move_is_made(ours, theirs):
    src = ENDS[ours]()
    dst = ENDS[theirs]()
    shape = (16, 16)
    move = move_of(shape, np.dtype("float32"), src, dst, copies=False)
    reshard_plan = plan_reshard(struct(shape, src), struct(shape, dst))
    (leaf,) = reshard_plan.leaves
    assert leaf.how == move.how
    assert leaf.copied == (move.how == "steps")
    # Without programs of steps the CPU copies, and what need not move does not either.
    copied = move_of(shape, np.dtype("float32"), src, dst)
    expected = {"steps": "tiles"}.get(move.how, move.how)
    assert copied.how == expected
    if move.plan is not None:
        expected = move.plan.steps
    else:
        expected = ()
    assert leaf.steps == expected
    assert leaf.source_bytes == move.source_bytes
    assert leaf.target_bytes == move.target_bytes
    # What is in the devices' memory is counted, and beside it at most what the limit is
    # checked against.
    total = sum(leaf.held_bytes)
    assert total - min(leaf.held_bytes) <= leaf.peak_bytes <= total + move.extra_bytes
    bare = []
    for name, end in ((ours, src), (theirs, dst)):
        if isinstance(end, NamedSharding) and name != "turned":
            memory_kind = "pinned_host" if "hosted" in name else None
            sharding = NamedSharding(
                end.mesh.abstract_mesh, end.spec, memory_kind=memory_kind
            )
            bare.append(sharding)
    if len(bare) == 2 and "other names" not in (ours, theirs):
        reshard_plan = plan_reshard(struct(shape, bare[0]), struct(shape, bare[1]))
        (other,) = reshard_plan.leaves
        assert other.how == leaf.how
        assert other.held_bytes == leaf.held_bytes
        assert other.peak_bytes == leaf.peak_bytes


def test_host_memory_is_counted_apart():
    rows = sharding((8,), "a")
    away = sharding((8,), "a", kind="pinned_host")
    out = plan_reshard(
        [struct((64, 8), rows)] * 4,
        [struct((64, 8), away)] * 3 + [struct((64, 8), rows)],
    )
    shard = 256
    assert out.peak_bytes == 4 * shard
    assert out.host_bytes == 3 * shard
    back = plan_reshard([struct((64, 8), away)] * 4, [struct((64, 8), rows)] * 4)
    assert back.peak_bytes == 4 * shard
    assert back.host_bytes == 4 * shard
    # The layout changes on the devices, to which the source is copied: one array's at a
    # time.
    turned = plan_reshard(
        [struct((64, 8), away)] * 4, [struct((64, 8), sharding((8,), None, "a"))] * 4
    )
    assert turned.peak_bytes == 5 * shard
    assert turned.host_bytes == 4 * shard


def test_plans_count_the_data_of_typed_keys():
    keys = jax.device_put(jax.random.split(jax.random.key(0), 16), sharding((8,), "a"))
    reshard_plan = plan_reshard(keys, sharding((4,), "a"))
    (leaf,) = reshard_plan.leaves
    assert leaf.how == "tiles"
    assert leaf.target_bytes == 4 * 2 * 4


def test_planned_losses_are_listed():
    lost = jax.devices()[3:4]
    move = plan_reshard(
        struct((8,), sharding((8,), "a")),
        struct((8,), sharding((2,), "a")),
        lost=lost,
    )
    expected = {"": (((3, 4),),)}
    assert move.missing == expected
    assert "lost: `` [3:4]" in str(move)
    placed = jax.device_put(host((8,)), sharding((8,), "a"))
    source = {"v": placed}
    message = (
        r"`v`: 1 of 8 elements are on lost devices only, the first of them \[3:4\];"
        r" load it from a checkpoint"
    )
    with pytest.raises(MeshError, match=message):
        reshard(source, sharding((2,), "a"), lost=jax.devices()[3:4], donate=True)
    assert not source["v"].is_deleted()


def test_plans_of_different_trees_are_an_error():
    a = struct((8,), sharding((8,), "a"))
    b = struct((16,), sharding((8,), "a"))
    with pytest.raises(
        PlanMismatchError,
        match=r"leaf `x` is float32\[8\] in `src` and float32\[16\] in `dst`",
    ):
        plan_reshard({"x": a}, {"x": b})
    small = struct((8,), sharding((4,), "a"), jnp.bfloat16)
    message = (
        r"leaf `x` is float32\[8\] in `src` and bfloat16\[8\] in `dst`; a move changes"
        r" neither"
    )
    rules = PathRules([(".*", P("a"))])
    sharding_plan = plan({"x": small}, mesh((4,)), paths=rules)
    for target in ({"x": small}, sharding_plan):
        with pytest.raises(PlanMismatchError, match=message):
            plan_reshard({"x": a}, target)
    source_plan = plan({"x": a, "y": a}, mesh((8,)), paths=rules)
    with pytest.raises(PlanMismatchError, match="`y` is only in one of them"):
        plan_reshard(
            source_plan,
            plan({"x": a}, mesh((8,)), paths=rules),
        )
    # A tree that is one array has no path to name.
    for tree, name in ((lambda x: {"x": x}, "leaf `x`"), (lambda x: x, "the array")):
        with pytest.raises(LeafTypeError, match=f"^{name} of `src` has no sharding"):
            plan_reshard(tree(jax.ShapeDtypeStruct((8,), jnp.float32)), tree(a))
        for move in (reshard, plan_reshard):
            with pytest.raises(SpecError, match=rf"^{name}: dim 0 of shape \(8,\)"):
                move(tree(jax.device_put(host((8,)), a.sharding)), sharding((3,), "a"))
