"""What a person reads when the input is wrong: the whole text, with the path, the
values and the way out.
"""

import contextlib
import copy
import re
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import shardfx
from shardfx import (
    AxisRules,
    Code,
    MeshSpec,
    PathRules,
    ShardPlan,
    filter_jit,
    plan,
    shard,
)
from shardfx.auto import renamed
from shardfx.errors import (
    MeshError,
    PlanMismatchError,
    RuleError,
    SpecError,
    UnmatchedError,
)
from shardfx.interop.eformer import axis_names_of
from shardfx.testing import plan_text


MESH = MeshSpec({"data": 2, "tensor": 4})
TREE = {
    "decoder": {
        "mlp": {"wi": jnp.ones((4, 10)), "wo": jnp.ones((10, 4))},
        "norm": jnp.ones(4),
    },
    "embed": jnp.ones((64, 4)),
    "step": jnp.ones(()),
}
EVERYTHING = PathRules([(".*", P())])
AXES = AxisRules([("mlp", "tensor")])


def planned(*rules: Any, **others: Any) -> ShardPlan:
    """The plan by some rules, with everything else whole."""
    return plan(TREE, MESH, paths=PathRules([*rules, (".*", P())]), **others)


def built() -> ShardPlan:
    return planned().on(MESH.build(jax.devices()))


def train_step(params: Any) -> Any:
    return params


