"""What a rule requests and an array does not get has a reason, and is an error under
`strict=True`: for all rules, strategies, names, units, skipped dimensions and sizes.

The mesh axes that a rule requests are found here without the code that plans.
"""

import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, PartitionSpec as P

from shardfx import (
    AxisRules,
    Code,
    Decision,
    LeafPlan,
    MeshSpec,
    PathRules,
    ShardPlan,
    atomic,
    constrain,
    field,
    follow,
    fsdp,
    optional,
    plan,
    replicate,
)
from shardfx.errors import SpecError
from tests.specs import entries_of, entry_axes


MESHES = (
    {"a": 2, "b": 4, "c": 1},
    {"a": 3, "b": 2, "c": 4},
    {"a": 1, "b": 8},
)
SIZES = st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24])
SHAPES = st.lists(SIZES, max_size=4).map(tuple)
AXIS = st.sampled_from(["a", "b", "c"])
ENTRIES = st.one_of(
    st.none(), AXIS, st.permutations(["a", "b", "c"]).map(lambda axes: tuple(axes[:2]))
)
NAMES = ("batch", "heads", "embed", "mlp", "norm", "gone")
TARGETS = st.one_of(st.none(), AXIS, st.permutations(["a", "b"]).map(tuple))
MODES = st.sampled_from([None, "decode"])
TYPES = st.sampled_from([AxisType.Auto, AxisType.Explicit])
DTYPES = st.sampled_from(["int8", "float32", "bfloat16"])


class Wish(NamedTuple):
    """One request of a rule: mesh axes for the dimension `dim`, or for any dimension if
    it is `None`. One of the alternatives is enough.
    """

    dim: int | None
    alternatives: tuple[tuple[str, ...], ...]


def axes_at(leaf: LeafPlan | Decision, dim: int | None) -> set[str]:
    """The mesh axes that shard a dimension of an array, or any dimension."""
    entries = entries_of(leaf.spec)
    if dim is None:
        chosen = entries
    else:
        chosen = entries[dim : dim + 1]
    return set(itertools.chain.from_iterable(map(entry_axes, chosen)))


def is_granted(leaf: LeafPlan | Decision, wish: Wish, sizes: dict[str, int]) -> bool:
    has = axes_at(leaf, wish.dim)
    trivial = {axis for axis, size in sizes.items() if size == 1}
    return any(has.issuperset(set(axes) - trivial) for axes in wish.alternatives)


def is_told(leaf: LeafPlan | Decision, wish: Wish) -> bool:
    """Whether a reason names the dimension and each axis that the array did not get."""
    named: set[str] = set()
    for reason in leaf.reasons:
        if wish.dim is not None and reason.dim not in (None, wish.dim):
            continue
        if reason.code.is_expected:
            return True
        named.update(reason.axes)
    has = axes_at(leaf, wish.dim)
    return any(named.issuperset(set(axes) - has) for axes in wish.alternatives)


def check(leaf: LeafPlan | Decision, wishes: list[Wish], sizes: dict[str, int]) -> None:
    refused = [wish for wish in wishes if not is_granted(leaf, wish, sizes)]
    for wish in refused:
        assert is_told(leaf, wish), (leaf, wish)
    # A reason is never made up. An axis that two parts of a rule request is left out:
    # the second may get what the first did not.
    axes = []
    for wish in wishes:
        axes += itertools.chain(*wish.alternatives)
    if len(set(axes)) < len(axes):
        return
    unsure = (Code.scalar, Code.duplicate, Code.blocked, Code.small)
    lost = [why for why in leaf.reasons if why.code not in unsure]
    assert not lost or refused, leaf


def wishes_of_spec(spec: P) -> list[Wish]:
    wishes = []
    for dim, entry in enumerate(entries_of(spec)):
        axes = entry_axes(entry)
        if axes:
            wishes.append(Wish(dim, (axes,)))
    return wishes


def wishes_of_names(
    names: tuple[Any, ...], rules: AxisRules, mode: str | None
) -> list[Wish]:
    """The targets of each name's rules before the first `None`. The rules of a mode come
    first.
    """
    rows = []
    if mode is None:
        of_mode = ()
    else:
        of_mode = dict(rules.modes)[mode]
    for dim, name in enumerate(names):
        if name is None:
            continue
        cases = (*of_mode, *rules.rules)
        targets = [target for ruled, target in cases if ruled == name]
        expected = list(itertools.takewhile(lambda target: target is not None, targets))
        if expected:
            rows.append(Wish(dim, tuple(map(entry_axes, expected))))
    return rows


class Layers(eqx.Module):
    w: Any = field(stacked=("layers",))


@st.composite
def strategies_(draw: Any) -> Any:
    axes = draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(1, 2))]
    skip = draw(st.sets(st.integers(0, 4)))
    min_bytes = draw(st.sampled_from([0, 0, 0, 8, 4096]))
    return fsdp(axes, min_bytes, skip_dims=skip)


