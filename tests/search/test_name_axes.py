import equinox as eqx
import jax
import jax.numpy as jnp
import odd_models
import pytest
from jax import P
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import pallas_call
from models import MODELS, Struct, f32, mlp, sgd, space_of

from shardfx import AxisRules, MeshSpec, atomic, plan
from shardfx._cli.demo import train
from shardfx.auto import name_axes
from shardfx.auto._space import fastest
from shardfx.errors import LeafTypeError


def sizes(found):
    return {axis.name: axis.size for axis in found.axes}


def rules_for(found, **given):
    return AxisRules([*given.items(), *((axis.name, None) for axis in found.axes if axis.name not in given)])


def test_the_demo_is_named_as_its_author_named_it():
    run = train.Run()
    optimizer = train.make_optimizer(run)
    model = eqx.filter_eval_shape(train.Transformer, key=jax.random.key(0))
    state = eqx.filter_eval_shape(optimizer.init, eqx.filter(model, lambda leaf: hasattr(leaf, "shape")))
    text = Struct((16, 129), "int32")
    found = name_axes(train.make_step(optimizer, None), model, state, text)
    assert sizes(found) == {
        "vocab": 256, "embed": 128, "layers": 4, "kv_heads": 2, "query_groups": 4, "head_dim": 16, "hidden": 384,
        "batch": 16, "sequence": 129,
    }  # fmt: skip
    assert found.names[0].layers.attention.query == ("layers", "embed", ("kv_heads", atomic("query_groups", 16)))
    assert found.names[0].layers.attention.key == ("layers", "embed", atomic("kv_heads", 16))
    rules = rules_for(found, batch="data", kv_heads="kv", query_groups="group", hidden=("kv", "group"))
    mesh = MeshSpec({"data": 2, "kv": 2, "group": 2})
    made = plan(model, mesh, names=found.names[0], axes=rules)
    assert made["layers/attention/query"].spec == P(None, None, ("kv", "group"))
    assert made["layers/attention/key"].spec == P(None, None, "kv")
    assert made["layers/mlp/down"].spec == P(None, ("kv", "group"))
    moments = plan(state, mesh, names=found.names[1], axes=rules)
    assert moments["1/0/mu/layers/mlp/down"].spec == made["layers/mlp/down"].spec
    assert plan(text, mesh, names=found.names[2], axes=rules)[""].spec == P("data")


def test_layers_that_repeat_share_names():
    found = name_axes(*MODELS["flax_transformer"]())
    block = found.names[0]["params"]["Block_1"]
    assert block["Dense_1"]["kernel"] == ("embed", "mlp") and block["Dense_0"]["kernel"] == ("mlp", "embed")
    attention = block["MultiHeadDotProductAttention_0"]
    assert attention["query"]["kernel"] == ("embed", "heads", "head_dim")
    assert attention["out"]["kernel"] == ("heads", "head_dim", "embed")
    assert found.names[0]["params"]["Embed_0"]["embedding"] == ("vocab", "embed")
    assert found.names[2] == ("batch", "sequence")
    assert "v" in found["mlp"].places[0] and "Block_{0..1}" in found["mlp"].places[0]


def test_fused_heads_become_units():
    found = name_axes(*MODELS["equinox_attention"]())
    assert found.names[0].query_proj.weight == (atomic("heads", 8), "embed")
    assert found.names[0].output_proj.weight == ("embed", atomic("heads", 8))
    assert found.names[0].query_proj.bias is None
    assert any(what == "dot_general" for what, _ in found["heads"].joins)


def test_grouped_heads_under_scan_and_remat():
    found = name_axes(*MODELS["scanned"]())
    layers = found.names[0]["layers"]
    assert layers["q"] == ("layers", "embed", ("kv_heads", atomic("query_groups", 16)))
    assert layers["k"] == layers["v"] == ("layers", "embed", atomic("kv_heads", 16))
    assert layers["wo"] == ("layers", "mlp", "embed")
    assert found.names[0]["embedding"] == ("vocab", "embed") and not found.notes


def test_plain_layers_keep_apart_what_nothing_ties():
    found = name_axes(*MODELS["mlp"]())
    names = found.names[0]
    assert names["w1"][1] == names["b1"][0] == names["w2"][0] != names["w2"][1] == names["w3"][0]
    assert found.names[1] == ("batch", names["w1"][0]) and found.names[2] == ("batch", names["w3"][1])


