"""Steps under their plans beside the same steps on one device: planted mistakes, right
steps, and bugs of XLA.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx.errors import ProgramError
from shardfx.testing import _check, check_step
from tests.testing.planted import PLANTED, in_bfloat16, mesh_of


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(jax.devices())


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_on_its_line(name, mesh):
    case = PLANTED[name]
    args = case.arrays(mesh)
    if [*PLANTED].index(name) % 4 == 0:
        args = list(map(in_bfloat16, args))
    right = check_step(lambda mesh: case.make(mesh, False), *args, mesh=mesh)
    assert right, str(right)
    wrong = check_step(
        lambda mesh: case.make(mesh, True), *case.arrays(mesh), mesh=mesh
    )
    assert not wrong
    lines = {frame.line for frame in wrong.lines}
    assert case.lines & lines, str(wrong)


def cut(x, *spec, mesh):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def some(*shape, dtype=jnp.float32):
    array = jax.random.normal(jax.random.key(len(shape)), shape)
    return array.astype(dtype)


def capacity(x, router):
    """A mixture of experts with a capacity: counts choose where a token goes."""
    weights = jax.nn.softmax(x @ router)
    choice = jax.nn.one_hot(lax.top_k(weights, 2)[1], router.shape[1])
    places = (
        jnp.cumsum(choice.reshape(-1, router.shape[1]), 0).reshape(choice.shape)
        * choice
        - choice
    )
    return jnp.einsum(
        "nke,nkec,nd->ecd",
        choice * (places < 6),
        jax.nn.one_hot(places.astype(jnp.int32), 6),
        x,
    )


def converged(a, _):
    def turn(carry):
        i, v, _ = carry
        y = a @ (a.T @ v)
        return (
            i + 1,
            y / jnp.linalg.norm(y),
            jnp.max(jnp.abs(y / jnp.linalg.norm(y) - v)),
        )

    start = 0, jnp.ones(len(a)) / len(a) ** 0.5, jnp.float32(1)
    return lax.while_loop(
        lambda carry: (carry[0] < 99) & (carry[2] > 1e-4), turn, start
    )[1]


def called_back(x, w):
    sines = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return sines @ w


def quantised(x, w):
    return jnp.round(x @ w / jnp.max(jnp.abs(x @ w)) * 127).astype(jnp.int8)


def nearly_singular(x, w):
    return jnp.linalg.inv(w.T @ w + 1e-4 * jnp.eye(w.shape[1]))


def chaos(x, w):
    return lax.scan(
        lambda x, _: (3.99 * x * (1 - x), None), jax.nn.sigmoid(x @ w), None, length=40
    )[0]


def float16(x, w):
    return jax.grad(
        lambda w: jnp.sum((x.astype(w.dtype) @ w) ** 2).astype(jnp.float32)
    )(w.astype(jnp.float16))


def transform(x, w):
    return (
        jnp.abs(jnp.fft.fft(x, axis=-1)),
        jnp.sort(x, -1),
        jnp.argsort(x, -1),
    )


def switched(x, w):
    return lax.cond(
        x.mean() > 5, jnp.sin, jnp.cos, lax.switch(2, [jnp.abs, jnp.exp, jnp.sinh], x)
    )


def keys(x, w):
    return (
        jax.random.split(jax.random.key(1)),
        x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
    )


def sampled(x, w):
    return jax.random.categorical(jax.random.key(0, impl="rbg"), x @ w, -1)


def tied(x, w):
    return jnp.argmax(jnp.stack([x @ x.T, (x * 1.0) @ x.T + 1e-9]), 0)


RIGHT = {
    "capacity": capacity,
    "converged": converged,
    "called_back": called_back,
    "quantised": quantised,
    "nearly_singular": nearly_singular,
    "chaos": chaos,
    "float16": float16,
    "transform": transform,
    "switched": switched,
    "keys": keys,
    "sampled": sampled,
    "tied": tied,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_under_a_plan_is_not_accused(name, mesh):
    check = check_step(
        RIGHT[name], cut(some(16, 8), "d", "t", mesh=mesh), np.asarray(some(8, 8))
    )
    assert check, str(check)
    assert all(output.allowed < 0.1 for output in check.outputs) or name in (
        "chaos",
        "nearly_singular",
        "tied",
    ), str(check)


def test_random_numbers_that_depend_on_the_layout_are_said(mesh):
    def dropped(key, x):
        with jax.threefry_partitionable(False):
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    check = check_step(
        dropped, jax.random.key(0), cut(some(16, 16), "d", "t", mesh=mesh)
    )
    assert not check
    assert "`random_bits` at test_check_step.py:" in str(check)
    assert "random numbers here hang on the layout" in str(check)


def test_a_raw_key_that_is_split_is_a_key_in_the_reference(mesh):
    def dropped(raw_key, x):
        first, second = jax.random.split(raw_key)
        steps = jax.random.randint(first, x.shape, 0, 1000).astype(x.dtype)
        return jnp.where(jax.random.bernoulli(second, 0.5, x.shape), x * steps, 0)

    x = cut(some(16, 16), "d", "t", mesh=mesh)
    checked = check_step(jax.jit(dropped), jax.random.PRNGKey(0), x)
    assert checked, checked


def test_a_bfloat16_sum_differs_from_a_float32_reference(mesh):
    def product(x, w):
        return lax.psum((x @ w).astype(jnp.bfloat16), "t").astype(jnp.float32)

    in_specs = (P("d", "t"), P("t"))
    step = jax.shard_map(
        product,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=P("d"),
        check_vma=False,
    )
    args = cut(some(8, 256), "d", "t", mesh=mesh), cut(some(256, 6), "t", mesh=mesh)
    check = check_step(step, *args, reference=lambda x, w: x @ w)
    assert not check
    assert "adds up in bfloat16" in str(check)


def test_a_step_under_a_mesh_of_explicit_axes_that_is_set():
    mesh = jax.make_mesh((2, 4), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        args = cut(some(16, 8), "d", mesh=mesh), cut(some(8, 8), "d", "t", mesh=mesh)
        assert check_step(
            lambda x, w: jnp.tanh(x @ jax.sharding.reshard(w, P(None, "t"))), *args
        )


def test_a_step_that_reads_its_explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("d", "t"))

    def step(x, w):
        columns = NamedSharding(jax.typeof(x).sharding.mesh, P(None, "t"))
        return jnp.tanh(x @ jax.sharding.reshard(w, columns))

    args = cut(some(4, 6), "d", mesh=mesh), cut(some(6, 8), None, "d", mesh=mesh)
    # Arrays of one device have no such mesh in their types.
    with pytest.raises(ValueError, match="not found in mesh"):
        jax.eval_shape(step, *[jnp.asarray(np.asarray(x)) for x in args])
    checked = check_step(step, *args)
    assert checked, str(checked)


def test_a_mistake_that_bfloat16_hides_is_found_in_float32(mesh):
    @jax.jit
    def nearly(
        x,
    ):  # a constraint says nothing of numbers; the shard_map adds a thousandth
        perturbed = lambda x: (
            x * (1 + jnp.where(lax.axis_index("t") == 0, 0.0, 0.001).astype(x.dtype))
        )
        return jax.shard_map(
            perturbed, mesh=mesh, in_specs=P("d", "t"), out_specs=P("d", "t")
        )(x)

    array = jnp.ones((8, 8), jnp.bfloat16)
    x = jax.device_put(array, NamedSharding(mesh, P("d", "t")))
    check = check_step(nearly, x, reference=lambda x: x)
    assert not check
    expected = pytest.approx(0.001, rel=0.1)
    assert check.outputs[0].difference == expected


def test_the_story_says_what_differs_where_and_how_it_lies(mesh):
    case = PLANTED["sum_left_out_in_a_loop"]
    check = check_step(
        lambda mesh: case.make(mesh, True), *case.arrays(mesh), mesh=mesh
    )
    text = str(check)
    assert text.startswith(
        "the plan changes 1 of 1 output:\noutput  difference  rounding  at\n"
    )
    assert "the first equation that differs: `add` at planted.py:" in text
    assert "in turn 0 of its loop" in text
    assert "f32[4,6] on each device of d, t, which waits for the sum over t" in text
    assert "`sin` at planted.py:" in text
    assert "is a psum missing?" in text
    case = PLANTED["sum_left_out"]
    check = check_step(
        lambda mesh: case.make(mesh, True), *case.arrays(mesh), mesh=mesh
    )
    assert (
        "it waits for the sum over t, and leaves its shard_map as if it were whole"
        in str(check)
    )


@pytest.mark.parametrize("is_summed", [True, False])
def test_a_shard_map_on_explicit_axes_is_checked(mesh, is_summed):
    """Its `in_specs` are compared with the types of its arguments, also for the
    reference.
    """

    def make(mesh):
        def body(x, w):
            part = x @ w
            if is_summed:
                return lax.psum(part, "t")
            return part

        def loss(w, x):
            in_specs = (P("d", "t"), P("t"))
            y = jax.shard_map(
                body,
                mesh=mesh,
                in_specs=in_specs,
                out_specs=P("d"),
                check_vma=is_summed,
            )(x, w)
            y = jax.sharding.reshard(y, NamedSharding(mesh, P(None, "t")))
            return jnp.mean(jnp.tanh(y))

        return loss

    kinds = (AxisType.Explicit,) * len(mesh.axis_names)
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    w = cut(some(8, 8), "t", mesh=explicit)
    x = cut(some(4, 8), "d", "t", mesh=explicit)
    checked = check_step(make, w, x, mesh=explicit)
    assert bool(checked) is is_summed, str(checked)
    if not is_summed:
        assert "is a psum missing?" in str(checked)
    step = make(explicit)
    with pytest.raises(ProgramError, match=r"`check_step\(make_step, \*args, mesh"):
        check_step(step, w, x)


def test_a_right_step_says_so_and_its_arguments_stay(mesh):
    values = jnp.arange(64.0).reshape(8, 8)
    x = jax.device_put(values, NamedSharding(mesh, P("d", "t")))
    step = jax.jit(lambda x: {"y": jnp.tanh(x) @ x, "sum": x.sum()}, donate_argnums=0)
    check = check_step(step, x)
    assert check
    assert not x.is_deleted()
    assert str(check) == "the plan changes none of 2 outputs by more than rounding does"
    assert [output.path for output in check.outputs] == ["sum", "y"]


def test_a_shard_map_over_several_devices_needs_a_reference(mesh):
    case = PLANTED["sum_left_out"]
    args = case.arrays(mesh)
    with pytest.raises(
        sfx.errors.ProgramError,
        match=r"over a mesh of 8 devices.*`reference=`.*mesh=mesh",
    ):
        check_step(case.make(mesh, False), *args)
    plain = lambda x, w1, w2: jax.nn.relu(x @ w1) @ w2
    assert check_step(case.make(mesh, False), *args, reference=plain)
    check = check_step(case.make(mesh, True), *args, reference=plain)
    assert not check
    assert any("is a psum missing?" in line for line in check.story)


def test_a_scattered_sum_of_equal_values_is_suspected(mesh):
    def body(x):
        return lax.psum_scatter(x, "d", scatter_dimension=0, tiled=True)

    step = jax.shard_map(
        body, mesh=mesh, in_specs=P(), out_specs=P("d"), check_vma=False
    )
    x = cut(some(8, 8).astype(jnp.bfloat16), mesh=mesh)
    story = "\n".join(check_step(step, x, reference=lambda x: x).story)
    assert "`reduce_scatter` at test_check_step.py" in story
    assert "along which all devices have the same: is it doubled?" in story
    assert "adds up in bfloat16" in story


def test_an_argument_that_is_returned_unsummed_is_suspected(mesh):
    def step(x):
        body = lambda x: x
        return jax.shard_map(
            body, mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False
        )(x)

    x = cut(some(8, 8), "d", mesh=mesh)
    reference = lambda x: x[: 8 // mesh.shape["d"]] * 3 + 1
    story = "\n".join(check_step(step, x, reference=reference).story)
    assert "`shard_map` at test_check_step.py" in story
    assert "an argument of it may differ along d" in story


def test_a_function_called_shard_map_is_no_shard_map(mesh, monkeypatch):
    asked = []
    refuted_by = _check.judged
    monkeypatch.setattr(
        _check, "judged", lambda programs: asked.append(1) or refuted_by(programs)
    )

    @jax.jit
    def no_shard_map(x):
        return 2 * x

    x = cut(some(8, 8), "d", mesh=mesh)
    assert check_step(lambda x: no_shard_map(x).sum(), x)
    assert asked


def test_suspects_are_wrong_sums_and_wrong_positions(
    mesh,
):
    def body(x):
        mask = jnp.arange(x.shape[0]) > 1
        x = jnp.where(mask[:, None], x, 0)
        return lax.psum(lax.psum(x.astype(jnp.bfloat16), "d"), "d")

    step = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P(),
        check_vma=False,
    )
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("d")))
    report = check_step(step, x, reference=lambda x: x[:4] * 0)
    story = "\n".join(report.story)
    assert "adds up in bfloat16" in story
    assert "along which all devices have the same: is it doubled?" in story
    assert (
        "counts from 0 on every device along d, and no axis_index offsets it" in story
    )


def explicit_step(mesh: Mesh):
    def step(table, ids):
        def loss(table):
            # https://github.com/openxla/xla/issues/42481: sums over `tp` follow the
            # slice, not the scatter.
            spec = P("dp", None, reduced=frozenset({"tp"}))
            sharding = NamedSharding(mesh, spec)
            rows = jax.sharding.reshard(table, sharding)
            elements = (
                rows.at[ids].get(out_sharding=NamedSharding(mesh, P("dp", "tp", None)))
                ** 2
            )
            return jnp.sum(  # wrong
                elements
            )

        return jax.grad(loss)(table)

    return step


def bug_of_scatter():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    table = jax.random.normal(jax.random.key(0), (16, 8))
    ids = jax.random.randint(jax.random.key(1), (4, 8), 0, 5)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    return (
        jax.jit(explicit_step(mesh)),
        (put(table, "tp"), put(ids, "dp", "tp")),
        "scatter-add",
    )


def columns():
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    return NamedSharding(mesh, P(None, "x")), NamedSharding(mesh, P())


def bug_of_update():
    cut, whole = columns()
    # https://github.com/openxla/xla/issues/49118: a start that needs clamping is in no
    # device's part.
    step = lambda x, y, position: (
        lax.dynamic_update_slice(x, y, [jnp.int32(0), position]) * 2
    )
    values = jnp.arange(4.0).reshape(2, 2)
    args = values, jnp.full((2, 1), 99.0), jnp.int32(2)
    return (
        jax.jit(step, in_shardings=(cut, whole, whole), out_shardings=cut),
        args,
        "dynamic_update_slice",
    )


def bug_of_slice():
    cut, whole = columns()
    # https://github.com/openxla/xla/issues/49122: each device clamps its own start.
    step = lambda x, position: (
        lax.dynamic_slice(x, [jnp.int32(0), position], (2, 6)) + 1
    )
    values = jnp.arange(16.0).reshape(2, 8)
    args = values, jnp.int32(7)
    return (
        jax.jit(step, in_shardings=(cut, whole), out_shardings=cut),
        args,
        "dynamic_slice",
    )


@pytest.mark.parametrize("bug", [bug_of_scatter, bug_of_update, bug_of_slice])
def test_a_bug_of_xla_is_found_by_its_operation(bug):
    step, args, primitive = bug()
    check = check_step(step, *args)
    if jax.__version_info__ < (0, 11):
        assert not check
    # A JAX that mended it computes the same; JAX 0.12 does not, and refuses to keep
    # what is not summed yet.
    named = (
        f"the first equation that differs: `{primitive}` at test_check_step.py:"
        in str(check)
    )
    assert (
        check or named or "XLA refuses the step where every value is kept" in str(check)
    )
    assert named or jax.__version_info__ >= (0, 11)


def test_a_training_step_of_structs_is_made_small_and_run():
    rules = [("embed", "d"), ("mlp", "t"), ("vocab", "t"), ("batch", "d")]
    axes = sfx.AxisRules(rules)
    shapes = {
        "table": ("vocab", "embed"),
        "up": ("embed", "mlp"),
        "down": ("mlp", "embed"),
    }
    sizes = {"vocab": 32_000, "embed": 512, "mlp": 2048}
    structs = {
        k: jax.ShapeDtypeStruct(tuple(sizes[struct] for struct in v), jnp.float32)
        for k, v in shapes.items()
    }
    plan = sfx.plan(structs, sfx.MeshSpec({"d": 2, "t": 4}), names=shapes, axes=axes)
    sharding = plan.sharding(("batch", None))
    tokens = jax.ShapeDtypeStruct((64, 4096), jnp.int32, sharding=sharding)
    seen = []

    def loss(w, tokens):
        seen.append(tokens.shape)
        x = w["table"][tokens]
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
        return -jnp.mean(jax.nn.log_softmax(x @ w["table"].T))

    def step(w, tokens):
        value, gradients = jax.value_and_grad(loss)(w, tokens)
        return value, jax.tree.map(lambda a, b: a - 0.1 * b, w, gradients)

    check = check_step(step, plan.structs, tokens, shrink=True)
    assert check, str(check)
    assert max(seen[-1]) < 32
    for struct in check.outputs:
        assert np.isfinite(struct.allowed)


@pytest.mark.parametrize(
    ("shape", "small"), [((1024, 96), (16, 96)), ((1024, 96, 96), (16, 2, 96))]
)
def test_a_size_that_a_step_needs_is_not_shrunk(shape, small):
    mesh = sfx.MeshSpec({"d": 8}).abstract()
    seen = []
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("d")))

    def step(x):
        seen.append(x.shape)
        elements = x.reshape(*x.shape[:-1], 12, 8)
        return jnp.sum(elements, axis=1)

    assert check_step(step, x, shrink=True)
    assert seen[-1] == small


def test_structs_need_devices():
    sharding = NamedSharding(sfx.MeshSpec({"d": 16}).abstract(), P("d"))
    x = jax.ShapeDtypeStruct(
        (16, 4),
        jnp.float32,
        sharding=sharding,
    )
    with pytest.raises(
        sfx.errors.MeshError,
        match=r"for 16 devices, and 8 are here.*jax_num_cpu_devices",
    ):
        check_step(lambda x: x, x)


def test_what_verify_refutes_is_said_before_the_numbers():
    axes = {"data": 2, "fsdp": 2, "tensor": 2}
    devices = sfx.MeshSpec(axes).build(jax.devices())

    def step(x, w):
        for _ in range(2):
            x = x + jnp.tanh(x @ w)
        return x

    x = cut(some(16, 32), ("data", "fsdp"), mesh=devices)
    wrong = check_step(step, x, cut(some(32, 32), "tensor", "fsdp", mesh=devices))
    assert not wrong
    assert not wrong.outputs[0].is_right
    assert wrong.refutations[0].operation.endswith("(add)")
    assert wrong.lines[0] == wrong.refutations[0].source
    first, *others = str(wrong).splitlines()
    assert first.startswith("XLA's partitioner computes this step wrongly: %add")
    assert any(line.startswith("the plan changes 1 of 1 output") for line in others)
    right = check_step(step, x, cut(some(32, 32), None, "fsdp", mesh=devices))
    assert right
    assert not right.refutations


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_structs_of_keys_are_keys_of_their_kind(kind):
    keys = jax.random.split(jax.random.key(0, impl=kind), 8)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("d"))
    structs = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=rows)
    seen = []

    def step(keys):
        seen.append(keys.dtype)
        return jax.random.key_data(keys) + 1

    assert check_step(sfx.filter_jit(step), structs)
    assert set(seen) == {keys.dtype}
