import html
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx import MeshSpec, PathRules, filter_jit, plan
from shardfx.cost import Traffic, traffic
from shardfx.errors import LeafTypeError, MeshError, ProgramError
from tests.cost.compiled_texts import MESH, SLICED, one


HLO = Path(__file__).parents[1] / "data" / "hlo"


MIB = 2**20
KIB = 2**10


def read(name, mesh=MESH):
    return traffic((HLO / f"{name}.txt").read_text(), mesh)


def listed(sent):
    return sorted(
        (row.kind, row.axes, row.wire_bytes, row.calls, row.leaf) for row in sent.rows
    )


# Counted by hand from the shapes. A gather of n pieces brings (n - 1) / n of the
# result, a reduction twice that, a reduction that scatters (n - 1) results, an exchange
# (n - 1) / n, a permute the whole.
@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_every_kind(platform):
    scattered = ("reduce-scatter", ("data", "tensor"), 8 * 128 * 4 * 7, 1, None)
    whole = ("all-reduce", ("data", "tensor"), 2 * 64 * 128 * 4 * 7 // 8, 1, None)
    right = [
        ("all-gather", ("data",), 64 * 128 * 4, 1, "x"),
        ("all-reduce", ("tensor",), 2 * 64 * 128 * 4 * 3 // 4, 1, None),
        ("all-to-all", ("tensor",), 64 * 128 * 4 * 3 // 4, 1, "x"),
        ("collective-permute", ("tensor",), 64 * 128 * 4, 1, "x"),
        # The TPU's compiler reduces whole where it could scatter.
        (whole if platform == "tpu" else scattered),
    ]
    compared = 4 if platform == "gpu" else 5
    rows = [row[:compared] for row in listed(read(f"{platform}_kinds"))]
    assert rows == [row[:compared] for row in sorted(right)]


@pytest.mark.parametrize("platform, itemsize", [("cpu", 4), ("tpu", 2), ("gpu", 4)])
def test_a_loop_in_a_loop_counts_as_often_as_it_runs(platform, itemsize):
    # Three layers in each of two microbatches; the TPU's compiler makes the weights
    # bf16 before it gathers them. A GPU begins the slice of a layer's weight
    # (`fusion-start`), and gathers what is there when it ends.
    sent = read(f"{platform}_nested_loops")
    row, *others = sent.rows
    expected = (
        "all-gather",
        ("tensor",),
        6 * 256 * 256 * itemsize * 3 // 4,
        6,
        "w",
    )
    assert listed(sent)[0] == expected
    actual = [(row.kind, row.wire_bytes) for row in others]
    assert actual == [("all-reduce", 4)] * (platform == "gpu")
    assert row.source is not None
    assert row.source.file == "/home/me/step.py"
    assert len(row.stack) > 1
    assert row.source.function.startswith("nested")
    assert row.group_size == 4
    assert row.dtype == ("f32" if itemsize == 4 else "bf16")


@pytest.mark.parametrize("name, itemsize", [("cpu_branches", 4), ("tpu_branches", 2)])
def test_loops_without_an_end_and_branches_say_so(name, itemsize):
    sent = read(name)
    half = 1024 * 1024 * itemsize // 2
    calls = {(row.kind, row.calls): row.wire_bytes for row in sent.rows}
    assert calls[("all-to-all", None)] == half // 2
    assert calls[("all-gather", 1)] == half
    assert calls[("all-gather", 0)] == 0
    assert sum(row.calls is None for row in sent.rows) == 2
    assert sent.wire_bytes == 2 * (half // 2) + half + itemsize
    text = str(sent)
    assert "the trips of a loop are not known and count once: %while" in text
    assert "the one that sends most counts" in text


def test_permutes_of_a_windowed_product_have_its_kind():
    sent = read("tpu_windowed_product")
    activations = 4 * 1024 * 2048 * 2  # of one group of data
    expected = {
        "all-gather": 2 * activations * 3 // 4,
        # One more than the four pieces of a ring.
        "reduce-scatter": (5 * activations // 4),
        "all-reduce": 2 * 2048 * 2048 * 2 * 2 // 2 + 7,
    }
    assert sent.by("kind") == expected
    windowed = [row.windowed for row in sent.rows if row.kind == "reduce-scatter"]
    assert windowed == [True] * 5
    assert "reduce-scatter (windowed)" in str(sent)


@pytest.mark.parametrize(
    "name, itemsize", [("cpu_gathered_weights", 4), ("tpu_gathered_weights", 2)]
)
def test_gathers_and_gradients_name_their_weight(name, itemsize):
    # The TPU's program names one gather in three fusions, and lists the devices of a
    # group out of order.
    sent = read(name)
    weight = 2048 * 8192 * itemsize
    gathers = {
        row.leaf: (row.axes, row.wire_bytes)
        for row in sent.rows
        if row.kind == "all-gather"
    }
    expected = {leaf: (("tensor",), weight * 3 // 4) for leaf in ("up", "down")}
    assert gathers == expected
    (sums,) = [
        row for row in sent.rows if row.kind == "all-reduce" and row.wire_bytes > KIB
    ]
    expected = {leaf: 2 * weight * 7 // 8 for leaf in ("up", "down")}
    assert {leaf: count for leaf, count in sums.shares if leaf} == expected
    expected = weight * 3 // 4 + 2 * weight * 7 // 8
    assert sent.by("leaf")["up"] == expected


CUT = one("%f = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_all-gather", 2)


@pytest.mark.parametrize(
    "text", ["", "HloModule m", "{}", one("%x = f32[4]{0} add(%a, %b", 2), "\x00", CUT]
)
def test_text_that_is_no_program(text):
    with pytest.raises(ProgramError):
        traffic(text)


def test_what_is_no_program():
    with pytest.raises(LeafTypeError, match="takes a compiled program, not int"):
        traffic(3)
    with pytest.raises(
        MeshError, match="the program runs on 2 devices, and the mesh data=4 has 4"
    ):
        traffic(one("%d = f32[8]{0} add(%s, %s)", 2), MeshSpec({"data": 4}))


def test_compiled_programs_name_axes_and_leaves():
    axes = {"data": 2, "tensor": 4}
    mesh = MeshSpec(axes).build(jax.devices())
    model = eqx.nn.MLP(16, 16, 64, 2, key=jax.random.key(0))
    rules = PathRules([("weight", P("tensor")), ("bias", P())])
    plan_of_layer = plan(model, mesh, paths=rules)
    sharding = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)

    def apply(model, x):
        return jax.vmap(model)(x)

    structs = eqx.combine(plan_of_layer.off().structs, model)
    in_shardings = (plan_of_layer, x.sharding)
    lowered = filter_jit(
        apply, in_shardings=in_shardings, out_shardings=x.sharding
    ).lower(structs, x)
    first = traffic(lowered)
    second = traffic(lowered.compile())
    assert first == second
    assert first.wire_bytes > 0
    assert {row.axes for row in first.rows} == {("tensor",)}
    leaves = {row.leaf for row in first.rows if row.leaf}
    assert leaves <= {leaf.path for leaf in plan_of_layer.leaves}


def test_the_tables_of_a_step_and_of_the_difference_of_two():
    cpu = read("cpu_gathered_weights")
    tpu = read("tpu_gathered_weights")
    difference = cpu - tpu
    assert difference.wire_bytes == cpu.wire_bytes - tpu.wire_bytes
    assert (tpu - cpu).wire_bytes == -difference.wire_bytes
    assert "+112.0 MiB" in str(difference).splitlines()[1]
    assert str(difference).endswith("in all.")
    assert str(cpu - cpu) == "the same traffic"
    for shown in (cpu, difference, Traffic((), 4)):
        assert html.unescape(shown._repr_html_()) == f"<pre>{shown}</pre>"
    total = sum(tpu.by("axes").values())
    expected = sum(tpu.by("source").values())
    assert total == expected == tpu.wire_bytes
    expected = sorted((row.wire_bytes for row in tpu.rows), reverse=True)
    assert [row.wire_bytes for row in tpu.rows] == expected
    lines = str(tpu).splitlines()
    assert (
        lines[0].split()
        == "bytes/step kind axes group calls array pass leaf source".split()
    )
    assert "112.0 MiB  all-reduce  data x tensor" in lines[1]
    assert "step.py:28 mlp2" in lines[1]
    assert lines[-1] == "160.0 MiB enter each of 8 devices in a step."
    assert str(Traffic((), 2)) == "no traffic: a step on 2 devices sends nothing."


def test_rows_have_pass_and_shape_and_lines_stay_together():
    devices = jax.devices()[:4]
    mesh = MeshSpec({"fsdp": 4}).build(devices)
    rows = NamedSharding(mesh, P("fsdp"))

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    struct = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows)
    params = [struct] * 2
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=rows)
    lowered = jax.jit(jax.grad(loss), out_shardings=[rows, rows]).lower(params, x)
    compiled = lowered.compile()
    sent = traffic(
        compiled,
        mesh,
    )
    described = {(row.kind, row.arrays, row.phase) for row in sent.rows}
    assert ("all-gather", ("f32[64,64]",), "forward") in described
    phases = {phase for kind, _, phase in described if kind != "all-gather"}
    assert phases == {"backward"}
    expected = len(sent.by("source"))
    assert str(sent).count("test_traffic.py:") == expected < len(sent.rows)


@pytest.mark.parametrize("name, itemsize", [("cpu_shard_map", 4), ("tpu_shard_map", 2)])
def test_collectives_of_one_channel_are_as_many_as_are_named(name, itemsize):
    # All that a `shard_map` sends by its own word has one channel: two sums and two
    # gathers of the rows of 8 devices, and on the TPU a gather in a loop over two
    # layers.
    sent = read(name, MeshSpec({"x": 8}))
    rows = {4: 8 * 128 * 4, 2: 1024 * 2048 * 2}[itemsize]
    right = [("all-gather", 7 * rows, 1)] * 2 + [
        ("all-reduce", 2 * rows * 7 // 8, 1)
    ] * 2
    if itemsize == 2:
        right = [("all-gather", 2 * 2048 * 2048 * 2 * 7 // 8, 2), *right]
    actual = sorted((row.kind, row.wire_bytes, row.calls) for row in sent.rows)
    assert actual == sorted(right)


# What GPUs send, from programs that XLA compiled for eight H200, with JAX 0.12 and no
# GPU at hand.
def test_a_scattered_gradient_is_of_its_weight():
    sent = read("gpu_gathered_weights")
    weight = 2048 * 8192 * 4
    sums = 2 * (weight // 4) // 2
    rows = [row for row in listed(sent) if row[4]]
    expected = [
        ("all-gather", ("tensor",), weight * 3 // 4, 1, "down"),
        ("all-gather", ("tensor",), weight * 3 // 4, 1, "up"),
        ("all-reduce", ("data",), sums, 1, "down"),
        ("all-reduce", ("data",), sums, 1, "up"),
        ("reduce-scatter", ("tensor",), weight * 3 // 4, 1, "down"),
        ("reduce-scatter", ("tensor",), weight * 3 // 4, 1, "up"),
    ]
    assert rows == expected
    # The activations.
    expected = 2 * (1024 // 2 * 2048 * 4 * 3 // 4)
    assert sent.by("leaf")[None] == expected


def test_weights_that_are_gathered_together_have_their_own_bytes():
    # The compiler joins what it gathers of a layer, and what it scatters, into one
    # collective of two arrays.
    sent = read("gpu_scanned_layers")
    # Of a layer's weight that is whole along data, what one of two devices lacks.
    half = 1024 * 256 * 2 // 2
    for row in sent.rows:
        if row.kind != "all-reduce":
            assert row.calls == 6
            assert row.axes == ("data",)
            assert row.dtype == "bf16"
            expected = {"up": 6 * half, "down": 6 * half}
            assert dict(row.shares) == expected
    expected = {"up": 3 * 6 * half, "down": 3 * 6 * half, None: 9 * MIB}
    assert sent.by("leaf") == expected


def test_loops_without_a_known_end_count_once_a_trip():
    expected = [
        ("all-gather", ("tensor",), 1024 * 1024 * 4 * 3 // 4, 1, "w"),
        ("all-reduce", ("data",), 4, None, None),
    ]
    assert listed(read("gpu_branches")) == expected
    # Six of eight devices receive a shard of 256 x 256 in each of five trips.
    expected = [
        ("collective-permute", ("tensor",), 5 * 256 * 256 * 4 * 6 // 8, 5, None)
    ]
    assert listed(read("gpu_permute_sent_and_received")) == expected


@pytest.mark.parametrize(
    "name, across",
    [("gpu_kinds", (32 + 4) * 1024), ("gpu_gathered_weights", 2 * 16 * MIB)],
)
def test_what_crosses_nodes(name, across):
    # Each of two nodes holds a group of `tensor`. Of what all eight scatter, a node
    # takes in what four devices keep.
    sent = read(name, SLICED)
    assert sent.wire_bytes == read(name).wire_bytes
    assert sent.dcn_bytes == across
    for row in sent.rows:
        if row.dcn_bytes:
            assert "data" in row.axes
