"""Programs of two devices written by hand that finish a sum or a maximum wrongly: a share
of a sum that is squared or added to a whole, and a maximum that is summed, negated, or
taken beside zeros.
"""

import pytest
from test_judge_by_hand import GROUP, named, verdict_of


def is_proved(whole: str, partitioned: str) -> bool:
    return verdict_of(whole, partitioned) == "proved"


def finished(shape: str, reducer: str) -> str:
    return f"""
  ROOT %y = f32[{shape}]{{0}} all-reduce(%z), {GROUP}, to_apply=%{reducer},\
 {named("z")}
"""


def repeated_sum(rows: int, size: int, source: str) -> str:
    """A sum of equal rows. A device that has half of them has half of the sum."""
    return f"""
  %zero = f32[] constant(0)
  %rows = f32[{rows},{size}]{{1,0}} broadcast({source}), dimensions={{1}}
  %sum.1 = f32[{size}]{{0}} reduce(%rows, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("sum")}
"""


@pytest.mark.parametrize("reducer, outcome", [("sum", True), ("product", False)])
def test_a_window_multiplies_no_shares_of_a_sum(reducer, outcome):
    first = {"sum": 0, "product": 1}[reducer]
    parameter = "  %x = f32[4]{0} parameter(0), sharding={replicated}\n"
    window = f"""
  %first = f32[] constant({first})
  %z = f32[3]{{0}} reduce-window(%sum.1, %first), window={{size=2}},\
 to_apply=%{reducer}, {named("z")}
"""
    whole = parameter + repeated_sum(8, 4, "%x") + window.replace("%z", "ROOT %z")
    partitioned = parameter + repeated_sum(4, 4, "%x") + window + finished("3", "sum")
    assert is_proved(whole, partitioned) == outcome


SCATTERED = """
  %x = f32[4]{0} parameter(0), sharding={replicated}
  %index = s32[2,1]{1,0} parameter(1), sharding={replicated}
  %update = f32[2]{0} parameter(2), sharding={replicated}
"""


def scatter(table: str, updates: str) -> str:
    return f"""
  %z = f32[4]{{0}} scatter({table}, %index, {updates}), update_window_dims={{}},\
 inserted_window_dims={{0}}, scatter_dims_to_operand_dims={{0}}, index_vector_dim=1,\
 to_apply=%sum, {named("z")}
"""


@pytest.mark.parametrize("rows", [4, 8])
def test_a_scatter_into_a_share_of_a_sum_is_not_proved(rows):
    operation = scatter("%sum.1", "%update").replace("%z", "ROOT %z")
    whole = SCATTERED + repeated_sum(8, 4, "%x") + operation
    partitioned = SCATTERED + repeated_sum(rows, 4, "%x") + operation
    assert is_proved(whole, partitioned) == (rows == 8)


def test_a_scatter_of_shares_into_an_array_is_not_proved():
    operation = scatter("%x", "%sum.1")
    whole = SCATTERED + repeated_sum(8, 2, "%update")
    whole += operation.replace("%z", "ROOT %z")
    partitioned = SCATTERED + repeated_sum(4, 2, "%update") + operation
    assert not is_proved(whole, partitioned + finished("4", "sum"))


# Device 0 has the first half of the rows.
ROWS = "  %x = f32[{rows},8]{{1,0}} parameter(0), sharding={{devices=[2,1]<=[2]}}\n"
LARGEST = f"""
  %low = f32[] constant(-inf)
  %largest.1 = f32[8]{{0}} reduce(%x, %low), dimensions={{0}}, to_apply=%largest,\
 {named("largest")}
"""


def test_a_negated_part_of_a_maximum_is_no_part_of_it():
    whole = f"""{ROWS.format(rows=4)}{LARGEST}
  %first = f32[] constant(-1)
  %second = f32[] constant(2)
  %firsts = f32[8]{{0}} broadcast(%first), dimensions={{}}
  %seconds = f32[8]{{0}} broadcast(%second), dimensions={{}}
  %negated = f32[8]{{0}} multiply(%largest.1, %firsts), {named("negated")}
  ROOT %z = f32[8]{{0}} multiply(%negated, %seconds), {named("z")}
"""
    partitioned = f"""{ROWS.format(rows=2)}{LARGEST}
  %both = f32[] constant(-2)
  %boths = f32[8]{{0}} broadcast(%both), dimensions={{}}
  %z = f32[8]{{0}} multiply(%largest.1, %boths), {named("z")}
{finished("8", "largest")}"""
    assert not is_proved(whole, partitioned)


