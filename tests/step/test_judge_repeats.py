"""Programs of two devices that repeat elements, or take a row of an array for another
one or for all of it.
"""

import pytest
from test_judge_by_hand import GROUP, named, verdict_of


REPLICATED = "sharding={replicated}"


@pytest.mark.parametrize("bounds, outcome", [("0:1", True), ("3:4", False)])
def test_a_column_is_not_its_neighbour_after_an_operation(bounds, outcome):
    def negated(bounds: str) -> str:
        return f"""
  %x = f32[4,8]{{1,0}} parameter(0), {REPLICATED}
  %column.1 = f32[4,1]{{1,0}} slice(%x), slice={{[0:4], [{bounds}]}}
  %column = f32[4]{{0}} reshape(%column.1)
  ROOT %y = f32[4]{{0}} negate(%column), {named("y")}
"""

    verdict = verdict_of(negated("0:1"), negated(bounds))
    assert (verdict == "proved") == outcome


def test_a_reshape_beside_repeated_elements_moves_them():
    # Each row of the whole program is `x`; on one device, each half of a row is one
    # element of it.
    whole = f"""
  %x = f32[4]{{0}} parameter(0), {REPLICATED}
  %column = f32[4,1]{{1,0}} reshape(%x)
  %row = f32[1,4]{{1,0}} reshape(%column), {named("row")}
  %x.1 = f32[4]{{0}} reshape(%row)
  ROOT %rows = f32[2,4]{{1,0}} broadcast(%x.1), dimensions={{1}}
"""
    partitioned = f"""
  %x = f32[4]{{0}} parameter(0), {REPLICATED}
  %pairs = f32[4,2]{{1,0}} broadcast(%x), dimensions={{0}}
  ROOT %rows = f32[2,4]{{1,0}} reshape(%pairs), {named("row")}
"""
    assert verdict_of(whole, partitioned) != "proved"


# The pairs of an array of two elements: `a b a b` along dimension 1, and `a a b b`
# along dimension 0.
def pairs(dim: int) -> str:
    return f"""
  %x = f32[2]{{0}} parameter(0), {REPLICATED}
  %pairs = f32[2,2]{{1,0}} broadcast(%x), dimensions={{{dim}}}
  ROOT %y = f32[4]{{0}} reshape(%pairs), {named("y")}
"""


@pytest.mark.parametrize("whole_dim", [0, 1])
@pytest.mark.parametrize("dim", [0, 1])
def test_tiles_are_no_repeated_elements(whole_dim, dim):
    verdict = verdict_of(pairs(whole_dim), pairs(dim))
    assert (verdict == "proved") == (whole_dim == dim)


def test_tiles_and_repeated_elements_are_two_values():
    lines = f"""
  %x = f32[2]{{0}} parameter(0), {REPLICATED}
  %tiled.1 = f32[2,2]{{1,0}} broadcast(%x), dimensions={{1}}
  %tiled = f32[4]{{0}} reshape(%tiled.1)
  %repeated.1 = f32[2,2]{{1,0}} broadcast(%x), dimensions={{0}}
  %repeated = f32[4]{{0}} reshape(%repeated.1)
  ROOT %y = f32[4]{{0}} subtract(%tiled, OTHER)
"""
    whole = lines.replace("OTHER", "%repeated")
    assert verdict_of(whole, whole) == "proved"
    assert verdict_of(whole, lines.replace("OTHER", "%tiled")) != "proved"


SUM = f"""
  %zero = f32[] constant(0)
  ROOT %total = f32[] reduce(OPERAND, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
"""
PRODUCT = f"""
  ROOT %total = f32[] dot(OPERAND, %x), lhs_contracting_dims={{0}},\
 rhs_contracting_dims={{0}}, {named("total")}
"""


@pytest.mark.parametrize("operation", [SUM, PRODUCT])
def test_a_repeated_element_is_not_its_array(operation):
    parameter = f"  %x = f32[4]{{0}} parameter(0), {REPLICATED}\n"
    repeated = """
  %third.1 = f32[1]{0} slice(%x), slice={[2:3]}
  %third = f32[] reshape(%third.1)
  %thirds = f32[4]{0} broadcast(%third), dimensions={}
"""
    whole = parameter + operation.replace("OPERAND", "%x")
    partitioned = parameter + repeated + operation.replace("OPERAND", "%thirds")
    assert verdict_of(whole, partitioned) != "proved"


def test_a_repeated_first_row_is_not_its_array():
    summed = f"""
  %zero = f32[] constant(0)
  ROOT %total = f32[8]{{0}} reduce(OPERAND, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
"""
    parameter = f"  %x = f32[4,8]{{1,0}} parameter(0), {REPLICATED}\n"
    repeated = """
  %row.1 = f32[1,8]{1,0} slice(%x), slice={[0:1], [0:8]}
  %row = f32[8]{0} reshape(%row.1)
  %rows = f32[4,8]{1,0} broadcast(%row), dimensions={1}
  %left = f32[4,4]{1,0} slice(%rows), slice={[0:4], [0:4]}
  %right = f32[4,4]{1,0} slice(%rows), slice={[0:4], [4:8]}
  %joined = f32[4,8]{1,0} concatenate(%left, %right), dimensions={1}
"""
    whole = parameter + summed.replace("OPERAND", "%x")
    partitioned = parameter + repeated + summed.replace("OPERAND", "%joined")
    assert verdict_of(whole, partitioned) != "proved"


def test_the_share_of_a_sum_is_of_all_elements():
    # Each device adds the second of two elements, as its half of their sum.
    whole = f"""
  %x = f32[2]{{0}} parameter(0), {REPLICATED}
  %zero = f32[] constant(0)
  ROOT %total = f32[] reduce(%x, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
"""
    partitioned = f"""
  %x = f32[2]{{0}} parameter(0), {REPLICATED}
  %zero = f32[] constant(0)
  %second.1 = f32[1]{{0}} slice(%x), slice={{[1:2]}}
  %second = f32[] reshape(%second.1)
  %part = f32[1]{{0}} broadcast(%second), dimensions={{}}
  %term = f32[] reduce(%part, %zero), dimensions={{0}}, to_apply=%sum, {named("total")}
  ROOT %total = f32[] all-reduce(%term), {GROUP}, to_apply=%sum
"""
    assert verdict_of(whole, partitioned) != "proved"
