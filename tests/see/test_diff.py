"""Two plans compared: leaves, axes, bytes and steps; and their texts."""

import html
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules, diff, plan_reshard
from shardfx._plan import differences
from shardfx.testing import assert_same_plan_text, plan_text
from tests.structs import leaf


MESH = MeshSpec({"fsdp": 4, "tensor": 2})


TREE = {"embed": leaf(64, 32), "layers": [{"w": leaf(32, 32), "b": leaf(32)}] * 12}


def planned(text, tree=TREE, mesh=MESH, **others):
    return sfx.plan(tree, mesh, paths=PathRules.parse(text), **others)


BEFORE = planned("embed->tensor.fsdp, w->fsdp.tensor, b->fsdp")
AFTER = planned("embed->tensor.fsdp, w->tensor.fsdp, b->None")


def test_axes_that_moved_are_grouped_over_layers():
    weights, biases = sorted(
        diff(BEFORE, AFTER).leaves, key=lambda row: row.path, reverse=True
    )
    assert weights.path == "layers/{0..11}/w"
    assert weights.count == 12
    texts = [str(move) for move in weights.axes]
    assert texts == [
        "fsdp dim 0 -> 1",
        "tensor dim 1 -> 0",
    ]
    assert [str(move) for move in biases.axes] == ["fsdp no longer cuts dim 0"]
    assert biases.steps == ("all_gather",)


def test_diff_has_the_bytes_and_steps_of_the_move():
    same = diff(BEFORE, sfx.ShardPlan.from_json(BEFORE.to_json()))
    assert not same
    assert same.leaves == ()
    assert str(same).startswith("the plans are equal")
    difference = diff(BEFORE, AFTER)
    moving = plan_reshard(BEFORE, AFTER)
    assert difference.wire_bytes == moving.wire_bytes > 0
    by_path = {leaf.path: leaf for leaf in moving.leaves}
    for row in difference.leaves:
        expected = sum(by_path[path].wire_bytes for path in row.paths)
        assert row.wire_bytes == expected
        steps = by_path[row.paths[0]].steps
        expected = tuple(step.kind for step in steps)
        assert row.steps == expected
    assert difference.bytes_per_device == (
        BEFORE.bytes_per_device,
        AFTER.bytes_per_device,
    )


def test_a_smaller_mesh_moves_leaves_whose_specs_are_equal():
    mesh = MeshSpec({"fsdp": 2, "tensor": 2})
    smaller = planned(
        "embed->tensor.fsdp, w->fsdp.tensor, b->fsdp",
        mesh=mesh,
    )
    difference = diff(BEFORE, smaller)
    assert difference.plans == (
        "the mesh is fsdp=4,tensor=2 in one plan, fsdp=2,tensor=2 in the other",
    )
    assert sum(row.count for row in difference.leaves) == len(BEFORE)
    assert {row.steps for row in difference.leaves} == {("tiles",)}


def test_plans_of_other_trees():
    tree = {
        "embed": leaf(64, 32, dtype=jnp.float32),
        "layers": TREE["layers"][:10],
        "extra": leaf(8),
    }
    difference = diff(
        BEFORE,
        planned("embed->tensor.fsdp, w->fsdp.tensor, b->fsdp, extra->fsdp", tree),
    )
    row_by_path = {
        row.path: (row.before is None, row.after is None, row.fields)
        for row in difference.leaves
    }
    assert row_by_path["layers/{10..11}/w"] == (False, True, ())
    assert row_by_path["extra"] == (
        True,
        False,
        (),
    )
    assert row_by_path["embed"][2] == ("dtype", "bytes", "bytes_per_device")
    moves = [row.move for row in difference.leaves]
    assert moves == [None] * len(difference.leaves)
    assert difference.wire_bytes == 0
    for text in (
        "only in the first",
        "only in the second",
        "bf16[64,32] -> f32[64,32]",
    ):
        assert text in str(difference)


def test_what_decides_may_differ_where_nothing_moves():
    difference = diff(BEFORE, planned("embed->tensor.fsdp, w$->fsdp.tensor, b->fsdp"))
    assert {row.fields for row in difference.leaves} == {("rule",)}
    assert difference.wire_bytes == 0
    assert "rule: paths[1] w -> paths[1] w$" in str(difference)


def test_containers_and_strictness_and_rules_differ():
    listed = diff(planned(".*->fsdp", [leaf(8)]), planned(".*->fsdp", (leaf(8),)))
    assert listed.plans == (
        "the trees are built of other containers, or their leaves are in another order",
    )
    strict = diff(
        planned(".*->fsdp", [leaf(8)]), planned(".*->fsdp", [leaf(8)], strict=True)
    )
    assert strict.plans == ("strict is False in one plan, True in the other",)
    rules = [
        sfx.plan([leaf(8)], MESH, names=[("a",)], axes=AxisRules([("a", axis)]))
        for axis in ("fsdp", "tensor")
    ]
    assert "axes is" in diff(*rules).plans[0]


def test_leaves_that_cannot_be_moved_are_compared_all_the_same():
    tree = {"w": leaf(8, dtype=jnp.int2), "b": leaf(8)}
    difference = diff(planned(".*->fsdp", tree), planned(".*->tensor", tree))
    leaves = difference.leaves
    moves = {row.path: row.move for row in leaves}
    assert moves["w"] is None
    assert moves["b"] is not None


