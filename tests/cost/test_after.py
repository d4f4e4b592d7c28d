"""What compilers do behind the partitioner: small programs before and after, and compiled ones to the byte."""

import pytest

from shardfx.cost._after import PASSES, as_compiled
from shardfx.cost._collective import collective_of
from shardfx.cost._hlo_text import parse_hlo
from shardfx.cost._runs import runs_of


_ALL = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"
_FOURS = "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true"


def _sent(text, platform):
    """Kind, type, times and bytes of each collective that a step sends after a platform's passes."""
    module = as_compiled(parse_hlo(text), platform)
    found = []
    for name, ways in runs_of(module).items():
        for own in module.computations[name].values():
            if (one := collective_of(own, module.partitions)) is not None:
                found.append((one.kind, one.dtype, sum(way.count for way in ways), int(one.bytes)))
    return sorted(found)


def _entry(*lines):
    return "HloModule step, num_partitions=8\n\nENTRY %main {\n  " + "\n  ".join(lines) + "\n}\n"


def _loop(body):
    """A loop that counts to five and carries a state and an array that it does not change."""
    carried = "(s32[], f32[8,8], f32[8,8])"
    return f"""HloModule step, num_partitions=8

%cond {{
  %c = {carried} parameter(0)
  %i.1 = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}}

%body {{
  %p = {carried} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %s = f32[8,8] get-tuple-element(%p), index=1
  %w = f32[8,8] get-tuple-element(%p), index=2
  {body}
  ROOT %out = {carried} tuple(%next, %new, %w)
}}

ENTRY %main {{
  %x = f32[8,8] parameter(0)
  %y = f32[8,8] parameter(1)
  %zero = s32[] constant(0)
  %begin = {carried} tuple(%zero, %x, %y)
  %loop = {carried} while(%begin), condition=%cond, body=%body
  ROOT %end = f32[8,8] get-tuple-element(%loop), index=1
}}
"""


@pytest.mark.parametrize(
    "groups",
    [
        "replica_groups={{0,1,2,3},{4,5,6,7}}",
        "replica_groups=[2,4]<=[8]",
        "replica_groups=[2,4]<=[2,4]T(0,1)",
        "replica_groups=mesh['a'=2,'b'=4] {'b'}",
    ],
)
def test_all_forms_of_groups_are_equal(groups):
    text = _entry(
        "%x = f32[8,4] parameter(0)",
        f"%g.1 = f32[32,4] all-gather(%x), channel_id=1, {groups}, dimensions={{0}}, use_global_device_ids=true",
        f"%g.2 = f32[32,4] all-gather(%x), {_FOURS.replace('=1,', '=2,', 1)}, dimensions={{0}}",
        "ROOT %t = (f32[32,4], f32[32,4]) tuple(%g.1, %g.2)",
    )
    text = text.replace("use_global_device_ids=true, dimensions={0}", "dimensions={0}, use_global_device_ids=true")
    assert _sent(text, "tpu") == [("all-gather", "f32", 1, 512)]


def test_tpus_reduce_what_a_loop_adds_up_once():
    body = f"""%r = f32[8,8] all-reduce(%w), {_ALL}, to_apply=%add
  %new = f32[8,8] add(%s, %r)"""
    text = _loop(body)
    assert _sent(text, "tpu") == [("all-reduce", "f32", 1, 256)]
    assert _sent(text, "gpu") == [("all-reduce", "f32", 5, 256)]
    read = text.replace("%new = f32[8,8] add(%s, %r)", "%sum = f32[8,8] add(%s, %r)\n  %new = f32[8,8] negate(%sum)")
    assert _sent(read, "tpu") == [("all-reduce", "f32", 5, 256)]


def test_tpus_reduce_a_sum_of_sums_once():
    text = _entry(
        "%x = f32[8,16] parameter(0)",
        "%y = f32[16,8] parameter(1)",
        f"%r.1 = f32[8,16] all-reduce(%x), {_ALL}, to_apply=%add",
        f"%r.2 = f32[16,8] all-reduce(%y), {_ALL}, to_apply=%add",
        "%t = f32[8,16] transpose(%r.2), dimensions={1,0}",
        "%s = f32[8,16] add(%r.1, %t)",
        "ROOT %n = f32[8,16] negate(%s)",
    )
    assert _sent(text, "tpu") == [("all-reduce", "f32", 1, 512)]