# What the examples name.
NAMED = {
    **{name: getattr(shardfx, name) for name in shardfx.__all__},
    **{
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "optax": optax,
        "P": P,
        "topology": shardfx.topology,
    },
    **{
        "MESH": MESH,
        "TREE": TREE,
        "EVERYTHING": EVERYTHING,
        "AXES": AXES,
        "planned": planned,
        "built": built,
    },
    **{
        "renamed": renamed,
        "axis_names_of": axis_names_of,
        "plan_text": plan_text,
    },
    "SERVED": AxisRules([("mlp", "tensor")], modes={"serve": []}),
    "BATCH": AxisRules([("batch", "data"), ("embed", "tensor")]),
    "MISSPELLED": [("embed", P("datta")), ("wi", P("tensor", "data")), (".*", P())],
    "NAMES": {"decoder": None, "embed": ("vocab", None), "step": None},
    "HOST": [("embed", "host")],
    "train_step": train_step,
}
# A call, and the error that it raises; [...] stands for anything.
TEXTS = r"""
>>> planned(("norm", P("data", "tensor")), ("wo", P("data", None, "tensor")))
SpecError: 2 leaves, or groups of alike ones, cannot be planned:
  leaf `decoder/mlp/wo`: P('data', None, 'tensor') has 3 entries, but shape (10, 4) has 2 dimensions; write \
`P('data',)` if the first 2 are meant.
  leaf `decoder/norm`: P('data', 'tensor') has 2 entries, but shape (4,) has 1 dimension; write `P('data',)` if the \
first is meant.

>>> planned(("norm", ("mlp", "embed")), axes=AXES)
SpecError: [...]leaf `decoder/norm`: 2 logical names ('mlp', 'embed') for an array of rank 1, shape (4,); give one \
per[...]

>>> planned(("norm", atomic(P("tensor"), (1, 2))))
SpecError: [...]leaf `decoder/norm`: the units (1, 2) are for rank 2, and the array has rank 1.[...]

>>> plan(TREE, MESH, paths=PathRules(MISSPELLED))
RuleError: the mesh data=2,tensor=4 lacks mesh axes that the rules use. If they are for other meshes, declare them, \
`AxisRules(..., mesh_axes=('datta',))` or `PathRules(..., mesh_axes=('datta',))`; or give the mesh the axis with \
size 1; or pass `unmatched="replicate"`:
  leaf `embed` (paths[0] embed) uses the mesh axis 'datta' (did you mean 'data'?)

>>> plan(TREE, MESH, paths=PathRules(MISSPELLED, mesh_axes=["datta"]), strict=True)
SpecError: `strict=True`, and these leaves are not sharded as asked:
  leaf `embed`, shape (64, 4): dim 0: the mesh has no axis `datta`; add the axis to the mesh, or drop it from the rule

>>> correct(P(None, "datta"), (4, 4), MESH, strict=True)
SpecError: P(None, 'datta') for shape (4, 4) on mesh data=2,tensor=4: dim 1: the mesh has no axis `datta`; add the \
axis to the mesh, or drop it from the rule

>>> planned(("wi", P(None, ("data", "tensor"))), strict=True)
SpecError: [...]leaf `decoder/mlp/wi`, shape (4, 10): dim 1: size 10 is not divisible by `data` (2) x `tensor` (4); \
use axes whose product divides 10[...]

>>> resolve(("batch", "embd"), BATCH, unmatched="raise")
UnmatchedError: no rule for the logical names `embd` (dim 1) (did you mean 'embed'?). The rules have ('batch', \
'embed'); add one with `rules.extend([('embd', None)])`, or pass `unmatched="replicate"`. For mesh axes use a \
PartitionSpec.

>>> plan(TREE, MESH, paths=PathRules([("mlp/w_in", P("data")), ("decoder/nrm", P())]))
UnmatchedError: no rule covers 4 of 5 leaves; add path rules or names for them, end the path rules with `(".*", \
fsdp(...))`, or pass `unmatched="replicate"`. Largest first:
  `embed`: float32[64, 4], 1024 bytes; the nearest rule is 'mlp/w_in'
  `decoder/mlp/wi`: float32[4, 10], 160 bytes; the nearest rule is 'decoder/nrm'
  `decoder/mlp/wo`: float32[10, 4], 160 bytes; the nearest rule is 'decoder/nrm'
  `decoder/norm`: float32[4], 16 bytes; the nearest rule is 'decoder/nrm'

>>> PathRules([("norm", P()), ("mlp/(wi|wo", P("data"))])
RuleError: rule 1: the regex does not compile: missing ), unterminated subpattern at position 4:
    mlp/(wi|wo
        ^

>>> planned().select("a[")
RuleError: rule 0: the regex does not compile: unterminated character set at position 1:
    a[
     ^

>>> PathRules.parse("norm->replicate, mlp=>data")
RuleError: a rule has no `->` outside of brackets; write `regex->axes`, at position 16:
    norm->replicate, mlp=>data
                    ^

>>> planned(("decoder/nrm", P("data")))
RuleError: rules that never apply are mostly mistakes. Correct them, move them ahead of the rules that shadow them, \
take them out, mark those that other trees need with `optional(target)`, or pass `unused="allow"`:
  rule 0, the regex 'decoder/nrm', matches no path of the tree; the nearest path is `decoder/norm`.

>>> planned(memory_kinds=[("opt", "pinned_host")])
RuleError: [...]  `memory_kinds` entry 0, the regex 'opt', matches no path of the tree; [...]

>>> planned().select("attn")
RuleError: `select('attn')` matches no path of the plan; paths look like `decoder/mlp/wi`.

>>> planned(memory_kinds=HOST)
RuleError: `memory_kinds` maps 'embed' to 'host'; a memory kind is one of device, pinned_host, unpinned_host.

>>> follow(lambda tree: tree, planned(), memory_kinds=HOST)
RuleError: `memory_kinds` maps 'embed' to 'host'; a memory kind is one of device, pinned_host, unpinned_host.

>>> MeshSpec.parse("data 2,tensor=4")
MeshError: mesh 'data 2,tensor=4': 'data 2' is not of the form `name=size`; write it as in "data=-1,fsdp=4,tensor=2", \
or "data=8(dcn=2)" for an axis over two slices.

>>> MeshSpec((2, 2))
MeshError: `MeshSpec((2, 2))`: every mesh axis has a name and a size; write `MeshSpec({'data': 4, 'tensor': 2})`, or \
`MeshSpec.parse('data=4,tensor=2')`.

>>> MeshSpec(8)
MeshError: `MeshSpec(8)`: every mesh axis has a name and a size[...]

>>> MeshSpec("data=2")
MeshError: `MeshSpec('data=2')`: every mesh axis has a name and a size[...]

>>> planned(unmatched="drop")
RuleError: `unmatched='drop'` is no policy of `plan`; use "raise" or "replicate".

>>> planned(unused="drop")
RuleError: `unused='drop'` is no policy of `plan`; use "raise" or "allow".

>>> planned(axes=AXES).sharding(("mlp",), unmatched="drop")
RuleError: `unmatched='drop'` is no policy for an array; use "raise" or "replicate".

>>> atomic("heads", (1, 2))
SpecError: `atomic('heads', (1, 2))`: a name takes one int, a whole spec or tuple of names takes a tuple of ints, one \
per dimension.

>>> correct(P(3), (4,), MESH)
SpecError: 3 is no entry of a PartitionSpec; it must be a mesh axis, a tuple of mesh axes, `None` or \
`PartitionSpec.UNCONSTRAINED`.

>>> axis_names_of({"a": 3})
SpecError: a tree of specs holds 3, which is neither a PartitionSpec nor a NamedSharding.

>>> MESH.axis_size((1,))
MeshError: `axis_size` names mesh axis `1`, but the mesh has ('data', 'tensor'); use one of those.

>>> topology.coords(jax.devices()[0], 0)
MeshError: `local_device_count` is 0; it must be at least 1 without `coords`.

>>> topology.device_order(jax.devices()[:2], (3,))
MeshError: mesh axes of sizes (3,) have 3 devices, but 2 were given.

>>> PathRules([("w", P())]).drop(1)
RuleError: `drop(1)`: rules are numbered from 0, and these 1 have no rule 1.

>>> PathRules([("w", P())]).replace(-1, P())
RuleError: `replace(-1)`: rules are numbered from 0, and these 1 have no rule -1.

>>> SERVED.replace(0, "fsdp", mode="serve")
RuleError: `replace(0)`: rules are numbered from 0, and these 0 have no rule 0.

>>> SERVED.drop(0, mode="serv")
RuleError: mode 'serv' is unknown; these rules have ('serve',) (did you mean 'serve'?).[...]

>>> renamed(TREE, {"embd": ()}, names=NAMES)
UnknownPathError: `renamed('embd': ...)`: no array of the tree has this path, or one that the regex matches; did you \
mean `embed`?

>>> renamed(TREE, {"(": ()}, names=NAMES)
RuleError: '(' is the path of no array, and no regex that compiles: missing ), unterminated subpattern at position 0

>>> renamed(TREE, {"embed": "vocab"}, names=NAMES)
RuleError: `renamed`: 'embed' gets 'vocab'; use a tuple with one name per dimension, or `None`.

>>> lint(TREE)
MeshError: `lint` needs the mesh: `lint(tree, MeshSpec({...}), ...)`; a plan alone has its own.

>>> lint(TREE, MESH, paths=[("w", P())])
RuleError: `paths` must be of type PathRules[...]

>>> lint(TREE, MESH, paths=EVERYTHING).without("replicate")
ValueError: `without('replicate')`: the codes of findings are unplannable, invalid, [...]

>>> follow(optax.adam(1e-3), planned())
LeafTypeError: `init` must be a function, not GradientTransformationExtraArgs; pass `optimizer.init`.

>>> follow(lambda x: x, planned(), adapters=["lora"])
RuleError: `adapters` takes pairs of a regex and a replacement, `[("lora_a$", "w")]`, and not 'lora'.
>>> plan({"a": {"w": P("data")}}, MESH, paths=EVERYTHING)
LeafTypeError: leaf `a/w` is P('data',), but a plan is made from arrays or ShapeDtypeStructs; pass the model's own \
tree, and the specs as `paths=PathRules([...])`.

>>> plan({"a": {"w": np.array(["word"])}}, MESH, paths=EVERYTHING)
LeafTypeError: [...]leaf `a/w`: a NumPy array of dtype <U4 cannot be put on a device; take it out of the tree.[...]

>>> shard({**TREE, "step": 3}, built())
PlanMismatchError: leaf `step` is int 3, but the plan is for float32[]; plan the tree that you use.

>>> shard({**TREE, "extra": jnp.ones(2)}, built())
PlanMismatchError: this tree is not the one that was planned (1 array more, 0 missing): the plan has no `extra`. Plan \
the tree that you use.

>>> shard({"a": jnp.ones(2)}, built())
PlanMismatchError: this tree is not the one that was planned (1 array more, 5 missing): the plan has no `a`; the tree \
has no `decoder/mlp/wi`. Plan the tree that you use.

>>> filter_jit(train_step, in_shardings=(built(),))({"a": jnp.ones(2)})
PlanMismatchError: [...]train_step` is not the tree that its plan is for: this tree is not the one that was planned \
(1 array more, 5 missing): the plan has no `a`; the tree has no `decoder/mlp/wi`. Plan the tree that you use.

>>> ShardPlan.from_json(built().to_json(), like={"a": jnp.ones(2)})
PlanMismatchError: this tree is not the one that was planned (1 array more, 5 missing)[...]

>>> shard({**TREE, "embed": jnp.ones((64, 8))}, built())
PlanMismatchError: leaf `embed` is float32[64, 8], but the plan is for float32[64, 4]; plan the tree that you use.

>>> shard({**TREE, "embed": jnp.ones((64, 4), jnp.bfloat16)}, built())
PlanMismatchError: leaf `embed` is bfloat16[64, 4], but the plan is for float32[64, 4][...]

>>> shard(TREE, planned())
PlanMismatchError: [...]use `plan.on(plan.mesh.build(jax.devices()))`.

>>> filter_jit(gather, in_shardings=(planned(),))(TREE)
PlanMismatchError: [...]use `plan.on(plan.mesh.build(jax.devices()))`.

>>> constrain(jnp.ones(4), P("data"), planned())
PlanMismatchError: [...]use `plan.on(plan.mesh.build(jax.devices()))`.

>>> planned()[0]
UnknownPathError: a plan is indexed by the path of an array, as in `plan["layers/0/w"]`, and not by 0; `plan.leaves` \
has them in order.

>>> ShardPlan.join()
PlanMismatchError: `join` needs at least one plan, each with the key of its tree: `ShardPlan.join(params=params_plan, \
opt=opt_plan)`.
"""


