import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import odd_models
import pytest
from hypothesis import given, settings, strategies as st
from jax import P
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import pallas_call
from models import MODELS, Struct, f32, mlp, naming_of, space_of
from parts_of_search import fastest

from shardfx import AxisRules, MeshSpec, atomic, plan
from shardfx._cli import demo
from shardfx.auto import name_axes
from shardfx.auto._raw_keys import raw_keys
from shardfx.errors import LeafTypeError


def sizes(naming):
    size_by_name = {}
    for axis in naming.axes:
        size_by_name[axis.name] = axis.size
    return size_by_name


def rules_for(naming, **targets):
    rules = list(targets.items())
    for axis in naming.axes:
        if axis.name not in targets:
            rules.append((axis.name, None))
    return AxisRules(rules)


def by_path(naming):
    """The names of each array by its path, which begins with the number of the
    argument.
    """

    def is_names(node):
        return type(node) is tuple and node != naming.names

    leaves = jax.tree.leaves_with_path(naming.names, is_leaf=is_names)
    names_by_path = {}
    for path, names in leaves:
        names_by_path[jax.tree_util.keystr(path, simple=True, separator="/")] = names
    return names_by_path


def test_the_demo_is_named_as_its_author_named_it():
    run = demo.Run()
    optimizer = demo.make_optimizer(run)
    model = eqx.filter_eval_shape(demo.Transformer, key=jax.random.key(0))

    def is_array(leaf):
        return hasattr(leaf, "shape")

    arrays = eqx.filter(model, is_array)
    state = eqx.filter_eval_shape(optimizer.init, arrays)
    text = Struct((16, 129), "int32")
    step = demo.make_step(optimizer, None)
    naming = name_axes(step, model, state, text)
    expected = {
        "vocab": 256,
        "embed": 128,
        "layers": 4,
        "kv_heads": 2,
        "query_groups": 4,
        "head_dim": 16,
        "hidden": 384,
        "batch": 16,
        "sequence": 129,
    }
    assert sizes(naming) == expected  # fmt: skip
    expected = (
        "layers",
        "embed",
        ("kv_heads", atomic("query_groups", 16)),
    )
    layers = naming.names[0].layers
    assert layers.query == expected
    expected = ("layers", "embed", atomic("kv_heads", 16))
    assert naming.names[0].layers.key == expected
    rules = rules_for(
        naming,
        batch="data",
        kv_heads="kv",
        query_groups="group",
        hidden=("kv", "group"),
    )
    mesh = MeshSpec({"data": 2, "kv": 2, "group": 2})
    sharding_plan = plan(model, mesh, names=naming.names[0], axes=rules)
    assert sharding_plan["layers/query"].spec == P(None, None, ("kv", "group"))
    assert sharding_plan["layers/key"].spec == P(None, None, "kv")
    assert sharding_plan["layers/down"].spec == P(None, ("kv", "group"))
    moments = plan(state, mesh, names=naming.names[1], axes=rules)
    moment_spec = moments["1/0/mu/layers/down"].spec
    assert moment_spec == sharding_plan["layers/down"].spec
    batch_plan = plan(text, mesh, names=naming.names[2], axes=rules)
    sharding_plan = batch_plan[""]
    spec = sharding_plan.spec
    assert spec == P("data")


