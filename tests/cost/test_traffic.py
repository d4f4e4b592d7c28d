import html
import operator
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx import MeshSpec, PathRules, filter_jit, plan
from shardfx._ground.errors import LeafTypeError
from shardfx._step import collectives
from shardfx.cost import Traffic, traffic
from shardfx.errors import MeshError, ProgramError


HLO = Path(__file__).parents[1] / "data" / "hlo"
MESH, SLICED = (
    MeshSpec({"data": 2, "tensor": 4}, dcn={"data": slices}) for slices in (1, 2)
)
MIB, KIB = 2**20, 2**10


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
    assert [row[:compared] for row in listed(read(f"{platform}_kinds"))] == [
        row[:compared] for row in sorted(right)
    ]


@pytest.mark.parametrize("platform, itemsize", [("cpu", 4), ("tpu", 2), ("gpu", 4)])
def test_a_loop_in_a_loop_counts_as_often_as_it_runs(platform, itemsize):
    # Three layers in each of two microbatches; the TPU's compiler makes the weights
    # bf16 before it gathers them. A GPU begins the slice of a layer's weight
    # (`fusion-start`), and gathers what is there when it ends.
    sent = read(f"{platform}_nested_loops")
    row, *others = sent.rows
    assert listed(sent)[0] == (
        "all-gather",
        ("tensor",),
        6 * 256 * 256 * itemsize * 3 // 4,
        6,
        "w",
    )
    assert [(row.kind, row.wire_bytes) for row in others] == [("all-reduce", 4)] * (
        platform == "gpu"
    )
    assert (
        row.source is not None
        and row.source.file == "/home/me/step.py"
        and len(row.stack) > 1
    )
    assert row.source.function.startswith("nested")
    assert (row.group_size, row.dtype) == (4, "f32" if itemsize == 4 else "bf16")


