# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingImports=false
"""What public reports and a first day ran into with steps, lint, pages and messages, each
as it was reported, with the answer that it must give now.
"""

import copy
import html as html_of_python
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx import cost, sync
from shardfx.errors import (
    CheckpointError,
    LeafTypeError,
    MeshError,
    PlanMismatchError,
    ProgramError,
    RuleError,
    SyncError,
    UnmatchedError,
)
from tests.house.reported import Report, fails, listing, struct


REPORTS: list[Report] = []
reported = listing(REPORTS)

MESH = sfx.MeshSpec({"data": 8}).build(jax.devices())
CUBE = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2}).build(jax.devices())
MODEL = {"w": jnp.ones((8, 8)), "b": jnp.ones((8,))}
RULES = sfx.PathRules([("w", P("data")), ("b", P())])
PLAN = sfx.plan(MODEL, MESH, paths=RULES)
X = jax.device_put(jnp.ones((8, 8)), NamedSharding(MESH, P("data")))
CALLBACKS = "step/test_callbacks.py"
HIDDEN = "step/test_hidden_state.py"
SOCKETS = "sync/test_sync_sockets.py"


# B0: convolutions whose gradients XLA computes wrongly.


@reported("first day B0", "step/test_faults.py")
def convolutions_with_wrong_gradients(folder):
    def conv(x, w, stride):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            [(1, 1)] * 2,
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )

    def loss(w, x):
        return jnp.sum(jnp.cos(conv(jnp.sin(conv(x, w["a"], 1)), w["b"], 2)))

    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape) * 0.1
    w = {"a": normal(1, 16, 16, 3, 3), "b": normal(2, 32, 16, 3, 3)}
    rules = sfx.PathRules([(".*", P("tensor") | sfx.fsdp("fsdp"))])
    plan = sfx.plan(w, CUBE, paths=rules)
    rows = NamedSharding(CUBE, P(("data", "fsdp")))
    weights = sfx.shard(w, plan)
    x = jax.device_put(normal(9, 8, 16, 8, 8), rows)
    checked = sfx.testing.check_step(jax.grad(loss), weights, x)
    assert "conv_general_dilated" in str(checked)


# B1: callbacks.


def _printed(w, x):
    loss = (w["w"] @ x).mean()
    jax.debug.print("loss {}", loss)
    return loss


def _raised(w, x):
    return (w["w"] @ eqx.error_if(x, jnp.any(x < 0), "negative")).mean()


def _pure(w, x):
    y = jax.pure_callback(lambda x: np.asarray(x), struct(8, 8), x)
    return (w["w"] @ y).mean()


def _io(w, x):
    io_callback(lambda x: None, None, x)
    return (w["w"] @ x).mean()


@reported("first day B1", f"{CALLBACKS}::test_every_function_that_takes_a_step_takes")
def steps_with_callbacks(folder):
    weights = sfx.shard(MODEL, PLAN)
    for step in (_printed, _raised, _pure, _io):
        jitted = sfx.filter_jit(step)
        assert cost.estimate(jitted, weights, X, compiler="cpu").rows is not None
        assert cost.fit(jitted, weights, X, chip="v5e").peak_bytes > 0
        assert cost.shardings(step, weights, X).rows


@reported("first day B1", f"{CALLBACKS}::test_a_search_takes_callbacks")
def a_search_with_a_print(folder):
    found = sfx.auto.search(_printed, MODEL, X, devices=2, chip="v5e", effort="least")
    assert found[0].mesh.size == 2


# B2 and B8: nnx.


def made():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def _trained(model, optimizer, x):
    value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return value


@reported("first day B2", f"{HIDDEN}::test_a_step_of_nnx_jit_counts_with_what_it_upd")
def a_step_of_nnx(folder):
    whole = sfx.PathRules([(".*", sfx.replicate)])
    shardings = []
    for node in nnx.eval_shape(made):
        plan = sfx.plan(nnx.state(node), MESH, paths=whole)
        shardings.append(nnx.StateSharding(plan.shardings))
    rows = NamedSharding(MESH, P("data"))
    model, optimizer = nnx.jit(made, out_shardings=tuple(shardings))()
    x = jax.device_put(jnp.ones((32, 64)), rows)
    run = nnx.jit(_trained, in_shardings=(*shardings, rows))
    estimated = cost.estimate(run, model, optimizer, x, compiler="cpu")
    assert estimated.wire_bytes > 28_000
    compiled = run.lower(model, optimizer, x).compile()
    assert cost.traffic(compiled).wire_bytes == estimated.wire_bytes