ATTENTION = "0/params/Block_1/MultiHeadDotProductAttention_0"
EXPERTS = {
    "0/wi": ("experts", "embed", "mlp"),
    "0/wo": ("experts", "mlp", "embed"),
    "1": ("batch", "sequence", "embed"),
}
GROUPED = {
    "0/layers/q": ("layers", "embed", ("kv_heads", atomic("query_groups", 16))),
    **{
        f"0/layers/{name}": ("layers", "embed", atomic("kv_heads", 16)) for name in "kv"
    },
}
# What arrays of each model are called; each dimension that two arrays share has one
# name.
CALLED = {
    # Layers that repeat share names.
    MODELS["flax_transformer"]: {
        "0/params/Block_1/Dense_1/kernel": ("embed", "mlp"),
        "0/params/Block_1/Dense_0/kernel": ("mlp", "embed"),
        f"{ATTENTION}/query/kernel": ("embed", "heads", "head_dim"),
        f"{ATTENTION}/out/kernel": ("heads", "head_dim", "embed"),
        "0/params/Embed_0/embedding": ("vocab", "embed"),
        "2": ("batch", "sequence"),
    },
    # Fused heads become units.
    MODELS["equinox_attention"]: {
        "0/query_proj/weight": (atomic("heads", 8), "embed"),
        "0/output_proj/weight": ("embed", atomic("heads", 8)),
    },
    # Heads in groups, under scan and remat.
    MODELS["scanned"]: {**GROUPED, "0/layers/wo": ("layers", "mlp", "embed"), "0/embedding": ("vocab", "embed")},
    # What nothing ties stays apart.
    MODELS["mlp"]: {
        "0/w1": ("w1_0", "w1_1"), "0/b1": ("w1_1",), "0/w2": ("w1_1", "w2_1"), "0/w3": ("w2_1", "w3_1"),
        "1": ("batch", "w1_0"), "2": ("batch", "w3_1"),
    },
    # The windows of convolutions stay whole, and their channels are tied.
    MODELS["convolutions"]: {
        "0/params/Conv_0/bias": ("Conv_0_3",),
        "0/params/Conv_1/bias": ("Conv_0_3",),
        "0/params/Conv_2/bias": ("Conv_2_3",),
        "0/params/Conv_0/kernel": ("window", "window_2", "channels", "Conv_0_3"),
        "0/params/Conv_1/kernel": ("window", "window_2", None, "Conv_0_3"),
        "0/params/Conv_2/kernel": ("window", "window_2", "Conv_0_3", "Conv_2_3"),
        "0/params/Dense_1/kernel": (("Dense_1_0", atomic("Dense_1_0_2", 64)), "Dense_0_0"),
        "0/params/Dense_0/kernel": ("Dense_0_0", "classes"),
        "1": ("batch", "height", "width", "channels"),
        "2": ("batch",),
    },
    MODELS["experts"]: EXPERTS,
    MODELS["ragged_experts"]: EXPERTS,
    odd_models.adapters: {
        "1/wte": ("vocab", "embed"), "1/h/0/up": ("embed", "mlp_2"), "2": ("batch", "sequence"),
        "0/0/down": ("embed", "mlp"), "0/0/up": ("mlp", "mlp_2"),
    },
    # A table called `pos_embed` has no tokens in it, and one that is cut to the length
    # none either.
    odd_models.positions: {
        "0/wte": ("vocab", "embed"), "0/wpe": ("positions_2", "embed"), "0/pos_embed": (None, "positions", "embed"),
    },
    odd_models.rows_of_a_table: {"0/table": ("vocab", "embed"), "1": ("batch", "sequence")},
    # The width is that of the residual sums; one of queries, keys and values in one
    # dimension is a unit.
    odd_models.dit: {
        "0/patch": ("mlp_2", "embed"), "0/final": ("embed", "mlp_2"), "0/label": ("classes", "ada_0"),
        "0/blocks/0/mlp_in": ("embed", "mlp"), "0/blocks/0/mlp_out": ("mlp", "embed"),
        "0/blocks/1/qkv": ("embed", atomic("qkv_1", 96)), "0/blocks/1/proj": (atomic("heads", 16), "embed"),
        "0/blocks/0/ada": ("ada_0", "ada_1"), "1": ("batch", "sequence", "mlp_2"), "2": ("batch",), "3": ("batch",),
    },
    odd_models.decode: {
        **{f"1/{name}": ("layers", "batch", "sequence", "kv_heads", "head_dim") for name in "kv"},
        "0/layers/up": ("layers", "embed", "mlp"), "2": ("batch",), "3": (),
    },
    odd_models.channels_first: {
        "0/stem": ("embed", "channels", "window_3", "window_4"), "0/head": ("mlp_2", "classes"),
        "0/a": ("mlp", "embed", "window", "window_2"), "0/b": ("embed", "mlp", "window", "window_2"),
        "0/down": ("mlp_2", "embed", "window", "window_2"), "1": ("batch", "channels", "height", "width"),
        "2": ("batch",),
    },
    # Each tower has a width.
    odd_models.two_towers: {
        "0/image/layers/1/out": ("mlp", "embed"), "0/text/layers/0/fc": ("embed_2", "mlp_2"),
        "0/text/layers/1/out": ("mlp_2", "embed_2"), "0/text/tokens": ("vocab", "embed_2"),
        "1": ("batch", "sequence", "patch_0"), "2": ("batch", "sequence_2"),
    },
}  # fmt: skip