@pytest.mark.parametrize("name, itemsize", [("cpu_branches", 4), ("tpu_branches", 2)])
def test_loops_without_an_end_and_branches_say_so(name, itemsize):
    sent = read(name)
    half = 1024 * 1024 * itemsize // 2
    calls = {(row.kind, row.calls): row.wire_bytes for row in sent.rows}
    assert calls[("all-to-all", None)] == half // 2
    assert calls[("all-gather", 1)] == half and calls[("all-gather", 0)] == 0
    assert sum(row.calls is None for row in sent.rows) == 2
    assert sent.wire_bytes == 2 * (half // 2) + half + itemsize
    text = str(sent)
    assert "the trips of a loop are not known and count once: %while" in text
    assert "the one that sends most counts" in text


def test_permutes_of_a_windowed_product_have_its_kind():
    sent = read("tpu_windowed_product")
    activations = 4 * 1024 * 2048 * 2  # of one group of data
    assert sent.by("kind") == {
        "all-gather": 2 * activations * 3 // 4,
        # One more than the four pieces of a ring.
        "reduce-scatter": (5 * activations // 4),
        "all-reduce": 2 * 2048 * 2048 * 2 * 2 // 2 + 7,
    }
    assert [row.windowed for row in sent.rows if row.kind == "reduce-scatter"] == [
        True
    ] * 5
    assert "reduce-scatter (windowed)" in str(sent)


@pytest.mark.parametrize(
    "name, itemsize", [("cpu_gathered_weights", 4), ("tpu_gathered_weights", 2)]
)
def test_gathers_and_gradients_name_their_weight(name, itemsize):
    # The TPU's program names one gather in three fusions, and lists the devices of a
    # group out of order.
    sent, weight = read(name), 2048 * 8192 * itemsize
    gathers = {
        row.leaf: (row.axes, row.wire_bytes)
        for row in sent.rows
        if row.kind == "all-gather"
    }
    assert gathers == {leaf: (("tensor",), weight * 3 // 4) for leaf in ("up", "down")}
    (sums,) = [
        row for row in sent.rows if row.kind == "all-reduce" and row.wire_bytes > KIB
    ]
    assert {leaf: count for leaf, count in sums.shares if leaf} == {
        leaf: 2 * weight * 7 // 8 for leaf in ("up", "down")
    }
    assert sent.by("leaf")["up"] == weight * 3 // 4 + 2 * weight * 7 // 8


def one(line, n):
    """The text of a program of one instruction. The groups of a collective have device
    numbers by default.
    """
    if "replica_groups=" in line and "channel_id" not in line:
        is_flat = any(
            kind in line for kind in ("all-gather", "all-reduce", "reduce-scatter")
        )
        line += (
            ", channel_id=1, use_global_device_ids=true"
            if is_flat
            else ", channel_id=1"
        )
    if "source_target_pairs=" in line and "channel_id" not in line:
        line += ", channel_id=1"
    return (
        f"HloModule m, num_partitions={n}\n\nENTRY %main (p: f32[4]) -> f32[4] {{\n "
        f" {line}\n}}\n"
    )


PAIRS = (
    "channel_id=1,"
    " frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2},{2,3}}}"
)
RING = "channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
ALL = "channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true"


@pytest.mark.parametrize(
    "line, devices, right",
    [
        (
            (
                "%a = (f32[4,2]{1,0}, f32[4,2]{1,0}) all-to-all(%x, %y),"
                " replica_groups={{0,3},{1,2}}"
            ),
            4,
            32,
        ),
        (
            (
                "%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['q'=2,'r'=8]"
                " {'q','r':(1)2}"
            ),
            16,
            12,
        ),
        (
            (
                "%c = (f32[2], f32[2], u32[], u32[]) collective-permute-start(%x),"
                " source_target_pairs={{0,1}}"
            ),
            2,
            4,
        ),
        (
            (
                "%s = (f32[8]{0}, s32[4]{0}) all-reduce-start(%x, %y),"
                " replica_groups=[1,4]<=[4]"
            ),
            4,
            72,
        ),
        (
            "%r = s4[8]{0} reduce-scatter(%x), replica_groups={{0,1}}, to_apply=%add",
            2,
            4,
        ),
        (
            (
                "%h = (f32[8]{0}, u32[], token[]) recv(%t), channel_id=3,"
                " is_host_transfer=true"
            ),
            2,
            0,
        ),
        # What a GPU begins gives out its operands, then its results.
        (
            (
                "%s = ((f32[64]{0}), f32[16]{0}) reduce-scatter-start(%x),"
                " replica_groups=[1,4]<=[4], to_apply=%add"
            ),
            4,
            192,
        ),
        (
            (
                "%s = ((f32[2], s8[3]), (f32[8], s8[12])) all-gather-start(%x, %y),"
                " replica_groups=[1,4]<=[4]"
            ),
            4,
            33,
        ),
        (
            (
                "%s = ((f32[8]{0}), f32[8]{0}, u32[]) all-to-all-start(%x),"
                " replica_groups=[2,2]<=[4]"
            ),
            4,
            16,
        ),
        (
            (
                "%s = (bf16[8]{0:T(8,128)(2,1)S(1)}, bf16[32]{0}) all-gather-start(%x),"
                " replica_groups=[1,4]<=[4]"
            ),
            4,
            48,
        ),
        (
            (
                "%b = ((f32[8]{0}), f32[8]{0}) collective-broadcast-start(%x),"
                " replica_groups={{0,1,2,3}}"
            ),
            4,
            24,
        ),
        (
            (
                "%a = ((s8[16]{0}, s8[16]{0}), s8[16]{0}) ragged-all-to-all-start(%x,"
                " %y), replica_groups={}"
            ),
            4,
            12,
        ),
        ("%g = f4e2m1fn[4,8]{1,0} all-gather(%p), replica_groups=[1,4]<=[4]", 4, 12),
        ("%g = f8e4m3fn[32]{0} all-gather(%p), replica_groups=[1,4]<=[4]", 4, 24),
        ("%g = c64[4]{0} all-gather(%p), replica_groups=[1,4]<=[4]", 4, 24),
        (
            (
                "%r = (f32[8]{0}, token[]) all-reduce(%x, %t), replica_groups={{0,1}},"
                " to_apply=%add"
            ),
            2,
            32,
        ),
        ("%g = f32[0,4]{1,0} all-gather(%p), replica_groups=[1,4]<=[4]", 4, 0),
        # What a name that a user gives looks like is no attribute.
        (
            (
                "%r = f32[64] add(%t, %t),"
                ' metadata={op_name="jit(f)/body=x/channel_id=3/add"}'
            ),
            4,
            0,
        ),
        (
            (
                f"%r = f32[64] all-gather(%t), {ALL},"
                ' metadata={op_name="jit(f)/replica_groups={{0}}/add"}'
            ),
            4,
            192,
        ),
        # Texts without percent signs, and sizes that have a bound.
        ("r.1 = f32[8]{0} all-reduce(f32[8]{0} p.1), replica_groups=[1,4]<=[4]", 4, 48),
        ("%r = f32[<=8,2]{1,0} all-gather(%x), replica_groups=[1,4]<=[4]", 4, 48),
        # An all-reduce in a computation of its own, begun: its operands come first.
        (
            "%r = ((f32[8]), f32[8]) all-reduce-start(%t), replica_groups=[1,4]<=[4]",
            4,
            48,
        ),
        # Several operands, begun; and slices of larger arrays.
        (
            (
                "%r = ((f32[4], s8[8]), (f32[4], s8[8]), u32[], u32[])"
                f" collective-permute-start(%x, %y), {RING}"
            ),
            4,
            24,
        ),
        (
            (
                f"%r = f32[64,8]{{1,0}} collective-permute(%x, %y, %i, %j), {RING},"
                " slice_sizes={{4,8}}"
            ),
            4,
            128,
        ),
        (
            (
                f"%r = (f32[9], s8[9]) collective-permute(%x, %y), {RING},"
                " slice_sizes={{2},{3}}"
            ),
            4,
            11,
        ),
        # A permute that a GPU's compiler wrote as a send and a receive.
        (f"%r = (f32[64], u32[], token[]) recv(%t), {PAIRS}", 4, 192),
        (f"%r = (f32[64], u32[], token[]) send(%x, %t), {PAIRS}", 4, 0),
        (
            (
                '%r = f32[64] custom-call(%t), custom_call_target="k",'
                ' backend_config={"has_communication": false}'
            ),
            4,
            0,
        ),
    ],
)
def test_bytes_of_one_instruction(line, devices, right):
    assert traffic(one(line, devices)).wire_bytes == right


@pytest.mark.parametrize(
    "line, right",
    [
        (
            (
                "%g = f32[4,4]{1,0} all-gather(%p),"
                " replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}"
            ),
            0,
        ),
        (
            (
                "%g = f32[4,4]{1,0} all-gather(%p),"
                " replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}"
            ),
            32,
        ),
        (
            (
                "%g = f32[4,4]{1,0} all-gather(%p),"
                " replica_groups={{0,1,4,5},{2,3,6,7}}, dimensions={0}"
            ),
            16,
        ),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=2,'q'=4] {'p'}", 8),
        (
            (
                "%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=4,'q'=2],"
                " device_ids=([2,4]T(1,0)) {'q'}"
            ),
            8,
        ),
        (
            (
                "%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=4,'q'=2],"
                " device_ids=([2,4]T(1,0)) {'p'}"
            ),
            0,
        ),
        (
            (
                "%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=8],"
                " device_ids=(0,4,1,5,2,6,3,7) {'p':(4)2}"
            ),
            8,
        ),
        (
            (
                "%c = f32[2]{0} collective-permute(%x),"
                " source_target_pairs={{0,4},{4,0},{1,2},{2,1}}"
            ),
            2,
        ),
        (
            (
                "%r = f32[8]{0} all-reduce(%x), replica_groups={{0,1,4,5},{2,3,6,7}},"
                " to_apply=%add"
            ),
            16,
        ),
        (
            (
                "%r = f32[8]{0} reduce-scatter(%x),"
                " replica_groups={{0,1,4,5},{2,3,6,7}}, to_apply=%add"
            ),
            32,
        ),
    ],
)
def test_bytes_between_two_slices(line, right):
    (row,) = traffic(one(line, 8), SLICED).rows
    assert row.dcn_bytes == right


def test_a_kind_with_pairs_that_is_added_is_read_by_its_pairs(monkeypatch):
    permute = collectives.KINDS["collective-permute"]
    monkeypatch.setattr(
        collectives, "KINDS", {**collectives.KINDS, "all-scan": permute}
    )
    line = "%c = f32[8]{0} all-scan(%x), source_target_pairs={{0,1},{1,2},{2,3}}"
    (added,), (permuted,) = (
        traffic(one(text, 4)).rows
        for text in (line, line.replace("all-scan", "collective-permute"))
    )
    assert added.kind == "all-scan" and added.wire_bytes == permuted.wire_bytes == 24


@pytest.mark.parametrize(
    "type_, target, kind, wire, axes",
    [
        (
            "ONE_TO_ONE",
            "{{100000->200000},{200000->100000}}",
            "collective-permute",
            8 * 4 * 2 / 8,
            ("data",),
        ),
        ("ALL_REDUCE", '"{1,2}x{0:3}"', "all-reduce", 2 * 8 * 4 / 2, ("data",)),
        ("ALL_GATHER", '"{1,2}x{0,2:3}"', "all-gather", 8 * 4 / 2 * 6 / 8, ("data",)),
        (
            "REDUCE_SCATTER",
            "{{100000,200001},{100001,200000}}",
            "reduce-scatter",
            8 * 4 * 4 / 8,
            ("data", "tensor"),
        ),
        (
            "ALL_TO_ALL",
            "{{100000,200000},{100001,200001}}",
            "all-to-all",
            8 * 4 / 2 * 4 / 8,
            ("data",),
        ),
    ],
)
def test_transfers_between_the_hosts_of_slices(type_, target, kind, wire, axes):
    # The text is that of one slice, whose four devices it counts.
    line = (
        "%r = (f32[8]{0}, u32[], token[]) recv(%t), channel_id=1,"
        " is_host_transfer=true, "
        f'frontend_attributes={{_xla_megascale_target={target},_xla_megascale_transfer_type="{type_}"}}'
    )
    (row,) = traffic(one(line, 4), SLICED).rows
    assert (row.kind, row.wire_bytes, row.dcn_bytes, row.axes) == (
        kind,
        wire,
        wire,
        axes,
    )
    bare = traffic(one(line, 4))
    assert bare.devices == 8 and bare.dcn_bytes == wire


LOOP = """HloModule m, num_partitions=4

%apart (p: f32[64]) -> f32[16] {
  %p = f32[64]{0} parameter(0)
  ROOT %rs = f32[16]{0} reduce-scatter(%p), channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true
}

%body (c: (s32[], f32[64])) -> (s32[], f32[64]) {
  %c = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[64]{0} get-tuple-element(%c), index=1
  %s = ((f32[64]{0}), f32[16]{0}) async-start(%x), calls=%apart
  %d = f32[16]{0} async-done(%s), calls=%apart
  %g = (f32[16], f32[64]) all-gather-start(%d), channel_id=2, replica_groups=[1,4]<=[4], use_global_device_ids=true
  %e = f32[64]{0} all-gather-done(%g)
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[64]{0}) tuple(%j, %e)
}

%condition (c: (s32[], f32[64])) -> pred[] {
  %c = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(COUNT)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0), metadata={op_name="x"}
  %zero = s32[] constant(2)
  %t = (s32[], f32[64]{0}) tuple(%zero, %x)
  %w = (s32[], f32[64]{0}) while(%t), condition=%condition, body=%body
  ROOT %r = f32[64]{0} get-tuple-element(%w), index=1
}
"""
ADDED = "%j = s32[] add(%i, %one)"
# A TPU's compiler keeps the counter of some loops in another memory.
MOVED = [
    "%k = s32[] add(%i, %one)",
    "%c0 = (s32[], s32[], u32[]) copy-start(%k)",
    "%j = s32[] copy-done(%c0)",
]


def test_asynchronous_operations_on_a_gpu_count_once_a_trip():
    for added in (
        ADDED,
        "\n  ".join(MOVED),
        f"{MOVED[0]}\n  %j = s32[] copy(%k)",
        "%j = s32[] add(%one, %i)",
    ):
        sent = traffic(LOOP.replace(ADDED, added).replace("COUNT", "7"))
        assert {row.kind: (row.calls, row.wire_bytes) for row in sent.rows} == {
            "reduce-scatter": (5, 5 * 3 * 64),
            "all-gather": (5, 5 * 3 * 64),
        }
    # Five trips ask six times.
    asked = LOOP.replace("%n =", f"%q = f32[64] all-reduce(%x), {ALL}\n  %n =").replace(
        "COUNT", "7"
    )
    assert [
        (row.kind, row.wire_bytes) for row in traffic(asked).rows if row.calls == 6
    ] == [("all-reduce", 6 * 384)]
    counted_loop = LOOP.replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"9"}}'
    )
    assert {row.calls for row in traffic(counted_loop).rows} == {9}


