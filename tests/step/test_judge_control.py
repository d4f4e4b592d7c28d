"""Loops and conditionals of two devices that do not go on, choose, or turn as those of
the whole program.
"""

import gc
import weakref

import pytest
from judging import verdict_of_texts
from test_judge_by_hand import named

from shardfx._step.judge import judge


CUT_TILES = "devices=[2]<=[2]"
CUT = f"sharding={{{CUT_TILES}}}"
DOUBLED = "add(%x, %x)"
COUNTED = """
  %limit = s32[] constant(3)
  ROOT %goes_on = pred[] compare(%i, %limit), direction=LT
"""
# Whether any element is positive, of all devices or of one.
ANY_POSITIVE = """
  %zero = f32[] constant(0)
  %zeros = f32[SIZE]{0} broadcast(%zero), dimensions={}
  %are_positive = pred[SIZE]{0} compare(%x, %zeros), direction=GT
  %false = pred[] constant(false)
  ROOT %goes_on = pred[] reduce(%are_positive, %false), dimensions={0}, to_apply=%any
"""


def loop(size: int, condition: str, after_turn: str = "%doubled") -> str:
    """A program that doubles an array, of which one device has `size` elements."""
    state = "(s32[], f32[SIZE]{0})"
    text = f"""HloModule program, num_partitions=2

%any (a: pred[], b: pred[]) -> pred[] {{
  %a = pred[] parameter(0)
  %b = pred[] parameter(1)
  ROOT %c = pred[] or(%a, %b)
}}

%body (state: {state}) -> {state} {{
  %state = {state} parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[SIZE]{{0}} get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %doubled = f32[SIZE]{{0}} {DOUBLED}
  ROOT %after = {state} tuple(%next, {after_turn})
}}

%condition (state: {state}) -> pred[] {{
  %state = {state} parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[SIZE]{{0}} get-tuple-element(%state), index=1
{condition.strip(chr(10))}
}}

ENTRY %main {{
  %x = f32[SIZE]{{0}} parameter(0), {CUT}
  %start = s32[] constant(0)
  %before = {state} tuple(%start, %x)
  %loop = {state} while(%before), condition=%condition, body=%body, {named("loop")}
  ROOT %y = f32[SIZE]{{0}} get-tuple-element(%loop), index=1, {CUT}
}}
"""
    return text.replace("SIZE", str(size))


def test_a_loop_that_leaves_an_array_as_it_is_is_another():
    whole = loop(8, COUNTED)
    assert verdict_of_texts(whole, loop(4, COUNTED)).outcome == "proved"
    assert verdict_of_texts(whole, loop(4, COUNTED, "%x")).outcome != "proved"


def test_a_loop_hangs_on_no_unfinished_condition():
    whole = loop(8, ANY_POSITIVE)
    assert verdict_of_texts(whole, loop(4, ANY_POSITIVE)).outcome != "proved"


def test_a_judged_program_is_freed_at_once(monkeypatch):
    judges = []

    class Watched(judge.Judge):
        def verdict(self):
            judges.append(weakref.ref(self))
            return super().verdict()

    monkeypatch.setattr(judge, "Judge", Watched)
    gc.disable()
    try:
        verdict_of_texts(loop(8, COUNTED), loop(4, COUNTED))
        assert [reference() for reference in judges] == [None]
    finally:
        gc.enable()


CHOSEN = """HloModule program, num_partitions=2

%first (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %y = f32[4]{0} negate(%x)
}

%second (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %y = f32[4]{0} exponential(%x)
}

ENTRY %main {
  %x = f32[4]{0} parameter(0), sharding={replicated}
  %i = s32[] parameter(1), sharding={replicated}
  %zero = s32[] constant(0)
  %device.1 = u32[] partition-id()
  %device = s32[] convert(%device.1)
  %number = s32[] OPERATION
  ROOT %y = f32[4]{0} conditional(%number, %x, %x),\
 branch_computations={%first, %second}
}
"""


@pytest.mark.parametrize(
    "operation", ["copy(%i)", "clamp(%zero, %i, %zero)", "subtract(%i, %device)"]
)
def test_a_conditional_hangs_on_no_step_of_a_lookup(operation):
    whole = CHOSEN.replace("OPERATION", "copy(%i)")
    verdict = verdict_of_texts(whole, CHOSEN.replace("OPERATION", operation))
    assert (verdict.outcome == "proved") == operation.startswith("copy")


def test_branches_that_lie_differently_are_refuted():
    whole = CHOSEN.replace("OPERATION", "copy(%i)").replace("replicated", CUT_TILES)
    whole = whole.replace(f"parameter(1), sharding={{{CUT_TILES}}}", "parameter(1)")
    partitioned = whole.replace("f32[4]", "f32[2]").replace(
        "exponential(%x)", "exponential(%moved)"
    )
    moved = (
        "  %moved = f32[2]{0} collective-permute(%x), channel_id=1,"
        " source_target_pairs={{0,1},{1,0}}\n"
        "  ROOT %y = f32[2]{0} exponential"
    )
    partitioned = partitioned.replace("  ROOT %y = f32[2]{0} exponential", moved)
    verdict = verdict_of_texts(whole, partitioned)
    assert verdict.outcome == "refuted"
    assert "conditional joins operands" in str(verdict)
