"""Simulated compiler passes: the collectives of small programs after them."""

import pytest

from shardfx._step import collective_of, parse_hlo
from shardfx.cost._after import PASSES, as_compiled
from shardfx.cost._runs import runs_of


_ALL = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"
_FOURS = "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true"
_PAIRS = "channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true"


def _sent(text, platform):
    """The kind, result type, calls and bytes of each collective of a program after a
    platform's passes.
    """
    module = as_compiled(parse_hlo(text), platform)
    found = []
    for name, ways in runs_of(module).items():
        for own in module.computations[name].values():
            if (one := collective_of(own, module.partitions)) is not None:
                found.append(
                    (
                        one.kind,
                        one.dtype,
                        sum(way.count for way in ways),
                        int(one.bytes),
                    )
                )
    return sorted(found)


def _entry(*lines):
    """The text of an entry computation from the types and operations of its
    instructions %v0, %v1 and so on.

    The last instruction is the root.
    """
    *before, last = [f"%v{at} = {line}" for at, line in enumerate(lines)]
    body = "\n  ".join([*before, f"ROOT {last}"])
    return f"HloModule step, num_partitions=8\n\nENTRY %main {{\n  {body}\n}}\n"


def _loop(body):
    """The text of a loop of five iterations that carries a state, and an array that is
    constant in the loop.
    """
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


_ONCE = "lhs_contracting_dims={1}, rhs_contracting_dims={1}"


def _gathered(last):
    """The text of an all-gather of f32[8,8] shards whose transpose the operation `last`
    reads.
    """
    gather = f"f32[64,8] all-gather(%v0), {_ALL}, dimensions={{0}}"
    return _entry(
        "f32[8,8] parameter(0)",
        gather,
        "f32[8,64] transpose(%v1), dimensions={1,0}",
        last,
    )


def _by_columns(columns):
    """The text of a product of a concatenation and a gathered matrix with `columns`
    columns.
    """
    return _entry(
        f"f32[8,{columns}] parameter(0)",
        "f32[16,8] parameter(1)",
        f"f32[64,{columns}] all-gather(%v0), {_ALL}, dimensions={{0}}",
        "f32[16,64] concatenate(%v1, %v1, %v1, %v1, %v1, %v1, %v1, %v1),"
        " dimensions={1}",
        f"f32[16,{columns}] dot(%v3, %v2), lhs_contracting_dims={{1}},"
        " rhs_contracting_dims={0}",
    )


def _product(rows):
    """The text of a product of a matrix with `rows` rows and a gathered weight."""
    return _entry(
        f"bf16[{rows},1024] parameter(0)",
        "bf16[128,1024] parameter(1)",
        f"bf16[1024,1024] all-gather(%v1), {_ALL}, dimensions={{0}}",
        f"bf16[{rows},1024] dot(%v0, %v2), lhs_contracting_dims={{1}},"
        " rhs_contracting_dims={0}",
    )


def _rows(part):
    """The text of an all-gather of `part` elements per device."""
    gather = f"s32[{8 * part}] all-gather(%v0), {_ALL}, dimensions={{0}}"
    return _entry(f"s32[{part}] parameter(0)", gather, f"s32[{8 * part}] negate(%v1)")


_ADDED = f"%r = f32[8,8] all-reduce(%w), {_ALL}, to_apply=%add\n  "
_ACCUMULATED = _loop(f"{_ADDED}%new = f32[8,8] add(%s, %r)")
_READ = _loop(f"{_ADDED}%sum = f32[8,8] add(%s, %r)\n  %new = f32[8,8] negate(%sum)")
_SUMS = _entry(
    "f32[8,16] parameter(0)",
    "f32[16,8] parameter(1)",
    f"f32[8,16] all-reduce(%v0), {_ALL}, to_apply=%add",
    f"f32[16,8] all-reduce(%v1), {_ALL}, to_apply=%add",
    "f32[8,16] transpose(%v3), dimensions={1,0}",
    "f32[8,16] add(%v2, %v4)",
    "f32[8,16] negate(%v5)",
)