def test_memory_kinds_and_devices(getkey):
    tree = {"w": leaf(8, 8)}
    offloaded = planned("w->fsdp", tree, memory_kinds=[("w", "pinned_host")])
    difference = diff(planned("w->fsdp", tree), offloaded)
    assert difference.leaves[0].fields == ("memory_kind",)
    assert difference.leaves[0].steps == ("memory kind",)
    mesh = MeshSpec({"fsdp": 4, "tensor": 2})
    devices = mesh.build(jax.devices())
    assert not diff(planned("w->fsdp", tree).on(devices), planned("w->fsdp", tree))
    wire_bytes = diff(
        planned("w->fsdp", tree).on(devices), planned("w->tensor", tree)
    ).wire_bytes
    assert wire_bytes > 0


specs = st.sampled_from(
    ["fsdp", "tensor", "None", "fsdp.tensor", "tensor.fsdp", "None.fsdp"]
)


@settings(deadline=None, max_examples=40)
@given(st.tuples(specs, specs), st.booleans())
def test_a_diff_is_false_exactly_where_differences_are_none(pair, other_mesh):
    tree = {"w": leaf(8, 8), "v": leaf(8, 8)}
    meshes = (MESH, MeshSpec({"fsdp": 2, "tensor": 4}) if other_mesh else MESH)
    a, b = (
        planned(f"w->{text}, v->fsdp", tree, mesh)
        for text, mesh in zip(pair, meshes, strict=True)
    )
    difference = diff(a, b)
    expected = bool(differences(a, b))
    assert bool(difference) == expected == (a.digest != b.digest)
    for row in difference.leaves:
        for move in row.axes:
            assert (move.src is None) != (move.dst is None) or move.src != move.dst
    assert difference.wire_bytes == plan_reshard(a, b).wire_bytes


GOLDEN = """\
# shardfx plan text 1
mesh fsdp=4,tensor=2
25 arrays, 29,440 bytes, 3,776 per device

embed: bf16[64,32] tensor,fsdp
layers/{0..11}/b: 12 x bf16[32] fsdp
layers/{0..11}/w: 12 x bf16[32,32] fsdp,tensor
"""


def test_the_text_of_a_plan_depends_on_its_specs_alone():
    assert plan_text(BEFORE) == GOLDEN
    assert_same_plan_text(
        planned("^embed$->tensor.fsdp, /w$->fsdp.tensor, .*->fsdp"), GOLDEN
    )


def test_golden_files(tmp_path):
    path = tmp_path / "plan.txt"
    with pytest.raises(
        AssertionError,
        match=re.escape(f"there is no file {path} with the text of a plan yet"),
    ):
        assert_same_plan_text(BEFORE, path)
    assert_same_plan_text(BEFORE, str(path), update=True)
    assert path.read_text() == GOLDEN
    assert_same_plan_text(BEFORE, path)
    with pytest.raises(
        AssertionError,
        match=r"run `assert_same_plan_text\(plan, '.*plan.txt', update=True\)`",
    ):
        assert_same_plan_text(AFTER, path)
    with pytest.raises(
        AssertionError, match=r"replace the text with `plan_text\(plan\)`"
    ) as caught:
        assert_same_plan_text(AFTER, GOLDEN)
    row = "layers/{0..11}/w: 12 x bf16[32,32]"
    limit = {*str(caught.value).splitlines()}
    assert {f"-{row} fsdp,tensor", f"+{row} tensor,fsdp"} <= limit
    with pytest.raises(ValueError, match="`update=True` writes a file"):
        assert_same_plan_text(BEFORE, GOLDEN, update=True)


def test_a_text_says_what_was_not_given_and_where_it_is_kept():
    tree = {"w": leaf(7, 8), "a\nb": leaf(8)}
    plan = planned("w->fsdp.tensor, a->fsdp", tree, memory_kinds=[("a", "pinned_host")])
    lines = plan_text(plan).splitlines()[4:]
    assert lines == [
        "a\\nb: bf16[8] fsdp in pinned_host",
        "w: bf16[7,8] -,tensor (dim 0 indivisible: fsdp)",
    ]
    mesh = MeshSpec(
        {"pod": 2, "fsdp": 4}, dcn={"pod": 2}, axis_types=jax.sharding.AxisType.Explicit
    )
    axes = AxisRules([("a", "fsdp")], modes={"serve": []})
    sharding_plan = sfx.plan([leaf(8)], mesh, names=[("a",)], axes=axes, mode="serve")
    text = plan_text(sharding_plan)
    assert text.splitlines()[1:3] == [
        "mesh pod=2,fsdp=4 slices pod=2 pod=Explicit fsdp=Explicit",
        "mode serve",
    ]


@pytest.mark.parametrize("kind", ["explanation", "diff", "findings"])
def test_hostile_names_stay_text(kind):
    name = "<script>alert(1)</script>\x1b[31m\u202e" + '"' * 3
    a, b = (
        sfx.plan({name: leaf(7, 8)}, MESH, paths=PathRules.parse(f".*->{spec}"))
        for spec in ("fsdp", "None.fsdp")
    )
    shown = {
        "explanation": sfx.explain(a, name),
        "diff": diff(a, b),
        "findings": sfx.lint(a),
    }[kind]
    page = shown._repr_html_()
    text = str(shown)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    for char in page + text:
        assert char.isprintable() or char == "\n"


def test_what_a_notebook_shows_has_the_rows_of_the_text():
    findings = sfx.lint(planned(".*->fsdp", {"w": leaf(7, 8)}))
    for shown in (
        diff(BEFORE, AFTER),
        sfx.explain(BEFORE, "embed"),
        findings,
        sfx.cost.fit(BEFORE, chip="v5e"),
    ):
        cells = re.findall(r"<td[^>]*>([^<]*)</td>", shown._repr_html_())
        text = " ".join(str(shown).split())
        assert len(cells) > 5
        for cell in cells:
            if cell not in ("-", "1"):
                assert html.unescape(cell) in text