@pytest.mark.parametrize("make", CALLED, ids=lambda make: make.__name__)
def test_what_dimensions_are_called(make):
    naming = naming_of(make)
    named = by_path(naming)
    assert CALLED[make].items() <= named.items()
    assert not naming.notes


@pytest.mark.parametrize("layout", ["NCHW", "CHWN"])
def test_a_gradient_changes_no_name_of_an_image(layout):
    numbers = (layout, "OIHW", layout)

    def loss(kernels, images):
        x = images
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=numbers
            )
        return jnp.sum(x**2)

    kernels = [f32(48, 6, 3, 3), f32(64, 48, 3, 3)]
    sizes_by_letter = {"N": 32, "C": 6, "H": 16, "W": 20}
    images = f32(*map(sizes_by_letter.__getitem__, layout))
    forward = by_path(name_axes(loss, kernels, images))["1"]
    assert by_path(name_axes(jax.grad(loss), kernels, images))["1"] == forward
    assert forward[layout.index("N")] != "channels"


@pytest.mark.parametrize("name", MODELS)
def test_every_model_plans_with_what_was_found(name):
    make = MODELS[name]
    _, *args = make()
    naming = naming_of(make)
    joins = itertools.chain.from_iterable(axis.joins for axis in naming.axes)
    assert "dot_general" in {what for what, _ in joins}
    first = next(axis.name for axis in naming.axes if axis.size % 2 == 0)
    for arg, names in zip(args, naming.names, strict=True):
        axes = rules_for(naming, **{first: "a"})
        mesh = MeshSpec({"a": 2})
        plan(arg, mesh, names=names, axes=axes)
    text = str(naming)
    assert "tied by" in text
    for axis in naming.axes:
        assert axis.name in str(naming)


def test_loops_and_branches():
    def step(p, x):
        def multiplied(_, y):
            return y @ p["a"]

        x = jax.lax.fori_loop(0, 3, multiplied, x)

        def is_small(y):
            return jnp.sum(y) < 3

        def shifted(y):
            return y + p["b"]

        x = jax.lax.while_loop(is_small, shifted, x)

        def scaled(y):
            return y * p["c"]

        def unchanged(y):
            return y

        is_positive = jnp.sum(x) > 0
        return jax.lax.cond(is_positive, scaled, unchanged, x)

    params = {"a": f32(8, 8), "b": f32(8), "c": f32(8)}
    naming = name_axes(step, params, f32(4, 8))
    names = naming.names[0]
    assert names["b"] == names["c"] == names["a"][1:] or names["b"] == names["c"] == (
        names["a"][0],
    )
    assert naming.names[1][0] == "batch"
    assert any("trips of a loop" in note for note in naming.notes)


def test_odd_arguments():
    def step(a, key, n, flag):
        array = jax.random.normal(key, (3,))
        product = a["x"] * n
        return product, a["none"], array, a["empty"]

    arrays = {
        "x": jnp.ones(()),
        "none": None,
        "empty": jnp.ones((0, 3)),
        "half": f32(4),
    }
    key = jax.random.key(0)
    naming = name_axes(step, arrays, key, 3, True)
    assert naming.names[0]["x"] == ()
    assert naming.names[2] is None
    assert isinstance(naming.names[0]["empty"], tuple)


def test_what_has_no_names():
    x = f32(3)
    with pytest.raises(
        LeafTypeError,
        match="`step` must be a function, not dict; pass the function that is jitted",
    ):
        name_axes({}, x)  # pyright: ignore[reportArgumentType]
    with pytest.raises(KeyError, match="no axis is called 'mpl'; there are"):
        name_axes(*mlp())["mpl"]


@pytest.mark.parametrize("shape", [(2,), (16, 2)], ids=["one", "each"])
def test_the_numbers_of_raw_keys_are_no_batch(shape):
    def step(params, key, x):
        if len(shape) == 2:
            keys = key
        else:
            keys = jax.random.split(key, 16)

        def drawn(key):
            return jax.random.normal(key, (64,))

        noise = jax.vmap(drawn)(keys)
        hidden = (x + noise) @ params["a"]
        out = hidden @ params["b"]
        return jnp.mean(out**2)

    params = {"a": f32(64, 96), "b": f32(96, 64)}
    key = jax.ShapeDtypeStruct(shape, jnp.uint32)
    args = (
        params,
        key,
        f32(16, 64),
    )
    naming = name_axes(step, *args)
    batch_names = ["batch"] * (len(shape) - 1)
    expected = (*batch_names, "key_words")
    assert naming.names[1] == expected
    assert naming.names[2][0] == "batch"
    space = space_of((step, *args), 8, "v5e")
    for candidate in fastest(space, 8):
        for _, names in candidate.assignments:
            assert "key_words" not in names