@reported("first day B8", "plan/test_trees.py")
def a_plan_of_a_module_of_nnx(folder):
    with fails(LeafTypeError, "nnx.state"):
        sfx.plan(nnx.eval_shape(made)[0], MESH, paths=RULES)


@reported("first day B8", f"{HIDDEN}::test_an_update_in_place_that_is_lost_is_an_error")
def an_update_in_place_under_filter_jit(folder):
    model, optimizer = made()
    with fails(ProgramError, "`flax.nnx.jit(_trained)`"):
        sfx.filter_jit(_trained)(model, optimizer, jnp.ones((32, 64)))


# B3 to B6: lint.


@reported("first day B3", "see/test_lint_sizes.py::test_heads_in_fused_projections")
def heads_in_a_fused_projection(folder):
    rules = sfx.PathRules([("qkv", P("tensor")), ("proj", P(None, "tensor"))])
    tree = {"attn": {"qkv": struct(192, 64), "proj": struct(64, 64)}}
    mesh = sfx.MeshSpec({"tensor": 8})
    codes = [why.code for why in sfx.lint(tree, mesh, paths=rules, head_dim=16)]
    assert "cut-head" in codes


@reported("first day B4", "see/test_lint_sizes.py::test_a_fused_projection_is_not_tra")
def a_fused_projection_is_no_transpose(folder):
    tree = {"qkv": struct(192, 64), "proj": struct(64, 64)}
    names = {"qkv": ("heads", None), "proj": (None, "heads")}
    axes = sfx.AxisRules([("heads", "tensor")])
    mesh = sfx.MeshSpec({"tensor": 4})
    codes = [why.code for why in sfx.lint(tree, mesh, names=names, axes=axes)]
    assert "contradicted-name" not in codes


@reported(
    "first day B5", "house/test_first_day.py::test_a_page_shows_the_lines_of_a_fix"
)
def a_fix_of_two_lines_on_a_page(folder):
    model = eqx.nn.MLP(64, 64, 255, depth=3, key=jax.random.key(0))
    rules = sfx.PathRules([("weight", ("mlp", "embed")), ("bias", ("mlp",))])
    axes = sfx.AxisRules([("mlp", "tensor"), ("embed", "fsdp")])
    mesh = sfx.MeshSpec({"fsdp": 4, "tensor": 2})
    plan = sfx.plan(model, mesh, paths=rules, axes=axes)
    findings = sfx.lint(model, mesh, paths=rules, axes=axes)
    page = html_of_python.unescape(sfx.html_report(plan, findings=findings))
    assert "])\\\\naxes = " not in page


@reported("first day B6", "house/test_first_day.py::test_fixes_of_all_findings_without")
def fixes_of_all_findings(folder):
    shapes = {"a": struct(4096, 4096), "b": struct(4096, 1024)}
    mesh = sfx.MeshSpec({"fsdp": 4})
    space = {"PathRules": sfx.PathRules, "fsdp": sfx.fsdp}
    for finding in sfx.lint(shapes, mesh):
        exec(finding.fix, space)
    sfx.plan(shapes, mesh, paths=space["paths"])  # pyright: ignore[reportArgumentType]


# B7: haliax, where nothing reads the names.


@reported("first day B7", "plan/test_trees.py")
def arrays_that_carry_their_names(folder):
    try:
        import haliax
    except ImportError:
        return
    axis = haliax.Axis("embed", 64)
    tree = jax.eval_shape(lambda: haliax.ones((axis, haliax.Axis("mlp", 128))))
    with fails((RuleError, UnmatchedError), "interop.haliax.names_of(tree)"):
        sfx.plan({"w": tree}, MESH, paths=sfx.PathRules([]))
    names = sfx.interop.haliax.names_of({"w": tree})
    axes = sfx.AxisRules([("embed", "data"), ("mlp", None)])
    assert sfx.plan({"w": tree}, MESH, names=names, axes=axes).leaves[0].spec == P(
        "data"
    )