TURNS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "NE": operator.ne,
}


@given(
    st.sampled_from(sorted(TURNS)),
    st.integers(-6, 9),
    st.integers(-3, 3),
    st.sampled_from(["add", "subtract"]),
)
@settings(deadline=None)
def test_a_loop_runs_as_often_as_its_counter_says(direction, stop, step, update):
    text = LOOP.replace("direction=LT", f"direction={direction}").replace(
        "COUNT", str(stop)
    )
    text = text.replace("%one = s32[] constant(1)", f"%one = s32[] constant({step})")
    text = text.replace("s32[] add", f"s32[] {update}")
    counter, trips = 2, 0
    while TURNS[direction](counter, stop) and trips < 50:
        counter, trips = counter + (step if update == "add" else -step), trips + 1
    assert {row.calls for row in traffic(text).rows} == {trips if trips < 50 else None}


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
    mesh = MeshSpec({"data": 2, "tensor": 4}).build(jax.devices())
    model = eqx.nn.MLP(16, 16, 64, 2, key=jax.random.key(0))
    plan_of_layer = plan(
        model, mesh, paths=PathRules([("weight", P("tensor")), ("bias", P())])
    )
    x = jax.ShapeDtypeStruct(
        (8, 16), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )

    def apply(model, x):
        return jax.vmap(model)(x)

    structs = eqx.combine(plan_of_layer.off().structs, model)
    lowered = filter_jit(
        apply, in_shardings=(plan_of_layer, x.sharding), out_shardings=x.sharding
    ).lower(structs, x)
    first, second = traffic(lowered), traffic(lowered.compile())
    assert first == second and first.wire_bytes > 0
    assert {row.axes for row in first.rows} == {("tensor",)}
    assert {row.leaf for row in first.rows if row.leaf} <= {
        leaf.path for leaf in plan_of_layer.leaves
    }


