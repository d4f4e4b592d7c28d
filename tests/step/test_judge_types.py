"""Programs of two devices that differ from the whole program in what a number is: in its
type, in how it is rounded, or in the function that made it.
"""

import pytest
from judging import verdict_of_texts
from test_judge_by_hand import GROUP, module, named, verdict_of


CUT = "sharding={devices=[2]<=[2]}"
REPLICATED = "sharding={replicated}"
# The neighbours exchange what they have.
EXCHANGED = "channel_id=1, source_target_pairs={{0,1},{1,0}}"


def scaled(lines: str) -> str:
    """An array times `%factor`, which `lines` compute."""
    return f"""
  %x = f32[4]{{0}} parameter(0), {REPLICATED}
{lines.strip(chr(10))}
  %factors = f32[4]{{0}} broadcast(%factor), dimensions={{}}
  ROOT %y = f32[4]{{0}} multiply(%x, %factors), {named("y")}
"""


TRUNCATED = """
  %c = f32[] constant(2.7)
  %i = s32[] convert(%c)
  %factor = f32[] convert(%i)
"""
QUOTIENT = """
  %c = s32[] constant(7)
  %two = s32[] constant(2)
  %i = s32[] divide(%c, %two)
  %factor = f32[] convert(%i)
"""
ROUNDED = """
  %large = f32[] constant(1e+08)
  %one = f32[] constant(1)
  %sum.1 = f32[] add(%large, %one)
  %rest = f32[] subtract(%sum.1, %large)
  %two = f32[] constant(2)
  %factor = f32[] add(%rest, %two)
"""


@pytest.mark.parametrize(
    "lines, right, wrong",
    [(TRUNCATED, "2", "2.7"), (QUOTIENT, "", "3.5"), (ROUNDED, "", "3")],
)
def test_a_folded_constant_is_rounded_as_on_a_device(lines, right, wrong):
    whole = scaled(lines)
    assert verdict_of(whole, scaled(f"  %factor = f32[] constant({wrong})")) != "proved"
    if right:
        partitioned = scaled(f"  %factor = f32[] constant({right})")
        assert verdict_of(whole, partitioned) == "proved"


def test_the_padding_of_a_sum_is_rounded_as_on_a_device():
    # The padding becomes 1e8 + 1 - 1e8 - 1: it is -1 on a device, and was taken for 0.
    def summed(size: int, source: str, padding: str) -> str:
        return f"""
  %x = f32[3]{{0}} parameter(0), {REPLICATED}
  %zero = f32[] constant(0)
{padding}
  %large = f32[] constant(1e+08)
  %larges = f32[{size}]{{0}} broadcast(%large), dimensions={{}}
  %one = f32[] constant(1)
  %ones = f32[{size}]{{0}} broadcast(%one), dimensions={{}}
  %a = f32[{size}]{{0}} add({source}, %larges), {named("a")}
  %b = f32[{size}]{{0}} add(%a, %ones), {named("b")}
  %c = f32[{size}]{{0}} subtract(%b, %larges), {named("c")}
  %d = f32[{size}]{{0}} subtract(%c, %ones), {named("d")}
  ROOT %y = f32[] reduce(%d, %zero), dimensions={{0}}, to_apply=%sum, {named("y")}
"""

    padded = "  %padded = f32[4]{0} pad(%x, %zero), padding=0_1"
    assert verdict_of(summed(3, "%x", ""), summed(4, "%padded", padded)) != "proved"


@pytest.mark.parametrize("dtype, outcome", [("f16", True), ("s32", False)])
def test_an_unfinished_sum_of_integers_is_no_float(dtype, outcome):
    # The parts of a sum that wraps do not wrap as floats.
    reducer = {"f16": "sum", "s32": "whole_sum"}[dtype]

    def summed(size: int) -> str:
        return f"""
  %x = {dtype}[{size}]{{0}} parameter(0), {CUT}
  %zero = {dtype}[] constant(0)
  %total = {dtype}[] reduce(%x, %zero), dimensions={{0}}, to_apply=%{reducer}
"""

    whole = summed(8) + "  ROOT %y = f32[] convert(%total)\n"
    partitioned = summed(4) + (
        "  %part = f32[] convert(%total)\n"
        f"  ROOT %y = f32[] all-reduce(%part), {GROUP}, to_apply=%sum\n"
    )
    assert (verdict_of(whole, partitioned) == "proved") == outcome


def test_a_result_of_another_type_is_another():
    text = f"""
  %x = f32[4]{{0}} parameter(0), {REPLICATED}
  ROOT %y = TYPE[4]{{0}} dot(%x, %x), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}
"""
    whole = text.replace("TYPE", "f32")
    assert verdict_of(whole, whole) == "proved"
    assert verdict_of(whole, text.replace("TYPE", "bf16")) != "proved"


ROWS = "sharding={devices=[2,1]<=[2]}"
NUMBERS = ("f32[SIZE]{0}", CUT)
BYTES = ("u8[SIZE,4]{1,0}", ROWS)


@pytest.mark.parametrize("source, outcome", [("%x", True), ("%moved", False)])
@pytest.mark.parametrize("before, after", [(NUMBERS, BYTES), (BYTES, NUMBERS)])
def test_bytes_lie_as_the_numbers_of_which_they_are(before, after, source, outcome):
    text = f"""
  %x = {before[0]} parameter(0), {before[1]}
  %moved = {before[0]} collective-permute(%x), {EXCHANGED}
  ROOT %y = {after[0]} bitcast-convert(SOURCE), {after[1]}
"""
    whole = text.replace("SIZE", "8").replace("SOURCE", "%x")
    partitioned = text.replace("SIZE", "4").replace("SOURCE", source)
    assert (verdict_of(whole, partitioned) == "proved") == outcome


@pytest.mark.parametrize("source, outcome", [("%x", True), ("%moved", False)])
def test_a_mapped_function_is_of_the_same_elements(source, outcome):
    function = """
%negated (a: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %c = f32[] negate(%a)
}

ENTRY"""

    def mapped(size: int, source: str) -> str:
        lines = f"""
  %x = f32[{size}]{{0}} parameter(0), {CUT}
  %moved = f32[{size}]{{0}} collective-permute(%x), {EXCHANGED}
  ROOT %y = f32[{size}]{{0}} map({source}), dimensions={{0}}, to_apply=%negated, {CUT}
"""
        return module(lines).replace("\nENTRY", function)

    verdict = verdict_of_texts(mapped(8, "%x"), mapped(4, source))
    assert (verdict.outcome == "proved") == outcome