# Part 1 of the first day.


@reported("first day, part 1", "topology/test_mesh.py")
def a_mesh_that_is_smaller_than_the_devices(folder):
    with fails(MeshError, "devices[:4]"):
        sfx.MeshSpec({"data": 4}).build(jax.devices())


@reported(
    "first day, part 1", "house/test_first_day.py::test_a_report_of_any_width_says"
)
def a_report_of_another_width(folder):
    names = {"w": ("embed", "mlp"), "b": ("mlp",)}
    axes = sfx.AxisRules([("embed", "data"), ("mlp", None)])
    plan = sfx.plan(MODEL, MESH, names=names, axes=axes)
    assert "names (" in sfx.report(plan, width=110)


@reported("first day, part 1", "cost/test_fit.py")
def rows_of_an_optimizer(folder):
    tree = {"blocks": [{"w": jnp.ones((64, 64))} for _ in range(3)]}
    optimizer = optax.adam(1e-3)

    def step(params, state, x):
        def loss(params):
            return sum((x @ block["w"] ** 2).sum() for block in params["blocks"])

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    fit = cost.fit(step, tree, optimizer.init(tree), jnp.ones((8, 64)), chip="v5e")
    groups = [row.group for row in fit.rows]
    assert not [group for group in groups if "blocks" in group], groups


# Part 3: the mistakes for which no message had the fix.


@reported("first day, part 3", "house/test_first_day.py")
def a_plan_where_jax_takes_shardings(folder):
    uses = [
        lambda: jax.jit(lambda x: x, out_shardings=PLAN)(MODEL),
        lambda: jax.jit(lambda x: x, in_shardings=PLAN)(MODEL),
        lambda: jax.device_put(MODEL, PLAN),
        lambda: eqx.filter_shard(MODEL, PLAN),
    ]
    # JAX 0.9 names the value here, and not its type, which has the fix.
    if jax.__version_info__ >= (0, 10):
        uses.append(lambda: jax.tree.map(lambda x, s: x, MODEL, PLAN))
    for use in uses:
        with fails((TypeError, ValueError), "plan.shardings"):
            use()


@reported("first day, part 3", "house/test_mistakes.py")
def the_axes_of_make_mesh(folder):
    with fails(MeshError, "MeshSpec(dict(zip(names, sizes)))"):
        sfx.MeshSpec((2, 4), ("data", "model"))


@reported("first day, part 3", "arrays/test_jit.py")
def two_of_three_shardings(folder):
    """Accepted, as documented: the other argument stays where it is."""
    step = sfx.filter_jit(lambda m, b, x: x, in_shardings=(PLAN, None))
    assert step(MODEL, MODEL, X).sharding.is_equivalent_to(X.sharding, 2)


@reported("first day, part 3", "docs/faq.md, a row")
def a_model_that_was_loaded_by_its_plan(folder):
    model = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))
    plan = sfx.plan(model, MESH, unmatched="replicate")
    sfx.checkpoint.save(folder / "c", model)
    loaded = sfx.checkpoint.load(folder / "c", plan)
    # `load` gives arrays alone; Python's own error of a call of `None`.
    assert loaded.activation is None
    assert eqx.combine(loaded, model)(jnp.ones(8)).shape == (8,)


@reported("first day, part 3", "house/test_first_day.py")
def a_forgotten_follow(folder):
    with fails(PlanMismatchError, "follow(optimizer.init, plan)"):
        sfx.shard(optax.adam(1e-3).init(MODEL), PLAN)


@reported("first day, part 3", "house/test_mistakes.py")
def rules_that_are_swapped(folder):
    axes = sfx.AxisRules([("a", None)])
    for use in (
        lambda: sfx.plan(MODEL, MESH, paths=axes),  # pyright: ignore[reportArgumentType]
        lambda: sfx.plan(MODEL, MESH, axes=RULES),  # pyright: ignore[reportArgumentType]
    ):
        with fails(RuleError, "for them"):
            use()