def test_convolutions_keep_their_windows_whole_and_tie_their_channels():
    found = name_axes(*MODELS["convolutions"]())
    params = found.names[0]["params"]
    assert params["Conv_0"]["kernel"][3] == params["Conv_1"]["kernel"][3] == params["Conv_2"]["kernel"][2]
    assert params["Conv_2"]["kernel"][3] == params["Conv_2"]["bias"][0]
    assert params["Dense_1"]["kernel"][1] == params["Dense_0"]["kernel"][0]
    assert found.names[1][0] == found.names[2][0] == "batch" and found.names[1][1:3] == ("height", "width")


@pytest.mark.parametrize("name", ["experts", "ragged_experts"])
def test_experts_are_found(name):
    found = name_axes(*MODELS[name]())
    assert found.names[0]["wi"] == ("experts", "embed", "mlp") and found.names[0]["wo"] == ("experts", "mlp", "embed")


def token_loss(logits, tokens):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


def test_adapters_of_a_frozen_base():
    """The adapters are what is trained; the base is no data, though it has a dimension that they lack."""

    def loss(adapters, base, tokens):
        x = base["wte"][tokens]
        for a, w in zip(adapters, base["h"], strict=True):
            x = x + jax.nn.relu(x @ w["up"] + x @ a["down"] @ a["up"]) @ w["back"]
        return token_loss(x @ base["wte"].T, tokens)

    adapters = [{"down": f32(64, 8), "up": f32(8, 256)}] * 2
    base = {"wte": f32(1000, 64), "h": [{"up": f32(64, 256), "back": f32(256, 64)}] * 2}
    found = name_axes(sgd(loss), adapters, base, Struct((16, 32), "int32"))
    assert found.names[1]["wte"] == ("vocab", "embed") and found.names[2] == ("batch", "sequence")
    assert found.names[0][0]["down"][0] == "embed" and found.names[0][0]["up"][1] == found.names[1]["h"][0]["up"][1]


def test_a_state_space_layer():
    """The width is what tokens are looked up into, though more arrays have the inner dimension."""

    def loss(p, tokens):
        x = p["embed"][tokens]
        inner, gate = jnp.split(x @ p["in_proj"], 2, -1)
        into, out, step = inner @ p["B"], inner @ p["C"], jax.nn.softplus(inner @ p["dt"])

        def cell(h, row):
            x, d, b, c = row
            h = h * jnp.exp(d[..., None] * p["A"]) + (d * x)[..., None] * b[:, None, :]
            return h, jnp.einsum("bdn,bn->bd", h, c)

        rows = jax.tree.map(lambda a: a.swapaxes(0, 1), (inner, step, into, out))
        _, y = jax.lax.scan(cell, jnp.zeros((x.shape[0], 256, 16)), rows)
        x = x + ((y.swapaxes(0, 1) + inner * p["D"]) * jax.nn.silu(gate)) @ p["out_proj"]
        return token_loss(x @ p["embed"].T, tokens)

    inner = {"A": f32(256, 16), "B": f32(256, 16), "C": f32(256, 16), "D": f32(256), "dt": f32(256, 256)}
    p = {"embed": f32(512, 128), "in_proj": f32(128, 512), "out_proj": f32(256, 128), **inner}
    names = name_axes(sgd(loss), p, Struct((8, 32), "int32")).names[0]
    assert names["embed"] == ("vocab", "embed") and names["out_proj"][1] == names["in_proj"][0] == "embed"
    assert names["A"] == names["B"] == names["C"] and names["A"][0] == names["D"][0] == names["out_proj"][0]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_plans_with_what_was_found(name):
    step, *args = MODELS[name]()
    found = name_axes(step, *args)
    first = next(axis.name for axis in found.axes if axis.size % 2 == 0)
    for arg, names in zip(args, found.names, strict=True):
        plan(arg, MeshSpec({"a": 2}), names=names, axes=rules_for(found, **{first: "a"}))
    assert "tied by" in str(found) and all(axis.name in str(found) for axis in found.axes)


def test_loops_and_branches():
    def step(p, x):
        x = jax.lax.fori_loop(0, 3, lambda _, y: y @ p["a"], x)
        x = jax.lax.while_loop(lambda y: jnp.sum(y) < 3, lambda y: y + p["b"], x)
        return jax.lax.cond(jnp.sum(x) > 0, lambda y: y * p["c"], lambda y: y, x)

    found = name_axes(step, {"a": f32(8, 8), "b": f32(8), "c": f32(8)}, f32(4, 8))
    names = found.names[0]
    assert names["b"] == names["c"] == names["a"][1:] or names["b"] == names["c"] == (names["a"][0],)
    assert found.names[1][0] == "batch" and any("trips of a loop" in note for note in found.notes)


