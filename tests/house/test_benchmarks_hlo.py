from fractions import Fraction

import pytest

from benchmarks._hlo import wire_bytes


@pytest.mark.parametrize(
    "line, devices, right",
    [
        ("%g = f32[4,4]{1,0} all-gather(%p), replica_groups={{0,3},{1,2},{4,7},{5,6}}, dimensions={0}", 8, 32),
        ("%g = bf16[8,4]{1,0:T(8,128)(2,1)} all-gather(%p), replica_groups=[2,4]<=[4,2]T(1,0)", 8, 48),
        ("%a = (f32[4,2]{1,0}, f32[4,2]{1,0}) all-to-all(%x, %y), replica_groups={{0,3},{1,2}}", 4, 32),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=1,'q'=2,'r'=4] {'q'}", 8, 8),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['q'=2,'r'=8] {'q','r':(1)2}", 16, 12),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups={}", 4, 12),
        ("ROOT %c = f32[2]{0} collective-permute(%x), source_target_pairs={{0,0},{1,2},{2,1}}", 4, 4),
        ("%c = (f32[2], f32[2], u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}", 2, 4),
        ("%s = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4]", 4, 24),
        ("%d = f32[8]{0} all-gather-done(%s)", 4, 0),
        ("%r = pred[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%or", 2, 8),
        ("%r = s4[8]{0} reduce-scatter(%x), replica_groups={{0,1}}, to_apply=%add", 2, 4),
        ("%f = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_all-gather", 2, 0),
    ],
)
def test_traffic_of_one_instruction(line, devices, right):
    assert wire_bytes(f"ENTRY %main {{\n  {line}\n}}\n", devices) == Fraction(right)


LOOP = """
%condition.1 (state.1: (s32[], f32[8])) -> pred[] {
  %state.1 = (s32[], f32[8]) parameter(0)
  %limit.1 = s32[]{:T(128)} constant(7)
  %index.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less.1 = pred[] compare(%index.1, LIMIT), direction=LT
}

%body.1 (state.2: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state.2 = (s32[], f32[8]) parameter(0)
  %x = f32[8] get-tuple-element(%state.2), index=1
  %y = f32[8] all-to-all(%x), replica_groups={{0,1}}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8]) while(%start), condition=%condition.1, body=%body.1
  %last = f32[8] all-to-all(%z), replica_groups={{0,1}}
}
"""


def test_traffic_in_a_loop_counts_as_often_as_the_loop_runs():
    assert wire_bytes(LOOP.replace("LIMIT", "%limit.1"), 2) == 8 * 16
    with pytest.raises(ValueError, match="how often does this loop run"):
        wire_bytes(LOOP.replace("LIMIT", "%other.1"), 2)


@pytest.mark.parametrize(
    "line, right",
    [
        ("%g = f32[4,4]{1,0} all-gather(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", 0),
        ("%g = f32[4,4]{1,0} all-gather(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}", 32),
        ("%g = f32[4,4]{1,0} all-gather(%p), replica_groups={{0,1,4,5},{2,3,6,7}}, dimensions={0}", 16),
        ("%g = f32[4,4]{1,0} all-gather(%p), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", 32),
        ("%g = f32[4,4]{1,0} all-gather(%p), replica_groups=[4,2]<=[8], dimensions={0}", 0),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=2,'q'=4] {'p'}", 8),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=2,'q'=4] {'q'}", 0),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=8] {'p':(1)2}", 8),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=8] {'p':(2)2}", 0),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups={}", 8),
        ("%c = f32[2]{0} collective-permute(%x), source_target_pairs={{0,4},{4,0},{1,2},{2,1}}", 2),
        ("%r = f32[8]{0} all-reduce(%x), replica_groups={{0,1,4,5},{2,3,6,7}}, to_apply=%add", 16),
        ("%r = f32[8]{0} reduce-scatter(%x), replica_groups={{0,1,4,5},{2,3,6,7}}, to_apply=%add", 32),
    ],
)
def test_traffic_between_two_slices_of_four_devices(line, right):
    assert wire_bytes(line, 8, [0, 0, 0, 0, 1, 1, 1, 1]) == Fraction(right)


_RECV = (
    "%recv = (f32[{size}]{{0}}, u32[], token[]) recv(%t), is_host_transfer=true, frontend_attributes={{{attributes}}}"
)
_TARGET = '_xla_host_transfer_rendezvous="r",_xla_megascale_target={target},_xla_megascale_transfer_type="X"'


@pytest.mark.parametrize(
    "size, target, wire, dcn",
    [
        (4, '"{1,2}x{0:3}"', 8, 8),
        (8, "{{100000,100001,200000,200001},{100002,100003,200002,200003}}", 24, 16),
        (8, "{{100000->200000},{100001->100001},{200000->100000},{200001->200002}}", 12, 8),
    ],
)
def test_traffic_through_the_hosts_of_two_slices(size, target, wire, dcn):
    line = _RECV.format(size=size, attributes=_TARGET.format(target=target))
    branch = "%c = f32[2]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0},{2,2},{3,3}}"
    text = f"%branch {{\n  {branch}\n}}\n\nENTRY %main {{\n  {line}\n  {branch}\n}}\n"
    # Two of four devices move 8 bytes in each slice in the entry; a branch is of one slice.
    assert wire_bytes(text, 8) == Fraction(wire) + 4 + 2
    assert wire_bytes(text, 8, [0, 0, 0, 0, 1, 1, 1, 1]) == Fraction(dcn)


@pytest.mark.parametrize(
    "line",
    [
        "%m = f32[8]{0} all-mix(%x), replica_groups={{0,1}}, dimensions={0}",
        '%m = f32[8]{0} custom-call(%x), channel_id=3, custom_call_target="ship"',
        "%r = (f32[8]{0}, u32[], token[]) recv(%t), channel_id=2",
        "%g = f32[4,4]{1,0} all-gather(%p), replica_groups=V3[4,2]<=[8], dimensions={0}",
    ],
)
def test_traffic_that_is_not_known_is_an_error(line):
    with pytest.raises(ValueError, match="unknown"):
        wire_bytes(line, 8)
    assert wire_bytes("%d = f32[8]{0} all-gather-done(%s), channel_id=1", 8) == 0