def said(error, call):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value)


def raised(call, **names):
    """The error of a call that is written as a text."""
    with pytest.raises((ValueError, TypeError)) as caught:
        eval(call, {**NAMED, **names})
    return f"{type(caught.value).__name__}: {caught.value}"


EXAMPLES = dict(
    text.split("\n", 1)
    for text in re.split("^>>> ", TEXTS.replace("\\\n", ""), flags=re.MULTILINE)[1:]
)


@pytest.mark.parametrize("call", EXAMPLES)
def test_the_text_of_an_error(call, as_users_run_it):
    text = raised(call)
    parts = EXAMPLES[call].rstrip().split("[...]")
    assert re.fullmatch(".*".join(map(re.escape, parts)), text, re.DOTALL), text


# Each code, a call that gives an array a reason with it, and the reason's text.
REASONS = {
    "indivisible": (
        """planned(("wi", P(None, "tensor")))["decoder/mlp/wi"]""",
        "dim 1: size 10 is not divisible by `tensor` (4); use axes whose product"
        " divides 10",
    ),
    "unit": (
        """planned(("wi", atomic(P("tensor"), (2, 1))))["decoder/mlp/wi"]""",
        "dim 0: 4 elements are 2 units of 2, and `tensor` (4) would cut inside a unit;"
        " use axes whose product divides 2, or split the mesh axis (`refine=True`)",
    ),
    "duplicate": (
        """planned(("wi", P("tensor") | fsdp("tensor")))["decoder/mlp/wi"]""",
        "`tensor` is already used by an earlier dimension; map one of the two to"
        " another axis",
    ),
    "blocked": (
        """planned(("wi", ("mlp", "wide")), axes=BOTH)["decoder/mlp/wi"]""",
        "dim 1: logical name `wide` (`tensor` is used by `mlp` on dim 0) wanted mesh"
        " axes that a dimension with priority already uses; add a later rule with"
        " another target as a fallback, or move its rule up",
    ),
    "absent": (
        """plan(TREE, MESH, paths=PathRules(MISSPELLED, mesh_axes=["datta"]))["embed"]""",
        "dim 0: the mesh has no axis `datta`; add the axis to the mesh, or drop it"
        " from the rule",
    ),
    "small": (
        """planned(("norm", fsdp("data", 64)))["decoder/norm"]""",
        "the array has 16 bytes, fewer than the 64 asked for; lower `min_bytes` to"
        " shard it",
    ),
    "skipped": (
        """planned(("norm", fsdp("data", skip_dims=0)))["decoder/norm"]""",
        "`fsdp(data)` may shard no dimension of the array, since it skips dim 0"
        " (`skip_dims`, stacked layers, or a name that is replicated); put a rule with the"
        " target `replicate` before it if the array is to be whole",
    ),
    "unmatched": (
        """plan(TREE, MESH, unmatched="replicate")["embed"]""",
        "no rule covers the array, so it is replicated; add a rule for it (target"
        " `None` if that is what you want)",
    ),
    "unaligned": (
        """follow(lambda tree: {"norm": jnp.ones(64)}, plan({"w": jnp.ones((64, 64))},
        MESH, paths=PathRules.parse("w->data")), scales=[("norm", "w")])["norm"]""",
        "the dimensions of shape (64,) may be those numbered (0) or (1) of `w`, shape"
        " (64, 64), so only axes on which these agree are used; give the array a spec"
        " of its own with `plan.replace(path, spec)`",
    ),
    "large": (
        """planned(("embed", fsdp("tensor", max_bytes=128)))["embed"]""",
        "256 bytes of the array stay on each device, more than the 128 asked for; add"
        " mesh axes to the strategy, or raise `max_bytes`",
    ),
    "reordered": (
        """reordered()""",
        "dim 0: mesh axes `x`, `y` shard the dimension in the order ('y', 'x'), since"
        " JAX puts Explicit axes before Auto axes inside `jit`; write them so, or give"
        " all axes of the mesh one type",
    ),
    "scalar": (
        """planned()["step"]""",
        "an array of rank 0 has nothing to shard; no rule is needed",
    ),
}
BOTH = AxisRules([("mlp", "tensor"), ("wide", "tensor")])