def test_odd_arguments():
    def step(a, key, n, flag):
        return a["x"] * n, a["none"], jax.random.normal(key, (3,)), a["empty"]

    arrays = {"x": jnp.ones(()), "none": None, "empty": jnp.ones((0, 3)), "half": f32(4)}
    found = name_axes(step, arrays, jax.random.key(0), 3, True)
    assert found.names[0]["x"] == () and found.names[2] is None
    assert isinstance(found.names[0]["empty"], tuple)


def test_a_step_that_is_no_function():
    no_function: dict = {}
    with pytest.raises(LeafTypeError, match="`step` must be a function, not dict; pass the function that is jitted"):
        name_axes(no_function, f32(3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(KeyError, match="no axis is called 'mpl'; there are"):
        name_axes(*mlp())["mpl"]


def test_tables_of_positions_that_are_added():
    """A table called `pos_embed` has no tokens in it, and one that is cut to the length none either."""

    def loss(p, tokens):
        x = p["wte"][tokens] + p["wpe"][: tokens.shape[1]]
        x = jnp.concatenate([jnp.zeros((tokens.shape[0], 1, 64)), x], 1) + p["pos_embed"]
        return jnp.mean(jax.nn.logsumexp((x + jax.nn.relu(x @ p["up"]) @ p["down"]) @ p["wte"].T, -1))

    shapes = {"wte": (5000, 64), "wpe": (1024, 64), "pos_embed": (1, 129, 64), "up": (64, 256), "down": (256, 64)}
    found = name_axes(jax.grad(loss), {name: f32(*shape) for name, shape in shapes.items()}, Struct((8, 128), "int32"))
    assert found.names[0]["wpe"][0].startswith("positions") and found["vocab"].size == 5000
    assert found.names[0]["pos_embed"][1].startswith("positions")


def test_stacked_and_unstacked_arrays_keep_their_axes():
    def step(params, x):
        rows = jnp.stack([x @ params["a"], jnp.tanh(x) @ params["b"]], axis=1)
        return sum(jnp.unstack(rows @ params["c"], axis=1)) @ params["d"]

    params = {"a": f32(32, 96), "b": f32(32, 96), "c": f32(96, 48), "d": f32(48, 32)}
    found = name_axes(step, params, f32(64, 32))
    assert not found.notes
    wide, out = found.names[0]["a"][1], found.names[0]["c"][1]
    assert found.names[0]["b"][1] == found.names[0]["c"][0] == wide != out == found.names[0]["d"][0]
    assert found["batch"].size == 64


def test_a_row_that_is_looked_up_under_vmap_is_of_a_vocabulary():
    """As Equinox's embedding does it: a slice of one row, which `jax.vmap` makes a lookup that keeps a one."""

    def step(params, tokens):
        rows = jax.vmap(jax.vmap(lambda token: params["table"][token]))(tokens)
        return jnp.mean((rows @ params["out"]) ** 2)

    params = {"table": f32(5000, 64), "out": f32(64, 96)}
    tokens = jax.ShapeDtypeStruct((16, 8), jnp.int32)
    for traced in (step, jax.grad(step)):
        found = name_axes(traced, params, tokens)
        assert found.names[0]["table"] == ("vocab", "embed") and found.names[1] == ("batch", "sequence")


def test_heads_are_not_experts_where_nothing_is_called_attention():
    """Products of heads run over the batch, too; those of experts do not, whose weights no example has of its own."""

    def attend(params, x):
        q, k, v = (jnp.einsum("bte,ehd->bthd", x, params[name]) for name in "qkv")
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v)
        return x + jnp.einsum("bthd,hde->bte", mixed, params["o"])

    params = {**{name: f32(64, 4, 16) for name in "qkv"}, "o": f32(4, 16, 64)}
    found = name_axes(attend, params, f32(16, 8, 64))
    assert found.names[0]["q"] == ("embed", "heads", "head_dim") and found["heads"].size == 4

    def choose(params, x):
        wide = jax.nn.relu(jnp.einsum("bsd,edf->bsef", x, params["a"]))
        return jnp.einsum("bsef,efd,bse->bsd", wide, params["b"], jax.nn.softmax(x @ params["r"]))

    params = {"a": f32(4, 64, 128), "b": f32(4, 128, 64), "r": f32(64, 4)}
    assert name_axes(choose, params, f32(16, 8, 64)).names[0]["a"][0] == "experts"


@pytest.mark.parametrize("shape", [(2,), (16, 2)], ids=["one", "each"])
def test_the_numbers_of_raw_keys_are_no_batch(shape):
    def step(params, key, x):
        keys = key if len(shape) == 2 else jax.random.split(key, 16)
        noise = jax.vmap(lambda key: jax.random.normal(key, (64,)))(keys)
        return jnp.mean(((x + noise) @ params["a"] @ params["b"]) ** 2)

    args = ({"a": f32(64, 96), "b": f32(96, 64)}, jax.ShapeDtypeStruct(shape, jnp.uint32), f32(16, 64))
    found = name_axes(step, *args)
    assert found.names[1] == (*["batch"] * (len(shape) - 1), "key_words") and found.names[2][0] == "batch"
    for one in fastest(space_of((step, *args), 8, "v5e"), 8):
        assert all("key_words" not in names for _, names in one.assignments)


def named(make):
    found = name_axes(*make())
    assert not found.notes
    return found.names, sizes(found)


def test_the_width_of_a_diffusion_transformer_is_that_of_its_residual_sums():
    (model, rows, time, label, _), known = named(odd_models.dit)
    block = model["blocks"][0]
    assert known["embed"] == 96 and model["patch"][1] == model["final"][0] == "embed"
    assert block["mlp_in"] == ("embed", "mlp") and block["mlp_out"] == ("mlp", "embed") and known["mlp"] == 384
    assert block["ada"][0] == model["label"][1] != "embed" and model["label"][0] == "classes"
    assert rows[:2] == ("batch", "sequence") and time == label == ("batch",)


def test_one_of_queries_keys_and_values_in_one_dimension_is_a_unit():
    (model, x), known = named(odd_models.fused)
    assert model["w"][1] == atomic(model["w"][1].target, 96) and known[model["w"][1].target] == 3
    assert model["o"] == (atomic("heads", 16), "embed") and x == ("batch", "sequence", "embed")


def test_a_cache_has_a_batch_and_a_sequence():
    (model, cache, token, at), known = named(odd_models.decode)
    assert cache["k"] == cache["v"] == ("layers", "batch", "sequence", "kv_heads", "head_dim")
    assert token == ("batch",) and known["sequence"] == 128 and known["layers"] == 4 and at == ()
    assert model["layers"]["up"] == ("layers", "embed", "mlp")


def test_images_with_their_channels_first():
    (model, images, labels), _ = named(odd_models.channels_first)
    assert images == ("batch", "channels", "height", "width") and labels == ("batch",)
    assert model["stem"][1] == "channels" and model["a"][2].startswith("window") and model["head"][1] == "classes"
    assert model["a"][1] == model["b"][0] == model["down"][1] and model["a"][0] == model["b"][1]


def test_a_router_that_chooses_the_best_scores_experts():
    (model, x), _ = named(odd_models.routed)
    assert model == {
        "choose": ("embed", "experts"), "w1": ("experts", "embed", "mlp"), "w2": ("experts", "mlp", "embed"),
    }  # fmt: skip
    assert x == ("batch", "sequence", "embed")


def test_each_tower_has_a_width():
    (model, image, text), known = named(odd_models.two_towers)
    for tower, size in (("image", 96), ("text", 64)):
        wide, inner = model[tower]["layers"][0]["fc"]
        assert wide.startswith("embed") and inner.startswith("mlp") and known[wide] == size
        assert model[tower]["layers"][1]["out"] == (inner, wide)
    assert model["text"]["tokens"][0] == "vocab" and image[0] == text[0] == "batch"


MESH = jax.sharding.AbstractMesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def constrained(x):
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(MESH, P("a")))


