"""Programs of two devices written by hand that a search found: they move, pad or number
elements otherwise than the whole program.
"""

import pytest
from test_judge_by_hand import GROUP, named, verdict_of


@pytest.mark.parametrize("number, outcome", [(0, True), (5, False)])
def test_a_pad_that_also_crops_has_its_own_number(number, outcome):
    whole = f"""
  %x = f32[4]{{0}} parameter(0), sharding={{replicated}}
  %zero = f32[] constant(0)
  %part = f32[2]{{0}} slice(%x), slice={{[1:3]}}
  ROOT %total = f32[] reduce(%part, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
"""
    partitioned = f"""
  %x = f32[4]{{0}} parameter(0), sharding={{replicated}}
  %zero = f32[] constant(0)
  %number = f32[] constant({number})
  %first = f32[3]{{0}} slice(%x), slice={{[0:3]}}
  %padded = f32[4]{{0}} pad(%first, %zero), padding=0_1
  %moved = f32[4]{{0}} pad(%padded, %number), padding=-1_1
  ROOT %total = f32[] reduce(%moved, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
"""
    assert (verdict_of(whole, partitioned) == "proved") == outcome


SQUARE = """
  %x = f32[{rows}]{{1,0}} parameter(0), sharding={{devices=[1,2]<=[2]}}
"""


def exchanged(shape: str, source: str, name: str) -> str:
    return f"""
  %{name} = f32[{shape}]{{1,0}} all-to-all(%{source}), {GROUP}, dimensions={{0}}
"""


@pytest.mark.parametrize("times, outcome", [(1, False), (2, True)])
def test_an_exchange_sends_the_row_that_each_sender_has(times, outcome):
    # The first exchange cuts the rows, and the second one the columns again.
    whole = SQUARE.format(rows="2,4") + "  ROOT %y = f32[2,4]{1,0} copy(%x)\n"
    whole = whole.replace("copy(%x)", "copy(%x), sharding={devices=[1,2]<=[2]}")
    partitioned = SQUARE.format(rows="2,2") + exchanged("2,2", "x", "first")
    last = "first"
    if times == 2:
        partitioned += exchanged("2,2", "first", "second")
        last = "second"
    partitioned += f"  ROOT %y = f32[2,2]{{1,0}} copy(%{last})\n"
    assert (verdict_of(whole, partitioned) == "proved") == outcome


def test_an_exchanged_mask_is_not_that_of_the_device():
    whole = """
  %x = f32[4]{0} parameter(0), sharding={replicated}
  ROOT %y = f32[4]{0} negate(%x)
"""
    partitioned = f"""
  %x = f32[4]{{0}} parameter(0), sharding={{replicated}}
  %negated = f32[4]{{0}} negate(%x)
  %device = u32[] partition-id()
  %one = u32[] constant(1)
  %is_first = pred[] compare(%device, %one), direction=LT
  %mask = pred[4]{{0}} broadcast(%is_first), dimensions={{}}
  %other = pred[4]{{0}} all-to-all(%mask), {GROUP}, dimensions={{0}}
  %always = pred[4]{{0}} or(%mask, %other)
  %not = pred[4]{{0}} not(%mask)
  %always.2 = pred[4]{{0}} or(%other, %not)
  %always.3 = pred[4]{{0}} and(%always, %always.2)
  ROOT %y = f32[4]{{0}} select(%always.3, %negated, %x)
"""
    assert verdict_of(whole, partitioned) != "proved"


@pytest.mark.parametrize("row, outcome", [(0, True), (1, False)])
@pytest.mark.parametrize("function", ["copy", "negate"])
def test_a_row_of_a_long_iota_is_no_short_one(row, outcome, function):
    whole = f"""
  %rows = s32[1]{{0}} iota(), iota_dimension=0
  %first = s32[] reshape(%rows)
  ROOT %y = s32[] {function}(%first)
"""
    partitioned = f"""
  %rows = s32[{1 + row}]{{0}} iota(), iota_dimension=0
  %row = s32[1]{{0}} slice(%rows), slice={{[{row}:{row + 1}]}}
  %first = s32[] reshape(%row)
  ROOT %y = s32[] {function}(%first)
"""
    assert (verdict_of(whole, partitioned) == "proved") == outcome


def test_iotas_of_two_sizes_have_two_sums():
    def sums(size: int) -> str:
        return f"""
  %zero = s32[] constant(0)
  %short = s32[2]{{0}} iota(), iota_dimension=0
  %long = s32[{size}]{{0}} iota(), iota_dimension=0
  %first = s32[] reduce(%short, %zero), dimensions={{0}}, to_apply=%whole_sum,\
 {named("first")}
  %other = s32[] reduce(%long, %zero), dimensions={{0}}, to_apply=%whole_sum,\
 {named("other")}
  ROOT %y = (s32[], s32[]) tuple(%first, %other)
"""

    assert verdict_of(sums(4), sums(2)) != "proved"


def test_a_long_iota_is_not_two_short_ones():
    whole = f"""
  %rows = s32[2]{{0}} iota(), iota_dimension=0
  ROOT %y = s32[4]{{0}} concatenate(%rows, %rows), dimensions={{0}}, {named("y")}
"""
    partitioned = """
  %rows = s32[4]{0} iota(), iota_dimension=0
  ROOT %y = s32[4]{0} copy(%rows)
"""
    assert verdict_of(whole, partitioned) != "proved"