@st.composite
def axis_rules(draw: Any) -> AxisRules:
    several = st.lists(st.tuples(st.sampled_from(NAMES[:-1]), TARGETS), max_size=8)
    pairs = draw(several)
    declared = [(name, None) for name in NAMES[:-1]]
    return AxisRules(
        [*pairs, *declared],
        modes={"decode": draw(several)},
        units={"heads": draw(st.sampled_from([1, 2, 4]))},
        mesh_axes="c",
    )


@st.composite
def requests(
    draw: Any,
) -> tuple[Any, tuple[int, ...], list[Wish], AxisRules, str | None]:
    """The target of a rule, the shape of an array, and what the rule requests for it in
    a mode of the axis rules.
    """
    shape = draw(SHAPES)
    rules = draw(axis_rules())
    mode = draw(MODES)
    kind = draw(st.sampled_from(["spec", "names", "strategy", "callable", "nothing"]))
    units = tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in shape)
    if kind == "names":
        names: tuple[Any, ...] = ()
        if shape:
            permutation = draw(st.permutations([*NAMES[:-1], None, None]))
            names = tuple(permutation[: len(shape)])
        target = names
        wishes = wishes_of_names(names, rules, mode)
    elif kind in ("spec", "callable"):
        entries = draw(st.lists(ENTRIES, max_size=len(shape)))
        axes = list(itertools.chain.from_iterable(map(entry_axes, entries)))
        if len(set(axes)) == len(axes):
            spec = P(*entries)
        else:
            spec = P()
        target = spec
        wishes = wishes_of_spec(spec)
        if draw(st.booleans()):
            target = atomic(spec, units)
        else:
            target = spec
        if kind == "callable":
            target = lambda path, leaf, target=target: target
    else:
        target = replicate
        wishes = []
        if kind == "strategy":
            target = draw(strategies_())
            wishes = [Wish(None, ((axis,),)) for axis in target.axes]
    if kind != "callable":
        for _ in range(draw(st.integers(0, 2))):
            step = draw(strategies_())
            target = target | step
            wishes = [*wishes, *(Wish(None, ((axis,),)) for axis in step.axes)]
    return optional(target), shape, wishes, rules, mode


# All shapes up to rank 3 of these sizes.
ALL_SHAPES = []
for rank in range(1, 4):
    ALL_SHAPES += itertools.product([1, 2, 3, 4], repeat=rank)
SKIPS = []
for count in range(4):
    SKIPS += itertools.combinations(range(3), count)


def planned(
    tree: Any, mesh: MeshSpec, strict: bool = False, **given_: Any
) -> ShardPlan:
    return plan(tree, mesh, unused="allow", strict=strict, **given_)


@given(
    requests(), st.sampled_from(MESHES), DTYPES, st.booleans(), st.sampled_from([0, 64])
)
@settings(max_examples=150)
def test_a_rule_that_is_not_followed_has_a_reason(
    request_, sizes, dtype, is_stacked, min_bytes
):
    target, shape, wishes, rules, mode = request_
    leaf = jax.ShapeDtypeStruct(shape, dtype)
    if is_stacked:
        tree = Layers(leaf)
    else:
        tree = {"w": leaf}
    paths = PathRules([("w", target)], mesh_axes="abc")
    given_ = {
        "paths": paths,
        "axes": rules,
        "mode": mode,
        "min_bytes": min_bytes,
    }
    sharding_plan = planned(tree, MeshSpec(sizes), **given_)
    if not shape:
        for why in sharding_plan["w"].reasons:
            assert why.code.is_expected
        return
    check(sharding_plan["w"], wishes, sizes)
    lost = [why for why in sharding_plan["w"].reasons if not why.code.is_expected]
    if lost:
        with pytest.raises(SpecError, match="leaf `w`"):
            planned(tree, MeshSpec(sizes), strict=True, **given_)
    else:
        specs = planned(tree, MeshSpec(sizes), strict=True, **given_).specs
        assert specs == sharding_plan.specs


def constrained(
    x: jax.ShapeDtypeStruct, target: Any, sharding_plan: ShardPlan, strict: bool
) -> tuple[Any, Decision]:
    """The type of the constrained array in a traced program, and the decision."""
    decisions = []

    def step(x):
        x, decision = constrain(
            x, target, sharding_plan, strict=strict, unmatched="raise", explain=True
        )
        decisions.append(decision)
        return x

    return jax.eval_shape(step, x), decisions[0]