def reordered():
    """The decision about an array on a mesh with an Auto and an Explicit axis."""
    types = {"x": AxisType.Auto, "y": AxisType.Explicit}
    mesh = MeshSpec({"x": 2, "y": 2}, axis_types=types)
    mixed = plan({}, mesh)
    decisions = []

    def step(x):
        x, decision = shardfx.constrain(x, P(("x", "y")), mixed, explain=True)
        decisions.append(decision)
        return x

    jax.eval_shape(step, jax.ShapeDtypeStruct((8,), "float32"))
    return decisions[0]


@pytest.mark.parametrize("code", [code.name for code in Code])
def test_the_text_of_a_reason(code):
    assert code in REASONS, f"no message test produces a reason of the code {code!r}"
    call, text = REASONS[code]
    (reason,) = eval(call, {**NAMED, "BOTH": BOTH, "reordered": reordered}).reasons
    assert reason.code.name == code
    assert str(reason) == text


def test_the_codes_of_reasons_are_those_of_their_page():
    page = (Path(__file__).parents[2] / "docs" / "look.md").read_text()
    table = page.partition("| code | why an array")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(code.name for code in Code)


def test_of_many_leaves_without_a_rule_the_largest_are_shown():
    tree = {f"w{i}": jax.ShapeDtypeStruct((i + 1,), jnp.int8) for i in range(1000)}
    lines = said(UnmatchedError, lambda: plan(tree, MESH)).splitlines()
    assert lines[0].startswith("no rule covers 1000 of 1000 leaves")
    assert lines[1] == "  `w999`: int8[1000], 1000 bytes"
    assert lines[-1] == f"  and {1000 - (len(lines) - 2)} more"
    assert len(lines) < 60