@reported("first day, part 3", "house/test_mistakes.py")
def arguments_that_jax_has(folder):
    with fails(TypeError, "write `donate=`"):
        sfx.filter_jit(_printed, donate_argnums=(0, 1))  # pyright: ignore


@reported("first day, part 3", "house/test_graded_mistakes.py")
def calls_that_lack_an_argument(folder):
    spec = sfx.MeshSpec({"data": 8})
    with fails(TypeError, "build(jax.devices())"):
        spec.build()  # pyright: ignore[reportCallIssue]
    with fails(TypeError, "paths="):
        sfx.plan(MODEL, MESH, rules=RULES)  # pyright: ignore[reportCallIssue]
    with fails(TypeError, "constrain(x, names_or_spec, plan)"):
        sfx.constrain(X, ("embed", None))  # pyright: ignore[reportCallIssue]


@reported("first day, part 3", "house/test_mistakes.py")
def arguments_in_another_order(folder):
    with fails(CheckpointError, "save(path, tree, plan)"):
        sfx.checkpoint.save(MODEL, "c")
    with fails((LeafTypeError, PlanMismatchError), "reshard(tree, plan)"):
        sfx.reshard(PLAN, MODEL)


@reported("first day, part 3", "plan/test_plan_errors.py")
def a_rule_for_a_leaf_that_is_none(folder):
    rules = sfx.PathRules([("gone", P()), (".*", P())])
    with fails(RuleError, "`None`"):
        sfx.plan({"w": jnp.ones(8), "gone": None}, MESH, paths=rules)


@reported("first day, part 3", "house/test_mistakes.py")
def a_mesh_of_explicit_axes(folder):
    mesh = jax.make_mesh((8,), ("data",))
    plan = sfx.plan(MODEL, mesh, paths=RULES)
    assert "Explicit" in sfx.report(plan)


# The house's own reader.


@reported("house 7.3", "plan/test_plan_values.py")
def results_that_pickle(folder):
    findings = sfx.lint({"w": struct(4096, 4096)}, sfx.MeshSpec({"data": 8}))
    for value in (sfx.explain(PLAN, "w"), sfx.diff(PLAN, PLAN), findings):
        assert str(pickle.loads(pickle.dumps(value))) == str(value)
        assert str(copy.deepcopy(value)) == str(value)


@reported("house 7.4", "house/test_house.py")
def interop_is_an_attribute(folder):
    assert sfx.interop.flax.names_of


@reported("house 7.2", "reshard/steps/test_least_steps.py")
def a_mesh_that_is_no_power_of_two(folder):
    mesh = sfx.MeshSpec({"a": 4, "b": 3, "c": 2})
    array = struct(48, 72, 96)
    src = sfx.plan({"w": array}, mesh, paths=sfx.PathRules([("w", P(None, "c"))]))
    rules = sfx.PathRules([("w", P(("c", "a"), "b"))])
    dst = sfx.plan({"w": array}, mesh, paths=rules)
    bytes_per_device = sfx.plan_reshard(src, dst).wire_bytes / mesh.size
    assert bytes_per_device <= 27_648, bytes_per_device


# Moves.


@reported("moves F3", "reshard/test_unusual_arrays.py::test_keys_and_empty_arrays_move")
def keys_inside_jit(folder):
    src = NamedSharding(MESH, P("data"))
    dst = NamedSharding(MESH, P())
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), src)
    moved = jax.jit(lambda k: sfx.reshard(k, dst, src=src), out_shardings=dst)(keys)
    assert (jax.random.key_data(moved) == jax.random.key_data(keys)).all()


@reported("moves F4", "reshard/test_unusual_arrays.py::test_keys_and_empty_arrays_move")
def empty_arrays_inside_jit(folder):
    src = NamedSharding(MESH, P(None, "data"))
    dst = NamedSharding(MESH, P())
    empty = jax.device_put(jnp.zeros((0, 8)), src)
    assert jax.jit(lambda x: sfx.reshard(x, dst, src=src))(empty).shape == (0, 8)


