import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules, ShardPlan, plan
from shardfx.errors import (
    LeafTypeError,
    MeshError,
    PlanMismatchError,
    RuleError,
    SpecError,
    UnknownPathError,
    UnmatchedError,
)
from tests.plan.small_plans import (
    AXES,
    KV,
    MADE,
    MESH,
    NAMES,
    ON,
    STRICT,
    TREE,
    W,
    ruled,
)


# --- every mistake has its words


def named(names, axes: AxisRules | None = AXES, tree: Any = TREE, **keywords):
    return plan(tree, MESH, names=names, axes=axes, **keywords)


BARE_FIELD = inspect.unwrap(sfx.field)  # past the type checker of the tests
ANY: Any = 3
SHAPES: list[Any] = [3, (3, "a"), (-1, 2)]


def followed(**options: Any) -> ShardPlan:
    return sfx.follow(lambda tree: tree, MADE, **options)


OTHER = ruled(P(), mesh=MeshSpec(MESH.shape, axis_types=AxisType.Explicit))
JOINED = ShardPlan.join(**{"a": ruled(P(), {"b/c": W}), "a/b": ruled(P(), {"c": W})})
UNITS = AxisRules(AXES.rules, units={"mpl": 4})
DEEP = {"a": {"w": jnp.ones((8, 16)), "v": [jnp.ones(3)]}}
TWICE = {"a": {"b": jnp.ones(8)}, "a/b": jnp.ones(8)}
FSDP = P(None, "data") | sfx.fsdp(("data", "tensor"))
AXIS = "'data' is a mesh axis: for mesh axes give PartitionSpecs by path"
RULES = r"the names \('data', 'tensor', \.\.\.\) need rules.* For mesh axes give Part"


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: sfx.resolve(("batch", ...), AXES), SpecError, "need an array's rank"),
        (
            lambda: MADE.sharding((..., "batch")),
            SpecError,
            "depends on the rank; pass `shape=`",
        ),
        (
            lambda: STRICT.sharding(P("data"), (7, 2)),
            SpecError,
            "`strict=True`, and .* 7 is not divisible",
        ),
        (
            lambda: MADE.sharding(ON.shardings["w"]),
            SpecError,
            r"pass `sharding.spec`, or use `reshard\(x, sharding\)`",
        ),
        (
            lambda: MADE.sharding(P("dta")),
            SpecError,
            r"the plan's mesh .* has no axis 'dta' \(did you mean 'data'\?\)",
        ),
        (
            lambda: ruled(P()).sharding(("batch",)),
            RuleError,
            "pass `axes|plan with `axes=AxisRules",
        ),
        (
            lambda: named(None, KV, {}).sharding(("kv",)),
            SpecError,
            r"no array .* has it. Say .*\(names, shape\)`",
        ),
        (
            lambda: STRICT.replace("v", P()),
            UnknownPathError,
            r"`replace\('v', ...\)`: no array of the plan has this",
        ),
        (
            lambda: STRICT.replace("w", P("dta")),
            SpecError,
            r"leaf `w`: .* no axis 'dta' \(did you mean 'data'\?\)",
        ),
        (
            lambda: STRICT.replace("w", ("mpl", None)),
            UnmatchedError,
            "`w`: no rule for the logical names `mpl` .dim 0",
        ),
        (
            lambda: STRICT.replace("w", P("data", "data")),
            RuleError,
            "uses mesh axis `data` twice; use it once",
        ),
        (
            lambda: STRICT.replace("w", FSDP),
            SpecError,
            "the plan is strict, and .* would be cut down",
        ),
        (
            lambda: named(NAMES, paths=PathRules([("w", P())])),
            RuleError,
            r"\(`w`\) goes to the names of the leaves",
        ),
        (
            lambda: named({"w": ("rows", None)}, AXES.with_alias("rows", of="btach")),
            UnmatchedError,
            "'rows'",
        ),
        (
            lambda: named(NAMES, UNITS),
            UnmatchedError,
            r"`units`: 'mpl' \(did you mean 'mlp'\?\)",
        ),
        (lambda: BARE_FIELD(names="mlp"), SpecError, "a string is one name"),
        (lambda: named(P("data", "tensor")), UnmatchedError, AXIS),
        (lambda: named({"w": P("data", "tensor")}, None), RuleError, RULES),
        (lambda: named(P("mpl")), UnmatchedError, r"names \('mpl', (\.\.\.|None)\)"),
        (
            lambda: named(("mlp", ...), None),
            RuleError,
            r"the names \('mlp', \.\.\.\) need rules",
        ),
        (lambda: named({"w": 3}), RuleError, "leaf `w`: `names` holds 3"),
        (lambda: ruled(("embed", None)), RuleError, "pass `axes=AxisRules"),
        (
            lambda: ruled(lambda *_: "data"),
            RuleError,
            r"paths\[0\] .* returned 'data'; it must return a PartitionS",
        ),
        (
            lambda: ruled(P(), mesh=MeshSpec({"data": -1})),
            MeshError,
            r"call `.fit\(device_count\)` first",
        ),
        (
            lambda: named({"a": {"w": None}}, tree=DEEP),
            RuleError,
            "at `a` it has a dict with the keys 'w', and the",
        ),
        (
            lambda: named([{}], tree=DEEP),
            RuleError,
            "no prefix .* root it has a list with the keys '0', and the tree",
        ),
        (
            lambda: ruled(P(), {"f": len}),
            LeafTypeError,
            "no arrays: it is of type dict, and its leaf `f` is",
        ),
        (
            lambda: ruled(P("data"), TWICE),
            RuleError,
            "two arrays of the tree have the path `a/b`",
        ),
        (
            lambda: ShardPlan.join(a=MADE, b=OTHER),
            PlanMismatchError,
            r"`a` and `b` differ in `mesh`.*AxisType.Explicit",
        ),
        (
            lambda: MADE.on(OTHER.mesh.build(jax.devices())),
            PlanMismatchError,
            "not for .*Explicit.* plan again",
        ),
        (lambda: MADE["ww"], UnknownPathError, r"no leaf `ww`; did you mean `w`\?"),
        (
            lambda: JOINED["a/b/c"],
            UnknownPathError,
            "several leaves have the path `a/b/c`",
        ),
        (
            lambda: ShardPlan.join(a=ON, b=MADE),
            PlanMismatchError,
            r"\(\[\[0, 1, .*, 7\]\] and None\).*`plan.off\(\)`",
        ),
        (
            lambda: followed(unused="none"),
            RuleError,
            "`unused='none'` is no policy of `follow`",
        ),
        *(
            (
                lambda items=items: followed(adapters=items),
                RuleError,
                "`adapters` takes pairs of a regex and a replacement",
            )
            for items in (3, "ab", {"a": "w"}, [("a",)], [("a", "w", "w")], [("a", 3)])
        ),
        (
            lambda: followed(adapters=np.array([["a$", "w"]])),
            RuleError,
            r"; of an array write `adapters=pairs.tolist\(\)`",
        ),
        (
            lambda: followed(scales=[("w$", r"\2")]),
            RuleError,
            r"makes no path of `w`: invalid group reference 2",
        ),
        (
            lambda: MADE.replace(ANY, P()),
            UnknownPathError,
            "`replace` takes the path of an array, or a regex",
        ),
        *(
            (lambda shape=shape: MADE.sharding(P(), shape), SpecError, "`shape` has a")
            for shape in SHAPES
        ),
        (
            lambda: sfx.correct(P(), (4,), MESH, units=ANY),
            SpecError,
            r"`units` must hold .* not 3; write `\(3,\)`",
        ),
    ],
)
def test_a_mistake_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_callable_that_fails_is_named_and_chained():
    rules = PathRules([("v", P()), ("w", lambda path, leaf: {"a": P()}[path])])
    with pytest.raises(
        RuleError, match=r"w is a callable that failed for the path 'w' .*KeyError: 'w'"
    ) as e:
        plan({"w": jnp.ones(8), "v": jnp.ones(8)}, MESH, paths=rules)
    assert isinstance(e.value.__cause__, KeyError)


