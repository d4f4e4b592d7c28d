from fractions import Fraction

import pytest

from shardfx._hlo import wire_bytes


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


@pytest.mark.parametrize(
    "line, right",
    [
        ("%g = f32[4,4]{1,0} all-gather(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", 0),
        ("%g = f32[4,4]{1,0} all-gather(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}", 32),
        ("%g = f32[4,4]{1,0} all-gather(%p), replica_groups={{0,1,4,5},{2,3,6,7}}, dimensions={0}", 32),
        ("%g = f32[4,4]{1,0} all-gather(%p), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", 32),
        ("%g = f32[4,4]{1,0} all-gather(%p), replica_groups=[4,2]<=[8], dimensions={0}", 0),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=2,'q'=4] {'p'}", 8),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=2,'q'=4] {'q'}", 0),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=8] {'p':(1)2}", 8),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups=mesh['p'=8] {'p':(2)2}", 0),
        ("%a = s8[16]{0} all-to-all(%x), replica_groups={}", 8),
        ("%c = f32[2]{0} collective-permute(%x), source_target_pairs={{0,4},{4,0},{1,2},{2,1}}", 2),
        ("%r = f32[8]{0} all-reduce(%x), replica_groups={{0,1,4,5},{2,3,6,7}}, to_apply=%add", 32),
        ("%r = f32[8]{0} reduce-scatter(%x), replica_groups={{0,1,4,5},{2,3,6,7}}, to_apply=%add", 64),
    ],
)
def test_traffic_between_two_slices_of_four_devices(line, right):
    assert wire_bytes(line, 8, [0, 0, 0, 0, 1, 1, 1, 1]) == Fraction(right)