def test_the_tables_of_a_step_and_of_the_difference_of_two():
    cpu, tpu = read("cpu_gathered_weights"), read("tpu_gathered_weights")
    difference = cpu - tpu
    assert difference.wire_bytes == cpu.wire_bytes - tpu.wire_bytes
    assert (tpu - cpu).wire_bytes == -difference.wire_bytes
    assert "+112.0 MiB" in str(difference).splitlines()[1] and str(difference).endswith(
        "in all."
    )
    assert str(cpu - cpu) == "the same traffic"
    for shown in (cpu, difference, Traffic((), 4)):
        assert html.unescape(shown._repr_html_()) == f"<pre>{shown}</pre>"
    assert (
        sum(tpu.by("axes").values()) == sum(tpu.by("source").values()) == tpu.wire_bytes
    )
    assert [row.wire_bytes for row in tpu.rows] == sorted(
        (row.wire_bytes for row in tpu.rows), reverse=True
    )
    lines = str(tpu).splitlines()
    assert (
        lines[0].split()
        == "bytes/step kind axes group calls array pass leaf source".split()
    )
    assert (
        "112.0 MiB  all-reduce  data x tensor" in lines[1]
        and "step.py:28 mlp2" in lines[1]
    )
    assert lines[-1] == "160.0 MiB enter each of 8 devices in a step."
    assert str(Traffic((), 2)) == "no traffic: a step on 2 devices sends nothing."


