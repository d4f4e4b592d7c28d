import pytest

from shardfx._step import collectives
from shardfx.cost import traffic
from tests.cost.compiled_texts import ALL, MESH, SLICED, one


PAIRS = (
    "channel_id=1,"
    " frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2},{2,3}}}"
)
RING = "channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"


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
    assert added.kind == "all-scan"
    assert added.wire_bytes == permuted.wire_bytes == 24


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
    assert row.kind == kind
    assert row.wire_bytes == wire
    assert row.dcn_bytes == wire
    assert row.axes == axes
    bare = traffic(one(line, 4))
    assert bare.devices == 8
    assert bare.dcn_bytes == wire


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
    assert row.source is not None
    assert row.source.line == 7
    assert row.source.function == "mlp"


def test_a_permute_is_a_window_only_where_all_devices_take_part():
    line = (
        "%c = f32[8] collective-permute(%x), source_target_pairs={PAIRS},"
        ' metadata={op_name="jit(f)/dot_general"}'
    )
    sent = traffic(one(line.replace("PAIRS", "{0,1},{1,0},{2,3},{3,2}"), 4))
    (ring,) = sent.rows
    assert ring.windowed
    assert ring.kind != "collective-permute"
    sent = traffic(one(line.replace("PAIRS", "{0,0},{1,2},{2,1},{3,3}"), 4))
    (row,) = sent.rows
    assert row.kind == "collective-permute"
    assert row.windowed is False
    assert row.wire_bytes == 16


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
    assert row.kind == "reduce-scatter"
    assert row.axes == ("tensor",)
    assert row.wire_bytes == 2 * 16 * 2 * 3
    assert row.group_size == 4
    assert row.source is not None
    assert row.source.line == 7
    assert row.source.function == "mlp"