@pytest.mark.parametrize("reducer, outcome", [("sum", True), ("largest", False)])
def test_zeros_beside_a_maximum_are_summed(reducer, outcome):
    whole = ROWS.format(rows=4) + LARGEST.replace("%largest.1 =", "ROOT %largest.1 =")
    partitioned = f"""{ROWS.format(rows=2)}{LARGEST}
  %whole = f32[8]{{0}} all-reduce(%largest.1), {GROUP}, to_apply=%largest,\
 {named("largest")}
  %device = u32[] partition-id()
  %one = u32[] constant(1)
  %is_first = pred[] compare(%device, %one), direction=LT
  %mask = pred[8]{{0}} broadcast(%is_first), dimensions={{}}
  %zero = f32[] constant(0)
  %zeros = f32[8]{{0}} broadcast(%zero), dimensions={{}}
  %z = f32[8]{{0}} select(%mask, %whole, %zeros)
{finished("8", reducer)}"""
    assert is_proved(whole, partitioned) == outcome


def test_a_sum_is_not_written_into_a_maximum():
    whole = f"""{ROWS.format(rows=4)}{LARGEST}
  %zero = f32[] constant(0)
  %start = s32[] constant(1)
  %sum.1 = f32[8]{{0}} reduce(%x, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("sum")}
  %part = f32[2]{{0}} slice(%sum.1), slice={{[0:2]}}
  ROOT %z = f32[8]{{0}} dynamic-update-slice(%largest.1, %part, %start), {named("z")}
"""
    partitioned = whole.replace("[4,8]", "[2,8]").replace("ROOT %z", "%z")
    assert not is_proved(whole, partitioned + finished("8", "sum"))


def test_parts_of_a_maximum_are_not_scattered_into_a_sum():
    whole = f"""{ROWS.format(rows=4)}{LARGEST}
  %index = s32[8,1]{{1,0}} parameter(1), sharding={{replicated}}
  %zero = f32[] constant(0)
  %zeros = f32[4]{{0}} broadcast(%zero), dimensions={{}}
{scatter("%zeros", "%largest.1")}""".replace("%z = ", "ROOT %z = ")
    partitioned = whole.replace("[4,8]", "[2,8]").replace("ROOT %z", "%z")
    assert not is_proved(whole, partitioned + finished("4", "sum"))


@pytest.mark.parametrize("number", [0, 5])
def test_padding_of_another_device_keeps_its_number(number):
    whole = f"""
  %x = f32[3]{{0}} parameter(0), sharding={{replicated}}
  %zero = f32[] constant(0)
  ROOT %z = f32[] reduce(%x, %zero), dimensions={{0}}, to_apply=%sum, {named("z")}
"""
    partitioned = f"""
  %x = f32[3]{{0}} parameter(0), sharding={{replicated}}
  %zero = f32[] constant(0)
  %number = f32[] constant({number})
  %first = f32[4]{{0}} pad(%x, %zero), padding=0_1
  %other = f32[4]{{0}} pad(%x, %number), padding=0_1
  %device = u32[] partition-id()
  %one = u32[] constant(1)
  %is_first = pred[] compare(%device, %one), direction=LT
  %mask = pred[4]{{0}} broadcast(%is_first), dimensions={{}}
  %chosen = f32[4]{{0}} select(%mask, %first, %other)
  ROOT %z = f32[] reduce(%chosen, %zero), dimensions={{0}}, to_apply=%sum, {named("z")}
"""
    assert is_proved(whole, partitioned) == (number == 0)


def test_a_bitcast_to_another_type_is_another_value():
    whole = """
  %x = s32[4]{0} parameter(0), sharding={replicated}
  ROOT %y = f32[4]{0} convert(%x)
"""
    partitioned = """
  %x = s32[4]{0} parameter(0), sharding={replicated}
  %bits = f32[4]{0} bitcast(%x)
  ROOT %y = f32[4]{0} convert(%bits)
"""
    assert not is_proved(whole, partitioned)


@pytest.mark.parametrize("number", [0, 5])
def test_windows_over_parts_of_a_sum_start_with_zero(number):
    total = f"""
  %zero = f32[] constant(0)
  %first = f32[] constant({number})
  %sum.1 = f32[8]{{0}} reduce(%x, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("sum")}
  %z = f32[7]{{0}} reduce-window(%sum.1, %first), window={{size=2}}, to_apply=%sum,\
 {named("z")}
"""
    whole = ROWS.format(rows=4) + total.replace("%z =", "ROOT %z =")
    partitioned = ROWS.format(rows=2) + total + finished("7", "sum")
    assert is_proved(whole, partitioned) == (number == 0)