def mapped(x):
    return jax.shard_map(jnp.tanh, mesh=MESH, in_specs=P("a"), out_specs=P("a"))(x)


@custom_partitioning
def partitioned(x):
    return jnp.tanh(x)


partitioned.def_partition(
    lambda mesh, ins, _: (mesh, jnp.tanh, ins[0].sharding, (ins[0].sharding,)), sharding_rule="i j -> i j"
)


def kernel(x):
    return pallas_call(lambda a, b: b.__setitem__(..., jnp.tanh(a[...])), out_shape=f32(*x.shape))(x)


def looped(x):
    return jax.lax.fori_loop(0, jnp.sum(x).astype(int), lambda _, y: jnp.tanh(y), x)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (constrained, "constrains arrays over a mesh of its own: that is not priced"),
        (mapped, "a `shard_map` shards arrays over a mesh of its own: that is not priced"),
        (partitioned, "a `custom_partitioning` shards as its own rule says"),
        (kernel, "`tpu_custom_call` is not known"),
        (looped, "the trips of a loop are not in the program"),
    ],
)
def test_what_is_not_priced_is_noted(change, note):
    def step(p, x):
        return jnp.mean((change(x @ p["up"]) @ p["down"]) ** 2)

    args = {"up": f32(64, 256), "down": f32(256, 64)}, f32(128, 64)
    found = name_axes(step, *args)
    assert note in " ".join(found.notes) and found.notes[0] in str(found)