@reported("moves F10", "reshard/test_unusual_arrays.py::test_a_plan_of_live_devices_is")
def a_used_plan_of_moves_pickles(folder):
    move = sfx.plan_reshard({"x": X}, {"x": NamedSharding(MESH, P())})
    assert pickle.loads(pickle.dumps(move)) == move
    transfer = sync.plan_transfer(PLAN.off(), PLAN.off())
    sync.Sender(transfer, b"s" * 32).close()
    again = pickle.loads(pickle.dumps(transfer))
    assert again.to_json() == transfer.to_json()


@reported("moves F2", "sync/test_sync.py::test_sources_of_different_rank_that_are")
def sources_of_another_rank(folder):
    src = {"stack": struct(2, 4, 4), "extra": struct(4, 4)}
    dst = {"kv": struct(16, 4)}
    both = [sfx.From("stack").at(1), sfx.From("extra")]
    tree_map = sfx.TreeMap({"kv": sfx.From.concat(both).repeat(2)})
    mesh = sfx.MeshSpec({"a": 1})
    plans = [sfx.plan(tree, mesh, unmatched="replicate") for tree in (src, dst)]
    assert sync.plan_transfer(*plans, tree_map)


def served(tree):
    mesh = sfx.MeshSpec({"m": 1}).build(jax.devices()[:1])
    plan = sfx.plan(tree, mesh, unmatched="replicate")
    moves = sync.plan_transfer(plan, plan)
    sender = sync.Sender(moves, b"s" * 32, timeout_seconds=3)
    receiver = sync.Receiver(
        moves, plan, [sender.address], b"s" * 32, timeout_seconds=3
    )
    return plan, sender, receiver


@reported("public F0", f"{SOCKETS}::test_publish_refuses_what_was_not_planned")
def another_dtype_is_published(folder):
    tree = {"w": jnp.ones((8, 4), jnp.bfloat16)}
    _, sender, _ = served(tree)
    with fails(PlanMismatchError, "float16"):
        sender.publish({"w": tree["w"].astype(jnp.float16)}, 1)
    with fails(PlanMismatchError, "`w`"):
        sender.publish({}, 1)
    sender.close()


@reported(
    "public F9", f"{SOCKETS}::test_a_tree_of_empty_leaves_and_constants_is_pulled"
)
def only_empty_leaves_are_pulled(folder):
    tree = {"w": jnp.ones((0, 4))}
    plan, sender, receiver = served(tree)
    sender.publish(sfx.shard(tree, plan), 1)
    assert receiver.pull()
    sender.close()


@reported("moves F8", f"{SOCKETS}::test_a_restarted_trainer_is_new_and_a_lower_number")
def a_lower_revision_is_no_news(folder):
    tree = {"w": jnp.ones((8, 4))}
    plan, sender, receiver = served(tree)
    sender.publish(sfx.shard(tree, plan), 5)
    assert receiver.pull()
    with fails((SyncError, ValueError), "5"):
        sender.publish(sfx.shard(tree, plan), 4)
    assert not receiver.pull()
    sender.close()


@reported("moves F13", "hosts/test_multiprocess.py")
def a_batch_that_is_too_short(folder):
    plan = sfx.plan(struct(8, 8), MESH, paths=sfx.PathRules([(".*", P("data"))]))
    with fails(PlanMismatchError, "pad="):
        sfx.hosts.global_batch(np.ones((6, 8), np.float32), plan)


ELSEWHERE = {
    "moves F1": f"{SOCKETS}::test_a_moment_without_descriptors_is_no_end",
    "moves F5": "sync/test_sync_attacks.py::test_a_relay_of_the_handshake_cannot_publish",
    "moves F7": f"{SOCKETS}::test_publish_waits_for_the_revision_that_is_read",
    "moves F9": "sync/test_sync_plan_texts.py::test_a_short_text_of_a_plan_takes_a_short",
}


@reported("fit without shardings", "cost/test_fit.py")
def fit_without_any_sharding(folder):
    fit = cost.fit(lambda w, x: (x @ w).sum(), jnp.ones((8, 8)), X + 0, chip="v5e")
    assert fit.peak_bytes > 0


@reported("results as values", "plan/test_plan_values.py")
def a_name_that_no_rule_has(folder):
    with fails(RuleError, "axes=AxisRules"):
        sfx.constrain(X, ("embed", None), PLAN)
    with fails(CheckpointError, "no checkpoint"):
        sfx.checkpoint.read_index(folder)