def test_rows_have_pass_and_shape_and_lines_stay_together():
    mesh = MeshSpec({"fsdp": 4}).build(jax.devices()[:4])
    rows = NamedSharding(mesh, P("fsdp"))

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows)] * 2
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=rows)
    sent = traffic(
        jax.jit(jax.grad(loss), out_shardings=[rows, rows]).lower(params, x).compile(),
        mesh,
    )
    described = {(row.kind, row.arrays, row.phase) for row in sent.rows}
    assert ("all-gather", ("f32[64,64]",), "forward") in described
    assert {phase for kind, _, phase in described if kind != "all-gather"} == {
        "backward"
    }
    assert (
        str(sent).count("test_traffic.py:") == len(sent.by("source")) < len(sent.rows)
    )


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
    assert sorted((row.kind, row.wire_bytes, row.calls) for row in sent.rows) == sorted(
        right
    )


def test_what_lays_a_result_out_has_the_line_that_made_it():
    gather = (
        "  ROOT %g = f32[4,16] all-gather(%p), replica_groups={{0,1}}, channel_id=1,"
        " use_global_device_ids=true\n}"
    )
    parameter = "  %p = f32[2,16]{1,0} parameter(0), metadata={stack_frame_id=1}\n"
    text = (
        SCATTER[: SCATTER.index("%all-reduce-scatter.1 (")]
        + "ENTRY %main (p: f32[2,16]) -> f32[4,16] {\n"
    )
    (row,) = traffic(text + parameter + gather).rows
    assert row.source is not None and (row.source.line, row.source.function) == (
        7,
        "mlp",
    )