@pytest.mark.parametrize("column, outcome", [("[0:2]", True), ("[0:1]", False)])
def test_a_repeated_column_is_no_array(column, outcome):
    whole = f"""
  %x = f32[4,2]{{1,0}} parameter(0), sharding={{replicated}}
  %y = f32[4]{{0}} parameter(1), sharding={{replicated}}
  ROOT %z = f32[2]{{0}} dot(%y, %x), lhs_contracting_dims={{0}},\
 rhs_contracting_dims={{0}}, {named("z")}
"""
    source = "%x"
    repeated = ""
    if not outcome:
        source = "%both"
        repeated = f"""
  %column.1 = f32[4,1]{{1,0}} slice(%x), slice={{[0:4], {column}}}
  %column = f32[4]{{0}} reshape(%column.1)
  %both = f32[4,2]{{1,0}} broadcast(%column), dimensions={{0}}
"""
    partitioned = f"""
  %x = f32[4,2]{{1,0}} parameter(0), sharding={{replicated}}
  %y = f32[4]{{0}} parameter(1), sharding={{replicated}}
{repeated}
  ROOT %z = f32[2]{{0}} dot(%y, {source}), lhs_contracting_dims={{0}},\
 rhs_contracting_dims={{0}}, {named("z")}
"""
    assert (verdict_of(whole, partitioned) == "proved") == outcome


def test_a_device_without_a_row_of_one_has_padding():
    program = """
  %x = f32[1,4]{1,0} parameter(0), sharding={devices=[2,1]<=[2]}
  ROOT %y = f32[4]{0} reshape(%x)
"""
    assert verdict_of(program, program) != "proved"


@pytest.mark.parametrize("number, outcome", [(0, True), (5, False)])
def test_a_row_of_padding_keeps_its_number_beside_a_mask(number, outcome):
    # Device 0 has row 1, and device 1 has padding, without the dimension of rows.
    whole = """
  %x = f32[2,4]{1,0} parameter(0), sharding={replicated}
  ROOT %y = f32[1,3]{1,0} slice(%x), slice={[1:2], [0:3]}
"""
    partitioned = f"""
  %x = f32[2,4]{{1,0}} parameter(0), sharding={{replicated}}
  %number = f32[] constant({number})
  %padded = f32[3,4]{{1,0}} pad(%x, %number), padding=0_1x0_0
  %starts = s32[2]{{0}} constant({{1, 2}})
  %device = u32[] partition-id()
  %start.1 = s32[1]{{0}} dynamic-slice(%starts, %device), dynamic_slice_sizes={{1}}
  %start = s32[] reshape(%start.1)
  %none = s32[] constant(0)
  %row.1 = f32[1,4]{{1,0}} dynamic-slice(%padded, %start, %none),\
 dynamic_slice_sizes={{1,4}}
  %row = f32[4]{{0}} reshape(%row.1)
  %columns = s32[4]{{0}} iota(), iota_dimension=0
  %three = s32[] constant(3)
  %threes = s32[4]{{0}} broadcast(%three), dimensions={{}}
  %mask = pred[4]{{0}} compare(%columns, %threes), direction=LT
  %zero = f32[] constant(0)
  %zeros = f32[4]{{0}} broadcast(%zero), dimensions={{}}
  %masked = f32[4]{{0}} select(%mask, %row, %zeros)
  %row.2 = f32[1,4]{{1,0}} reshape(%masked)
  %all = f32[1,4]{{1,0}} all-reduce(%row.2), {GROUP}, to_apply=%sum
  ROOT %y = f32[1,3]{{1,0}} slice(%all), slice={{[0:1], [0:3]}}
"""
    assert (verdict_of(whole, partitioned) == "proved") == outcome


@pytest.mark.parametrize("number", [0, 2])
def test_padding_along_a_padded_dimension_has_two_numbers(number):
    # Column 2 has `number`, and column 3 and row 1 have zeros.
    whole = f"""
  %x = f32[1,2]{{1,0}} parameter(0), sharding={{replicated}}
  %zero = f32[] constant(0)
  ROOT %y = f32[1]{{0}} reduce(%x, %zero), dimensions={{1}}, to_apply=%sum,\
 {named("y")}
"""
    partitioned = f"""
  %x = f32[1,2]{{1,0}} parameter(0), sharding={{replicated}}
  %zero = f32[] constant(0)
  %number = f32[] constant({number})
  %first = f32[1,3]{{1,0}} pad(%x, %number), padding=0_0x0_1
  %second = f32[2,3]{{1,0}} pad(%first, %zero), padding=0_1x0_0
  %third = f32[2,4]{{1,0}} pad(%second, %zero), padding=0_0x0_1
  %row = f32[1,4]{{1,0}} slice(%third), slice={{[0:1], [0:4]}}
  ROOT %y = f32[1]{{0}} reduce(%row, %zero), dimensions={{1}}, to_apply=%sum,\
 {named("y")}
"""
    verdict = verdict_of(whole, partitioned)
    assert verdict != "proved" or number == 0