@given(st.data(), axis_rules(), SHAPES, MODES, TYPES, TYPES, st.booleans())
@settings(max_examples=100)
def test_a_constraint_that_is_not_followed_has_a_reason(
    data, rules, shape, mode, kind, other_kind, is_named
):
    sizes = data.draw(st.sampled_from(MESHES[:2]))
    names = data.draw(st.permutations([*NAMES[:-1], None, None]))[: len(shape)]
    alone = ["a", "b", "c", None, None]
    joined = [data.draw(st.sampled_from([("a", "b"), ("b", "a")])), "c", None, None]
    entries = data.draw(st.sampled_from([alone, joined]).flatmap(st.permutations))
    entries = entries[: len(shape)]
    if is_named:
        target = tuple(names)
        wishes = wishes_of_names(target, rules, mode)
    else:
        target = P(*entries)
        wishes = wishes_of_spec(target)
    kinds = {"a": kind, "b": other_kind, "c": kind}
    mesh = MeshSpec(sizes, axis_types=kinds)
    sharding_plan = planned({}, mesh, axes=rules, mode=mode)
    x = jax.ShapeDtypeStruct(shape, "float32")

    try:
        typed, decision = constrained(x, target, sharding_plan, False)
    except SpecError as error:
        # A size that may count units has no decision: the error is the reason.
        assert is_named
        assert "If the dimension counts units" in str(error)
        return
    turned = [why for why in decision.reasons if why.code is Code.reordered]
    others = tuple(why for why in decision.reasons if why not in turned)
    check(Decision(decision.spec, others), wishes, sizes)
    axes_of_dims = [entry_axes(entry) for entry in entries_of(decision.spec)]
    turned_dims = {why.dim: why.axes for why in turned}
    for dim, axes in turned_dims.items():
        assert dim is not None
        assert sorted(axes_of_dims[dim]) == sorted(axes)
    if not is_named and not others:
        for dim, axes in enumerate(axes_of_dims):
            is_in_order = axes == entry_axes(entries[dim])
            assert is_in_order == (dim not in turned_dims)
    if kind == other_kind == AxisType.Explicit:
        has = entries_of(typed.sharding.spec)
        expected = [
            *map(entry_axes, entries_of(decision.spec)),
            *[()] * (len(shape) - len(entries_of(decision.spec))),
        ]
        assert [*map(entry_axes, has)][: len(shape)] == expected
    if any(not why.code.is_expected for why in decision.reasons):
        with pytest.raises(SpecError):
            constrained(x, target, sharding_plan, True)
    else:
        spec = constrained(x, target, sharding_plan, True)[1].spec
        assert spec == decision.spec


@pytest.mark.parametrize("sizes", [{"a": 2, "b": 3, "c": 1}, {"a": 4, "b": 2, "c": 1}])
def test_each_strategy_has_a_reason_on_each_shape(sizes):
    tree = {str(shape): jax.ShapeDtypeStruct(shape, "int8") for shape in ALL_SHAPES}
    mesh = MeshSpec(sizes)
    for axes, first, skip in itertools.product(
        ["a", "b", "c", "ab"], [P(), P("a")], SKIPS
    ):
        target = first | fsdp(tuple(axes), skip_dims=skip)
        rules = PathRules([("", target)])
        sharding_plan = planned(tree, mesh, paths=rules)
        wishes = [*wishes_of_spec(first), *(Wish(None, ((axis,),)) for axis in axes)]
        for leaf in sharding_plan.leaves:
            check(leaf, wishes, sizes)


@given(
    shape=SHAPES,
    base=st.permutations(["a", "b", None, None]),
    sizes=st.sampled_from(MESHES[:2]),
    over=strategies_(),
)
@settings(max_examples=100)
def test_axes_of_over_that_do_not_fit_have_a_reason(shape, base, sizes, over):
    leaf = jax.ShapeDtypeStruct(shape, "float32")
    rules = [("", optional(P(*base[: len(shape)])))]
    paths = PathRules(rules)
    params = planned({"w": leaf}, MeshSpec(sizes), paths=paths)
    state = follow(lambda tree: tree, params, over=over)["w"]
    has = axes_at(params["w"], None)
    wishes = [Wish(None, ((axis,),)) for axis in over.axes if axis not in has]
    check(state, wishes, sizes)


def test_an_absent_axis_of_over_has_a_reason():
    axes = AxisRules([("embed", "a")], mesh_axes=["c"])
    leaf = jax.ShapeDtypeStruct((8, 8), "float32")
    names = {"w": ("embed", None)}
    mesh = MeshSpec({"a": 2, "b": 2})
    params = plan({"w": leaf}, mesh, names=names, axes=axes)
    followed = follow(lambda tree: tree, params, over=("b", "c"))
    state = followed["w"]
    assert state.spec == P("a", "b")
    actual = [(why.code, why.axes) for why in state.reasons]
    assert actual == [(Code.absent, ("c",))]


def test_no_reason_asks_to_pad_to_the_size_that_is_there():
    mesh = MeshSpec({"tensor": 8, "data": 8})
    weights = {"w": jax.ShapeDtypeStruct((8,), "float32")}
    sharded = plan(weights, mesh, paths=PathRules([("w", P("tensor"))]))
    state = follow(lambda tree: tree, sharded, over="data")
    (reason,) = state["w"].reasons
    assert "size 8 is not divisible by `data` (8) beside the axes" in str(reason)
    assert "pad it" not in str(reason)