def test_a_permute_is_a_window_only_where_all_devices_take_part():
    line = (
        "%c = f32[8] collective-permute(%x), source_target_pairs={PAIRS},"
        ' metadata={op_name="jit(f)/dot_general"}'
    )
    (ring,) = traffic(one(line.replace("PAIRS", "{0,1},{1,0},{2,3},{3,2}"), 4)).rows
    assert ring.windowed and ring.kind != "collective-permute"
    (row,) = traffic(one(line.replace("PAIRS", "{0,0},{1,2},{2,1},{3,3}"), 4)).rows
    assert (row.kind, row.windowed, row.wire_bytes) == ("collective-permute", False, 16)


SCATTER = """HloModule m, num_partitions=8

FileNames
1 "/home/me/step.py"

FunctionNames
1 "mlp"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%all-reduce-scatter.1 (input.9: bf16[8,16]) -> bf16[2,16] {
  %input.9 = bf16[8,16]{1,0} parameter(0)
  %all-reduce.84 = bf16[8,16] all-reduce(%input.9), channel_id=3, replica_groups=[2,4]<=[8], use_global_device_ids=true
  %constant.1 = u32[] constant(0)
  ROOT %dynamic-slice.533 = bf16[2,16]{1,0} dynamic-slice(%all-reduce.84, %constant.1, %constant.1)
}

ENTRY %main (p: bf16[8,16]) -> bf16[2,16] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %f = bf16[2,16]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1, metadata={stack_frame_id=1}
}
"""


def test_a_sum_of_which_a_fusion_keeps_a_part_is_scattered():
    (row,) = traffic(SCATTER, MESH).rows
    assert (row.kind, row.axes, row.wire_bytes, row.group_size) == (
        "reduce-scatter",
        ("tensor",),
        2 * 16 * 2 * 3,
        4,
    )
    assert row.source is not None and (row.source.line, row.source.function) == (
        7,
        "mlp",
    )


# What GPUs send, from programs that XLA compiled for eight H200, with JAX 0.12 and no
# GPU at hand.
def test_a_scattered_gradient_is_of_its_weight():
    sent, weight = read("gpu_gathered_weights"), 2048 * 8192 * 4
    sums = 2 * (weight // 4) // 2
    assert [row for row in listed(sent) if row[4]] == [
        ("all-gather", ("tensor",), weight * 3 // 4, 1, "down"),
        ("all-gather", ("tensor",), weight * 3 // 4, 1, "up"),
        ("all-reduce", ("data",), sums, 1, "down"),
        ("all-reduce", ("data",), sums, 1, "up"),
        ("reduce-scatter", ("tensor",), weight * 3 // 4, 1, "down"),
        ("reduce-scatter", ("tensor",), weight * 3 // 4, 1, "up"),
    ]
    # The activations.
    assert sent.by("leaf")[None] == 2 * (1024 // 2 * 2048 * 4 * 3 // 4)


def test_weights_that_are_gathered_together_have_their_own_bytes():
    # The compiler joins what it gathers of a layer, and what it scatters, into one
    # collective of two arrays.
    sent = read("gpu_scanned_layers")
    # Of a layer's weight that is whole along data, what one of two devices lacks.
    half = 1024 * 256 * 2 // 2
    for row in sent.rows:
        if row.kind != "all-reduce":
            assert row.calls == 6 and row.axes == ("data",) and row.dtype == "bf16"
            assert dict(row.shares) == {"up": 6 * half, "down": 6 * half}
    assert sent.by("leaf") == {"up": 3 * 6 * half, "down": 3 * 6 * half, None: 9 * MIB}


def test_loops_without_a_known_end_count_once_a_trip():
    assert listed(read("gpu_branches")) == [
        ("all-gather", ("tensor",), 1024 * 1024 * 4 * 3 // 4, 1, "w"),
        ("all-reduce", ("data",), 4, None, None),
    ]
    # Six of eight devices receive a shard of 256 x 256 in each of five trips.
    assert listed(read("gpu_permute_sent_and_received")) == [
        ("collective-permute", ("tensor",), 5 * 256 * 256 * 4 * 6 // 8, 5, None)
    ]


@pytest.mark.parametrize(
    "name, across",
    [("gpu_kinds", (32 + 4) * 1024), ("gpu_gathered_weights", 2 * 16 * MIB)],
)
def test_what_crosses_nodes(name, across):
    # Each of two nodes holds a group of `tensor`. Of what all eight scatter, a node
    # takes in what four devices keep.
    sent = read(name, SLICED)
    assert sent.wire_bytes == read(name).wire_bytes
    assert sent.dcn_bytes == across and all(
        "data" in row.axes for row in sent.rows if row.dcn_bytes
    )