def test_the_advice_is_an_argument_that_the_function_has():
    with pytest.raises(
        UnmatchedError, match=r"rules.extend\(\[\('typo', None\)\]\)`\. For"
    ):
        MADE.replace(next(iter(MADE)), ("typo", ...))
    with pytest.raises(UnmatchedError, match='or pass `unmatched="replicate"`'):
        MADE.sharding(("typo",))


def test_integers_that_jax_would_cut_are_refused():
    tree = {"ids": jax.ShapeDtypeStruct((8,), jnp.int32)}
    mesh = MeshSpec({"data": 8}).build(jax.devices())
    sharding_plan = plan(tree, mesh, unmatched="replicate")
    placed = sfx.shard({"ids": np.arange(8)}, sharding_plan)
    assert placed["ids"].dtype == jnp.int32
    for value in (2**40, -(2**31) - 1):
        with pytest.raises(
            PlanMismatchError, match=f"holds {value}, which JAX would cut"
        ):
            sfx.shard({"ids": np.array([value] * 8)}, sharding_plan)
        with pytest.raises(PlanMismatchError, match=f"holds {value}, which JAX would"):
            sfx.hosts.global_batch({"ids": np.array([0] * 7 + [value])}, sharding_plan)
    number = plan(
        jnp.int32(0), MeshSpec({"data": 8}).build(jax.devices()), unmatched="replicate"
    )
    assert sfx.shard(np.int64(7), number) == 7
    with pytest.raises(PlanMismatchError, match=r"int64\[\] and holds 1099511627776"):
        sfx.shard(np.int64(2**40), number)


def test_an_error_names_the_first_branch_that_holds_the_arrays():
    sharding_plan = ruled(P(), {"c": W})
    tree = {f"copy_{number:02}": {"c": W} for number in range(20)}
    with pytest.raises(PlanMismatchError, match="are below `copy_00` in the tree"):
        ShardPlan.from_json(sharding_plan.to_json(), like=tree)