@pytest.mark.parametrize("length", [2, 4])
def test_short_rows_of_tokens_are_no_keys(length):
    # Tokens of this dtype and size look like the words of keys.
    def step(params, key, tokens):
        embedded = params["embed"][tokens]
        x = embedded @ params["w"]
        noise = jax.random.normal(key, x.shape)
        elements = x * noise
        return jnp.mean(elements)

    params = {"embed": f32(512, 64), "w": f32(64, 96)}
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    tokens = jax.ShapeDtypeStruct((16, length), jnp.uint32)
    args = (
        params,
        key,
        tokens,
    )
    named = name_axes(step, *args)
    assert named.names[1] == ("key_words",)
    token_names = named.names[2]
    assert token_names[0] == "batch" and "key_words" not in token_names


def drawn_in_loops(keys, key):
    def body(carry, key):
        carry, now = jax.random.split(carry)
        carried_noise = jax.random.normal(now)
        key_noise = jax.random.normal(key)
        return carry, carried_noise + key_noise

    return jax.lax.scan(body, key, keys)


def drawn_until(keys, key):
    def body(carry):
        key, total = carry
        key, now = jax.random.split(key)
        new_total = total + jax.random.uniform(now)
        return key, new_total

    def is_short(carry):
        return carry[1] < 9

    last = jax.lax.while_loop(is_short, body, (key, 0.0))
    total = last[1]
    noise = jax.random.normal(keys[3])
    return total * noise


def drawn_in_branches(keys, key):
    def normal(key):
        return jax.random.normal(key)

    def zero(key):
        return 0.0

    branches = [normal, zero]
    drawn = jax.lax.switch(keys.shape[0] % 2, branches, key)
    mapped = jax.vmap(jax.random.normal)
    rematerialized = jax.checkpoint(mapped)
    return drawn + rematerialized(keys)


@pytest.mark.parametrize("draw", [drawn_in_loops, drawn_until, drawn_in_branches])
def test_keys_are_found_through_loops_and_branches(draw):
    def step(keys, key, seeds):
        drawn = draw(keys, key)
        seed_key = jax.random.key(seeds[0, 0])
        return drawn, seeds * 2, seed_key

    shapes = [(6, 2), (2,), (8, 2)]
    args = []
    for shape in shapes:
        args.append(jax.ShapeDtypeStruct(shape, jnp.uint32))
    jitted = jax.jit(step)
    closed = jax.make_jaxpr(jitted)
    words = raw_keys(closed(*args).jaxpr)
    assert words == {0, 1}


MESH = jax.sharding.AbstractMesh(
    (4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)


def constrained(x):
    sharding = jax.NamedSharding(MESH, P("a"))
    return jax.lax.with_sharding_constraint(x, sharding)


def mapped(x):
    over_mesh = jax.shard_map(jnp.tanh, mesh=MESH, in_specs=P("a"), out_specs=P("a"))
    return over_mesh(x)


@custom_partitioning
def partitioned(x):
    return jnp.tanh(x)


partitioned.def_partition(
    lambda mesh, ins, _: (mesh, jnp.tanh, ins[0].sharding, (ins[0].sharding,)),
    sharding_rule="i j -> i j",
)


def kernel(x):
    def body(a, b):
        return b.__setitem__(..., jnp.tanh(a[...]))

    call = pallas_call(body, out_shape=f32(*x.shape))
    return call(x)


def looped(x):
    total = jnp.sum(x).astype(int)

    def activated(_, y):
        return jnp.tanh(y)

    return jax.lax.fori_loop(0, total, activated, x)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (constrained, "constrains arrays over a mesh of its own: that is not priced"),
        (
            mapped,
            "a `shard_map` shards arrays over a mesh of its own: that is not priced",
        ),
        (partitioned, "a `custom_partitioning` shards as its own rule says"),
        (kernel, "`tpu_custom_call` is not known"),
        (looped, "the trips of a loop are not in the program"),
    ],
)
def test_what_is_not_priced_is_noted(change, note):
    def step(p, x):
        hidden = change(x @ p["up"])
        out = hidden @ p["down"]
        return jnp.mean(out**2)

    params = {"up": f32(64, 256), "down": f32(256, 64)}
    args = params, f32(128, 64)
    naming = name_axes(step, *args)
    notes = " ".join(naming.notes)
    assert note in notes
    assert naming.notes[0] in str(naming)