@pytest.mark.parametrize(
    ("text", "platform", "sent"),
    [
        # A loop that only adds up a sum reduces it once, after its last iteration.
        (_ACCUMULATED, "tpu", ("all-reduce", "f32", 1, 256)),
        (_ACCUMULATED, "gpu", ("all-reduce", "f32", 5, 256)),
        (_READ, "tpu", ("all-reduce", "f32", 5, 256)),
        (_SUMS, "tpu", ("all-reduce", "f32", 1, 512)),
        # Gathers that only products at the default precision read are sent in bfloat16.
        (
            _gathered(f"f32[8,8] dot(%v2, %v2), {_ONCE}"),
            "tpu",
            ("all-gather", "bf16", 1, 1024),
        ),
        (
            _gathered(
                f"f32[8,8] dot(%v2, %v2), {_ONCE},"
                " operand_precision={highest,highest}"
            ),
            "tpu",
            ("all-gather", "f32", 1, 2048),
        ),
        (_gathered("f32[8,64] negate(%v2)"), "tpu", ("all-gather", "f32", 1, 2048)),
        # A product with a vector is in float32.
        (_by_columns(1), "tpu", ("all-reduce", "f32", 1, 256)),
        (_by_columns(2), "tpu", ("all-gather", "bf16", 1, 256)),
        # A product that takes longer than its gather hides a ring of permutes.
        (_product(512), "tpu", ("all-gather", "bf16", 1, 2 * 2**20)),
        (_product(560), "tpu", ("collective-permute", "bf16", 1, 9 * 2**18)),
        # Rows that do not fill the lanes are gathered by a sum.
        (_rows(64), "tpu", ("all-reduce", "s32", 1, 2048)),
        (_rows(256), "tpu", ("all-gather", "s32", 1, 8192)),
    ],
)
def test_the_collective_that_a_compiler_leaves(text, platform, sent):
    assert _sent(text, platform) == [sent]


@pytest.mark.parametrize(
    "groups",
    [
        "replica_groups={{0,1,2,3},{4,5,6,7}}",
        "replica_groups=[2,4]<=[8]",
        "replica_groups=[2,4]<=[2,4]T(0,1)",
        "replica_groups=mesh['a'=2,'b'=4] {'b'}",
    ],
)
def test_gathers_whose_groups_are_written_in_other_forms_are_one(groups):
    text = _entry(
        "f32[8,4] parameter(0)",
        f"f32[32,4] all-gather(%v0), channel_id=1, {groups},"
        " use_global_device_ids=true, dimensions={0}",
        f"f32[32,4] all-gather(%v0), {_FOURS.replace('=1,', '=2,', 1)},"
        " dimensions={0}",
        "(f32[32,4], f32[32,4]) tuple(%v1, %v2)",
    )
    assert _sent(text, "tpu") == [("all-gather", "f32", 1, 512)]


def test_a_reduction_of_a_reduction_is_one_over_both_axes():
    text = _entry(
        "f32[8] parameter(0)",
        f"f32[8] all-reduce(%v0), {_FOURS}, to_apply=%add",
        f"f32[8] all-reduce(%v1), {_PAIRS}, to_apply=%add",
        "f32[8] negate(%v2)",
    )
    module = as_compiled(parse_hlo(text), "tpu")
    (own,) = [
        one
        for one in module.computations["main"].values()
        if one.opcode == "all-reduce"
    ]
    assert "replica_groups={{0,1,2,3,4,5,6,7}}" in own.attributes


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("f32[512,128]", "f32[128,128]", "reduce-scatter"),
        ("f32[64,512]", "f32[64,128]", "reduce-scatter"),
        ("f32[64,384]", "f32[64,96]", "all-reduce"),  # 96 fill no tile
        # Two numbers of bfloat16 lie in one place.
        (
            "bf16[64,512]",
            "bf16[64,128]",
            "all-reduce",
        ),
        ("bf16[256,2048]", "bf16[256,512]", "reduce-scatter"),
        # The compiler turns it: 16 rows of 512.
        (
            "f32[512,64]",
            "f32[512,16]",
            "reduce-scatter",
        ),
        ("f32[512,128]", "f32[256,128]", "all-reduce"),  # a part of two devices
    ],
)
def test_sums_of_which_each_device_keeps_a_slice_are_scattered(before, after, kind):
    text = _entry(
        f"{before} parameter(0)",
        "s32[] parameter(1)",
        f"{before} all-reduce(%v0), {_FOURS}, to_apply=%add",
        f"{after} dynamic-slice(%v2, %v1, %v1)",
        f"{after} negate(%v3)",
    )
    own = as_compiled(parse_hlo(text), "tpu").computations["main"].get("v3")
    assert [one[0] for one in _sent(text, "tpu")] == [kind]
    # GPUs scatter whatever the tiles.
    assert [one[0] for one in _sent(text, "gpu")] == [
        "reduce-scatter" if after != "f32[256,128]" else "all-reduce"
    ]
    if kind == "reduce-scatter":
        assert own is not None and (own.passes, own.unsure) == (
            ("tpu-all-reduce-scatter-fusion",),
            1.0,
        )


def test_each_pass_has_a_name_and_a_link():
    for passes in PASSES.values():
        assert all(one.link for one in passes)
        assert len({one.name for one in passes}) == len(passes)