def test_tpus_reduce_over_both_axes_at_once():
    pairs = "channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true"
    text = _entry(
        "%x = f32[8] parameter(0)",
        f"%r.1 = f32[8] all-reduce(%x), {_FOURS}, to_apply=%add",
        f"%r.2 = f32[8] all-reduce(%r.1), {pairs}, to_apply=%add",
        "ROOT %n = f32[8] negate(%r.2)",
    )
    module = as_compiled(parse_hlo(text), "tpu")
    (own,) = [one for one in module.computations["main"].values() if one.opcode == "all-reduce"]
    assert "replica_groups={{0,1,2,3,4,5,6,7}}" in own.attributes


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("f32[512,128]", "f32[128,128]", "reduce-scatter"),
        ("f32[64,512]", "f32[64,128]", "reduce-scatter"),
        ("f32[64,384]", "f32[64,96]", "all-reduce"),  # 96 fill no tile
        ("bf16[64,512]", "bf16[64,128]", "all-reduce"),  # two numbers of bfloat16 lie in one place
        ("bf16[256,2048]", "bf16[256,512]", "reduce-scatter"),
        ("f32[512,64]", "f32[512,16]", "reduce-scatter"),  # the compiler turns it: 16 rows of 512
        ("f32[512,128]", "f32[256,128]", "all-reduce"),  # a part of two devices
    ],
)
def test_tpus_scatter_sums_of_which_each_keeps_a_part(before, after, kind):
    text = _entry(
        f"%x = {before} parameter(0)",
        "%at = s32[] parameter(1)",
        f"%r = {before} all-reduce(%x), {_FOURS}, to_apply=%add",
        f"%d = {after} dynamic-slice(%r, %at, %at)",
        f"ROOT %n = {after} negate(%d)",
    )
    own = as_compiled(parse_hlo(text), "tpu").computations["main"].get("d")
    assert [one[0] for one in _sent(text, "tpu")] == [kind]
    # GPUs scatter whatever the tiles.
    assert [one[0] for one in _sent(text, "gpu")] == ["reduce-scatter" if after != "f32[256,128]" else "all-reduce"]
    if kind == "reduce-scatter":
        assert own is not None and (own.passes, own.unsure) == (("tpu-all-reduce-scatter-fusion",), 1.0)


_ONCE = "lhs_contracting_dims={1}, rhs_contracting_dims={1}"


@pytest.mark.parametrize(
    ("last", "dtype"),
    [
        (f"f32[8,8] dot(%t, %t), {_ONCE}", "bf16"),
        (f"f32[8,8] dot(%t, %t), {_ONCE}, operand_precision={{highest,highest}}", "f32"),
        ("f32[8,64] negate(%t)", "f32"),
    ],
)
def test_tpus_gather_what_products_alone_read_in_bfloat16(last, dtype):
    text = _entry(
        "%x = f32[8,8] parameter(0)",
        f"%g = f32[64,8] all-gather(%x), {_ALL}, dimensions={{0}}",
        "%t = f32[8,64] transpose(%g), dimensions={1,0}",
        f"ROOT %d = {last}",
    )
    assert [one[1] for one in _sent(text, "tpu")] == [dtype]


def test_products_that_take_longer_than_their_gather_are_windowed():
    def step(rows):
        return _entry(
            f"%x = bf16[{rows},1024] parameter(0)",
            "%w = bf16[128,1024] parameter(1)",
            f"%g = bf16[1024,1024] all-gather(%w), {_ALL}, dimensions={{0}}",
            f"ROOT %d = bf16[{rows},1024] dot(%x, %g), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
        )

    assert [one[0] for one in _sent(step(512), "tpu")] == ["all-gather"]
    assert [one[0] for one in _sent(step(560), "tpu")] == ["collective-permute"]


def test_each_pass_names_what_it_stands_for():
    for passes in PASSES.values():
        assert all(one.link for one in passes)
        assert len({one.name for one in passes}) == len(passes)


def test_tpus_multiply_by_a_vector_in_float32():
    def step(columns):
        return _entry(
            f"%x = f32[8,{columns}] parameter(0)",
            "%w = f32[16,8] parameter(1)",
            f"%g = f32[64,{columns}] all-gather(%x), {_ALL}, dimensions={{0}}",
            "%l = f32[16,64] concatenate(%w, %w, %w, %w, %w, %w, %w, %w), dimensions={1}",
            f"ROOT %d = f32[16,{columns}] dot(%l, %g), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
        )

    assert [one[1] for one in _sent(step(1), "tpu")] == ["f32"]
    assert [one[1] for one in _sent(step(2), "tpu")] == ["bf16"]


@pytest.mark.parametrize(("part", "kind"), [(64, "all-reduce"), (256, "all-gather")])
def test_tpus_gather_small_rows_by_a_sum(part, kind):
    text = _entry(
        f"%x = s32[{part}] parameter(0)",
        f"%g = s32[{8 * part}] all-gather(%x), {_ALL}, dimensions={{0}}",
        f"ROOT %n = s32[{8 * part}] negate(%g)",
    )
    assert [one[0] for one in _sent(text, "tpu")] == [kind]