SIZES = {
    "vocab": 96,
    "embed": 20,
    "sequence": 14,
    "layers": 3,
    "heads": 5,
    "head_dim": 7,
    "experts": 6,
    "mlp": 44,
    "batch": 11,
}


def experts_and_positions(*, embed, heads, head_dim, experts, mlp, layers, **other):
    """The loss of a transformer with a table of positions, and its arguments."""

    def layer(x, w):
        rows = x.shape[:2]
        query_product = x @ w["wq"]
        queries = query_product.reshape(*rows, heads, head_dim)
        key_product = x @ w["wk"]
        keys = key_product.reshape(*rows, heads, head_dim)
        products = jnp.einsum("bshd,bthd->bhst", queries, keys)
        weights = jax.nn.softmax(products)
        values = jnp.einsum("bhst,bthd->bshd", weights, keys)
        flat = values.reshape(*rows, heads * head_dim)
        x = x + flat @ w["wo"]
        routed = x @ w["router"]
        routes = jax.nn.softmax(routed)
        raised = jnp.einsum("bse,xem->bsxm", x, w["up"])
        hidden = jax.nn.relu(raised)
        lowered = jnp.einsum("bsxm,xme,bsx->bse", hidden, w["down"], routes)
        return x + lowered, None

    def loss(params, tokens):
        embedded = params["embedding"][tokens]
        x = embedded + params["pos"]
        x, _ = jax.lax.scan(layer, x, params["layers"])
        logits = x @ params["embedding"].T
        normalizers = jax.nn.logsumexp(logits, axis=-1)
        return jnp.mean(normalizers)

    width = heads * head_dim
    params = {
        "embedding": f32(other["vocab"], embed),
        "pos": f32(other["sequence"], embed),
        "layers": {
            "wq": f32(layers, embed, width),
            "wk": f32(layers, embed, width),
            "wo": f32(layers, width, embed),
            "router": f32(layers, embed, experts),
            "up": f32(layers, experts, embed, mlp),
            "down": f32(layers, experts, mlp, embed),
        },
    }
    shape = (other["batch"], other["sequence"])
    return loss, params, Struct(shape, "int32")


def without_units(names):
    targets = []
    for name in names:
        targets.append(getattr(name, "target", name))
    return tuple(targets)


@given(
    st.fixed_dictionaries(dict.fromkeys(SIZES, st.sampled_from([2, 4, 8]))),
)
@settings(max_examples=5)
def test_operations_name_dimensions_whatever_their_sizes(sizes):
    expected = {
        "0/embedding": ("vocab", "embed"),
        "0/pos": ("sequence", "embed"),
        "0/layers/wq": ("layers", "embed", "heads"),
        "0/layers/wk": ("layers", "embed", "heads"),
        "0/layers/wo": ("layers", "heads", "embed"),
        "0/layers/router": ("layers", "embed", "experts"),
        "0/layers/up": ("layers", "experts", "embed", "mlp"),
        "0/layers/down": ("layers", "experts", "mlp", "embed"),
        "1": ("batch", "sequence"),
    }
    model = experts_and_positions(**sizes)
    naming = name_axes(*model)
    named = by_path(naming)
    actual = {}
    for path, names in named.items():
        actual[path] = without_units(names)
    assert actual == expected


def test_data_of_which_a_part_is_scanned_with_the_layers():
    def step(w, x):
        blocks = x.reshape(16, 4, 6).transpose(1, 0, 2)

        def layer(carry, inputs):
            weight, block = inputs
            return jnp.tanh(carry @ weight), jnp.sum(block)

        return jax.lax.scan(layer, jnp.ones((2, 8)), (w, blocks))

    naming = name_axes(step, f32(4, 8, 8), f32(16, 24))
    assert naming["layers"].size == 4


def test_a_name_is_in_the_axes_and_they_are_not_listed_by_number():
    naming = name_axes(*mlp())
    assert all(axis.name in naming for axis in naming.axes)
    assert "no such name" not in naming and 0 not in naming
    with pytest.raises(TypeError, match="not iterable"):
        list(naming)  # pyright: ignore
