"""Programs of two devices written by hand that mix rows of one array: a reshape drops the
dimension that tells them apart, so only the dropped index says which row devices hold.
"""

import pytest
from test_judge_by_hand import GROUP, named, verdict_of


SECOND_ROW = """
  %x = f32[2,4]{1,0} parameter(0), sharding={replicated}
  %row = f32[1,4]{1,0} slice(%x), slice={[1:2], [0:4]}
  ROOT %y = f32[4]{0} reshape(%row)
"""


def rows(first: int, other: int) -> str:
    return f"""
  %x = f32[2,4]{{1,0}} parameter(0), sharding={{replicated}}
  %first.1 = f32[1,4]{{1,0}} slice(%x), slice={{[{first}:{first + 1}], [0:4]}}
  %first = f32[4]{{0}} reshape(%first.1)
  %other.1 = f32[1,4]{{1,0}} slice(%x), slice={{[{other}:{other + 1}], [0:4]}}
  %other = f32[4]{{0}} reshape(%other.1)
"""


@pytest.mark.parametrize("first, outcome", [(1, "proved"), (0, "other")])
def test_a_piece_of_another_row_does_not_update_a_row(first, outcome):
    partitioned = f"""{rows(first, 1)}
  %part = f32[2]{{0}} slice(%other), slice={{[0:2]}}
  %start = s32[] constant(0)
  ROOT %y = f32[4]{{0}} dynamic-update-slice(%first, %part, %start)
"""
    verdict = verdict_of(SECOND_ROW, partitioned)
    assert (verdict == "proved") == (outcome == "proved")


@pytest.mark.parametrize("other, outcome", [(1, "proved"), (0, "other")])
def test_devices_that_choose_different_rows_have_no_one_row(other, outcome):
    partitioned = f"""{rows(1, other)}
  %device = u32[] partition-id()
  %one = u32[] constant(1)
  %is_first = pred[] compare(%device, %one), direction=LT
  %mask = pred[4]{{0}} broadcast(%is_first), dimensions={{}}
  ROOT %y = f32[4]{{0}} select(%mask, %first, %other)
"""
    verdict = verdict_of(SECOND_ROW, partitioned)
    assert (verdict == "proved") == (outcome == "proved")


@pytest.mark.parametrize("row, outcome", [(0, "proved"), (1, "other")])
@pytest.mark.parametrize("function", ["copy", "negate"])
def test_a_row_of_padding_is_no_row_of_the_array(row, outcome, function):
    whole = f"""
  %x = f32[1,4]{{1,0}} parameter(0), sharding={{replicated}}
  %row = f32[4]{{0}} reshape(%x)
  ROOT %y = f32[4]{{0}} {function}(%row)
"""
    partitioned = f"""
  %x = f32[1,4]{{1,0}} parameter(0), sharding={{replicated}}
  %zero = f32[] constant(0)
  %padded = f32[2,4]{{1,0}} pad(%x, %zero), padding=0_1x0_0
  %row.1 = f32[1,4]{{1,0}} slice(%padded), slice={{[{row}:{row + 1}], [0:4]}}
  %row = f32[4]{{0}} reshape(%row.1)
  ROOT %y = f32[4]{{0}} {function}(%row)
"""
    verdict = verdict_of(whole, partitioned)
    assert (verdict == "proved") == (outcome == "proved")


CACHE = """
  %x = f32[4]{0} parameter(0), sharding={replicated}
  %update = f32[1]{0} parameter(1), sharding={replicated}
  %free = s32[2]{0} parameter(2), sharding={replicated}
  %zero = s32[] constant(0)
  %three = s32[] constant(3)
  %zeros = s32[2]{0} broadcast(%zero), dimensions={}
  %threes = s32[2]{0} broadcast(%three), dimensions={}
  %indices = s32[2]{0} clamp(%zeros, %free, %threes)
"""
# A row is written at index 0 of two, on the device that has it.
WRITTEN_ROW = f"""
  %starts = s32[2]{{0}} constant({{0, 2}})
  %device = u32[] partition-id()
  %start.1 = s32[1]{{0}} dynamic-slice(%starts, %device), dynamic_slice_sizes={{1}}
  %start = s32[] reshape(%start.1)
  %two = s32[] constant(2)
  %stop = s32[] add(%start, %two)
  %shard = f32[2]{{0}} dynamic-slice(%x, %start), dynamic_slice_sizes={{2}}
  %is_from = pred[] compare(%index.0, %start), direction=GE
  %is_below = pred[] compare(%index.1, %stop), direction=LT
  %is_own = pred[] and(%is_from, %is_below)
  %offset = s32[] subtract(%index.2, %start)
  %place = s32[] select(%is_own, %offset, %zero)
  %updated = f32[2]{{0}} dynamic-update-slice(%shard, %update, %place),\
 {named("update")}
  %mask = pred[2]{{0}} broadcast(%is_own), dimensions={{}}
  %new = f32[2]{{0}} select(%mask, %updated, %shard)
  ROOT %y = f32[4]{{0}} all-gather(%new), {GROUP}, dimensions={{0}}
"""


@pytest.mark.parametrize("places", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)])
def test_a_mask_of_another_index_is_not_that_of_an_update(places):
    whole = f"""{CACHE}
  %first = s32[1]{{0}} slice(%indices), slice={{[0:1]}}
  %index = s32[] reshape(%first)
  ROOT %y = f32[4]{{0}} dynamic-update-slice(%x, %update, %index), {named("update")}
"""
    lines = [
        f"""  %one.{number} = s32[1]{{0}} slice(%indices), slice={{[{place}:{place + 1}]}}
  %index.{number} = s32[] reshape(%one.{number})
"""
        for number, place in enumerate(places)
    ]
    partitioned = CACHE + "".join(lines) + WRITTEN_ROW
    verdict = verdict_of(whole, partitioned)
    assert (verdict == "proved") == (places == (0, 0, 0))