def test_a_mesh_for_more_devices_than_the_cpu_has():
    for axes in ({"data": 4, "tensor": 4}, {"data": -1, "tensor": 16}):
        plain = said(MeshError, lambda axes=axes: MeshSpec(axes).fit(8))
        for devices in (jax.devices(), np.array(jax.devices()).reshape(2, 4)):
            actual = said(
                MeshError,
                lambda axes=axes, devices=devices: MeshSpec(axes).build(devices),
            )
            assert (
                actual == f"{plain} To emulate them on CPU:"
                ' `jax.config.update("jax_num_cpu_devices", 16)` before the first'
                " use of JAX."
            )
    chips = [types.SimpleNamespace(platform="tpu", id=i) for i in range(8)]
    assert said(
        MeshError, lambda: MeshSpec({"data": 4, "tensor": 4}).order(chips)
    ).endswith("take the rest.")


# Calls that take an argument of another type than `wanted`, and the argument's name.
TYPES = {
    'PathRules, not {}; wrap it: `PathRules([...])`, or `PathRules.parse("...")` for text.': (
        [[("mlp", P())], (("mlp", P()),), {"mlp": P()}, "mlp->data", AXES],
        {"plan(TREE, MESH, paths=given)": "paths", "match(TREE, given)": "rules"},
    ),
    "AxisRules, not {}; wrap it: `AxisRules([...])`.": (
        [
            [("mlp", "tensor")],
            (("mlp", "tensor"),),
            {"mlp": "tensor"},
            "mlp",
            EVERYTHING,
        ],
        {
            "planned(axes=given)": "axes",
            "plan(TREE, MESH, names=jax.tree.map(lambda leaf: (None,) * leaf.ndim, TREE), axes=given)": (
                "axes"
            ),
            "resolve(('mlp',), given)": "rules",
            "AXES.merge(given)": "other",
        },
    ),
    "ShardPlan, not {}; pass what `shardfx.plan(tree, mesh, ...)` returns.": (
        [TREE, AXES, (None, "mlp"), None],
        {
            "constrain(jnp.ones((8, 8)), (None, 'mlp'), given)": "plan",
            "shard(TREE, given)": "plan",
            "report(given)": "plan",
            "diff(given, planned())": "a",
            "diff(planned(), given)": "b",
            "explain(given, 'w')": "plan",
            "plan_text(given)": "plan",
            "ShardPlan.join(params=planned(), opt=given)": "opt",
            "follow(lambda given: given, given)": "plan",
        },
    ),
}


@pytest.mark.parametrize("expected", TYPES, ids=lambda text: text.split(",")[0])
def test_an_argument_of_another_type(expected, as_users_run_it):
    values, calls = TYPES[expected]
    for call, name in calls.items():
        for value in values:
            line = raised(call, given=value).partition(": ")[2]
            if isinstance(value, PathRules | AxisRules):
                # Rules of the other sort say more, where both can be given.
                assert line.startswith(("PathRules are for", f"`{name}` must be"))
                continue
            text = f"`{name}` must be of type {expected.format(type(value).__name__)}"
            # Some functions say in which order they take their arguments.
            assert line.startswith(text.removesuffix(".")), call


def test_devices_in_the_place_of_a_mesh(as_users_run_it):
    for other in (jax.devices(), MESH, MESH.abstract()):
        assert (
            raised("planned().on(other)", other=other)
            == "MeshError: `jax_mesh` must be of type Mesh, not"
            f" {type(other).__name__}; make one of devices with"
            " `plan.on(plan.mesh.build(devices))`."
        )


@pytest.mark.parametrize("ambient", [False, True])
def test_a_bare_spec_at_the_boundary_of_jit(ambient):
    sharding_plan = built()
    spec = P("data")
    assert sharding_plan.jax_mesh is not None
    message = (
        f"holds {spec}, of type {type(spec).__name__}, which is no sharding; give a"
        " plan, `plan.sharding(names)`, `NamedSharding(plan.jax_mesh, spec)`, a tree"
        " of these, or `None` to take an array as it comes."
    )
    # Nothing is ambient: a mesh that happens to be set is not asked.
    with jax.set_mesh(sharding_plan.jax_mesh) if ambient else contextlib.nullcontext():
        for entry in ((sharding_plan, spec), (sharding_plan, {"x": spec})):
            text = said(
                PlanMismatchError,
                lambda entry=entry: filter_jit(lambda tree, x: x, in_shardings=entry),
            )
            assert text == f"`in_shardings` {message}"
        text = said(
            PlanMismatchError, lambda: filter_jit(lambda x: x, out_shardings=spec)
        )
        assert text == f"`out_shardings` {message}"


def test_nothing_moves_if_one_leaf_does_not_fit():
    struct = planned(("embed", P("tensor"))).on(MESH.build(jax.devices()))
    tree = {**TREE, "step": jnp.ones(3)}
    said(PlanMismatchError, lambda: shard(tree, struct))
    for leaf in jax.tree.leaves(tree):
        assert len(leaf.sharding.device_set) == 1


def test_types_are_named_as_users_import_them():
    kinds = [RuleError, SpecError, ShardPlan, MeshSpec, AxisRules, PathRules]
    assert {kind.__module__ for kind in kinds} == {"shardfx", "shardfx.errors"}
    assert copy.deepcopy(MESH) == MESH
