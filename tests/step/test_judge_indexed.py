"""Programs of two devices that look up or write at indices, or search for a maximum,
almost as the whole program does.
"""

import pytest
from judging import verdict_of_texts
from test_judge_by_hand import GROUP, module, named, verdict_of


COLUMNS = "sharding={devices=[1,2]<=[2]}"
ROWS = "sharding={devices=[2,1]<=[2]}"
REPLICATED = "sharding={replicated}"


def gathered(columns: int, attributes: str, shape: str) -> str:
    """A lookup of rows in an array of eight rows, of which devices have columns."""
    return f"""
  %table = f32[8,{columns}]{{1,0}} parameter(0), {COLUMNS}
  %i = s32[4,1]{{1,0}} parameter(1), {REPLICATED}
  ROOT %y = f32[{shape}] gather(%table, %i), start_index_map={{0}},\
 index_vector_dim=1, {attributes}, {named("y")}
"""


def scattered(columns: int, attributes: str, shape: str) -> str:
    """Sums into rows of an array of eight rows, of which devices have columns."""
    return f"""
  %table = f32[8,{columns}]{{1,0}} parameter(0), {COLUMNS}
  %i = s32[4,1]{{1,0}} parameter(1), {REPLICATED}
  %u = f32[{shape}] parameter(2), {REPLICATED}
  ROOT %y = f32[8,{columns}]{{1,0}} scatter(%table, %i, %u), {COLUMNS},\
 scatter_dims_to_operand_dims={{0}}, index_vector_dim=1, {attributes}, to_apply=%sum,\
 {named("y")}
"""


@pytest.mark.parametrize(
    "program, attributes, shape",
    [
        (
            gathered,
            "offset_dims={1}, collapsed_slice_dims={0}, slice_sizes={1,2}",
            "4,2",
        ),
        (
            gathered,
            "offset_dims={}, collapsed_slice_dims={0,1}, slice_sizes={1,1}",
            "4",
        ),
        (scattered, "update_window_dims={1}, inserted_window_dims={0}", "4,2"),
        (scattered, "update_window_dims={}, inserted_window_dims={0,1}", "4"),
    ],
)
def test_a_window_starts_with_the_first_element_of_all(program, attributes, shape):
    # Along the columns there is no index: each window starts with the first column.
    whole = program(8, attributes, shape)
    partitioned = program(4, attributes, shape)
    assert verdict_of(whole, partitioned) != "proved"


LOOKUP = (
    "offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0},"
    " index_vector_dim=1, slice_sizes={1,4}"
)
TABLE = f"""
  %table = f32[ROWS,4]{{1,0}} parameter(0), {REPLICATED}
  %i = s32[4,1]{{1,0}} parameter(1), {REPLICATED}
"""
WHOLE_LOOKUP = f"{TABLE}  ROOT %y = f32[4,4] gather(%table, %i), {LOOKUP}, {named('y')}"


@pytest.mark.parametrize("second_start, outcome", [(4, True), (2, False), (5, False)])
def test_a_lookup_in_parts_has_each_row_once(second_start, outcome):
    partitioned = TABLE + (
        f"""
  %starts = s32[2]{{0}} constant({{0, {second_start}}})
  %stops = s32[2]{{0}} constant({{3, {second_start + 3}}})
  %device = u32[] partition-id()
  %start.1 = s32[1]{{0}} dynamic-slice(%starts, %device), dynamic_slice_sizes={{1}}
  %start.2 = s32[] reshape(%start.1)
  %start = s32[4,1]{{1,0}} broadcast(%start.2), dimensions={{}}
  %stop.1 = s32[1]{{0}} dynamic-slice(%stops, %device), dynamic_slice_sizes={{1}}
  %stop.2 = s32[] reshape(%stop.1)
  %stop = s32[4,1]{{1,0}} broadcast(%stop.2), dimensions={{}}
  %zero = s32[] constant(0)
  %part = f32[4,4] dynamic-slice(%table, %start.2, %zero), dynamic_slice_sizes={{4,4}}
  %low = s32[4,1]{{1,0}} broadcast(%zero), dimensions={{}}
  %seven = s32[] constant(7)
  %high = s32[4,1]{{1,0}} broadcast(%seven), dimensions={{}}
  %clamped = s32[4,1]{{1,0}} clamp(%low, %i, %high)
  %shifted = s32[4,1]{{1,0}} subtract(%clamped, %start)
  %rows = f32[4,4]{{1,0}} gather(%part, %shifted), {LOOKUP}, {named("y")}
  %below = pred[4,1]{{1,0}} compare(%clamped, %start), direction=LT
  %above = pred[4,1]{{1,0}} compare(%clamped, %stop), direction=GT
  %outside.1 = pred[4,1]{{1,0}} or(%below, %above)
  %false = pred[] constant(false)
  %outside = pred[4]{{0}} reduce(%outside.1, %false), dimensions={{1}}, to_apply=%any
  %mask = pred[4,4]{{1,0}} broadcast(%outside), dimensions={{0}}
  %nought = f32[] constant(0)
  %zeros = f32[4,4]{{1,0}} broadcast(%nought), dimensions={{}}
  %term = f32[4,4]{{1,0}} select(%mask, %zeros, %rows)
  ROOT %y = f32[4,4]{{1,0}} all-reduce(%term), {GROUP}, to_apply=%sum
"""
    )
    verdict = verdict_of(
        WHOLE_LOOKUP.replace("ROWS", "8"), partitioned.replace("ROWS", "8")
    )
    assert (verdict == "proved") == outcome


def test_a_lookup_in_parts_has_each_pair_of_rows_and_columns():
    # Device 0 has the upper left quarter, and device 1 the lower right one.
    parameters = f"""
  %table = f32[4,4]{{1,0}} parameter(0), {REPLICATED}
  %i = s32[3,2]{{1,0}} parameter(1), {REPLICATED}
"""
    lookup = (
        "offset_dims={}, collapsed_slice_dims={0,1}, start_index_map={0,1},"
        f" index_vector_dim=1, slice_sizes={{1,1}}, {named('y')}"
    )
    whole = parameters + f"  ROOT %y = f32[3]{{0}} gather(%table, %i), {lookup}"
    partitioned = parameters + (
        f"""
  %starts = s32[2]{{0}} constant({{0, 2}})
  %stops = s32[2]{{0}} constant({{1, 3}})
  %device = u32[] partition-id()
  %start.1 = s32[1]{{0}} dynamic-slice(%starts, %device), dynamic_slice_sizes={{1}}
  %start.2 = s32[] reshape(%start.1)
  %start = s32[3,2]{{1,0}} broadcast(%start.2), dimensions={{}}
  %stop.1 = s32[1]{{0}} dynamic-slice(%stops, %device), dynamic_slice_sizes={{1}}
  %stop.2 = s32[] reshape(%stop.1)
  %stop = s32[3,2]{{1,0}} broadcast(%stop.2), dimensions={{}}
  %part = f32[2,2] dynamic-slice(%table, %start.2, %start.2), dynamic_slice_sizes={{2,2}}
  %zero = s32[] constant(0)
  %low = s32[3,2]{{1,0}} broadcast(%zero), dimensions={{}}
  %three = s32[] constant(3)
  %high = s32[3,2]{{1,0}} broadcast(%three), dimensions={{}}
  %clamped = s32[3,2]{{1,0}} clamp(%low, %i, %high)
  %shifted = s32[3,2]{{1,0}} subtract(%clamped, %start)
  %some = f32[3]{{0}} gather(%part, %shifted), {lookup}
  %below = pred[3,2]{{1,0}} compare(%clamped, %start), direction=LT
  %above = pred[3,2]{{1,0}} compare(%clamped, %stop), direction=GT
  %outside.1 = pred[3,2]{{1,0}} or(%below, %above)
  %false = pred[] constant(false)
  %outside = pred[3]{{0}} reduce(%outside.1, %false), dimensions={{1}}, to_apply=%any
  %nought = f32[] constant(0)
  %zeros = f32[3]{{0}} broadcast(%nought), dimensions={{}}
  %term = f32[3]{{0}} select(%outside, %zeros, %some)
  ROOT %y = f32[3]{{0}} all-reduce(%term), {GROUP}, to_apply=%sum
"""
    )
    assert verdict_of(whole, partitioned) != "proved"


# Rows over the first axis of a mesh of two by two devices, and over the second one.
FIRST = "sharding={devices=[2,1,2]<=[4] last_tile_dim_replicate}"
SECOND = "sharding={devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate}"


@pytest.mark.parametrize("mask, outcome", [("own", True), ("all", False)])
def test_the_mask_of_a_lookup_is_along_its_rows(mask, outcome):
    # Each device looks up one row, of two columns. The masks of both rows are no masks
    # of its columns.
    lookup = LOOKUP.replace("1,4", "1,2")
    whole = f"""
  %table = f32[4,2]{{1,0}} parameter(0), {FIRST}
  %i = s32[2,1]{{1,0}} parameter(1), {SECOND}
  ROOT %y = f32[2,2]{{1,0}} gather(%table, %i), {lookup}, {SECOND}, {named("y")}
"""
    masked = {
        "own": masked_rows("%i", rows=1, target=0),
        "all": masked_rows("%indices", rows=2, target=1),
    }
    partitioned = f"""
  %table = f32[2,2]{{1,0}} parameter(0), {FIRST}
  %i = s32[1,1]{{1,0}} parameter(1), {SECOND}
  %indices = s32[2,1]{{1,0}} all-gather(%i), channel_id=1,\
 replica_groups={{{{0,1}},{{2,3}}}}, use_global_device_ids=true, dimensions={{0}}
  %starts = s32[4]{{0}} constant({{0, 0, 2, 2}})
  %stops = s32[4]{{0}} constant({{1, 1, 3, 3}})
  %device = u32[] partition-id()
  %start.1 = s32[1]{{0}} dynamic-slice(%starts, %device), dynamic_slice_sizes={{1}}
  %start = s32[] reshape(%start.1)
  %stop.1 = s32[1]{{0}} dynamic-slice(%stops, %device), dynamic_slice_sizes={{1}}
  %stop = s32[] reshape(%stop.1)
  %zero = s32[] constant(0)
  %three = s32[] constant(3)
  %clamped.1 = s32[1,1]{{1,0}} clamp(%zero, %i, %three)
  %start.2 = s32[1,1]{{1,0}} broadcast(%start), dimensions={{}}
  %shifted = s32[1,1]{{1,0}} subtract(%clamped.1, %start.2)
  %some = f32[1,2]{{1,0}} gather(%table, %shifted), {lookup}, {named("y")}
{masked[mask].strip(chr(10))}
  %nought = f32[] constant(0)
  %zeros = f32[1,2]{{1,0}} broadcast(%nought), dimensions={{}}
  %term = f32[1,2]{{1,0}} select(%mask, %zeros, %some)
  ROOT %y = f32[1,2]{{1,0}} all-reduce(%term), channel_id=2,\
 replica_groups={{{{0,2}},{{1,3}}}}, use_global_device_ids=true, to_apply=%sum
"""
    modules = [
        module(lines).replace("num_partitions=2", "num_partitions=4")
        for lines in (whole, partitioned)
    ]
    assert (verdict_of_texts(*modules).outcome == "proved") == outcome


def masked_rows(indices: str, rows: int, target: int) -> str:
    """Whether indices are another device's, along dimension `target` of one row of two
    columns.
    """
    array = f"[{rows},1]{{1,0}}"
    return f"""
  %clamped = s32{array} clamp(%zero, {indices}, %three)
  %first = s32{array} broadcast(%start), dimensions={{}}
  %last = s32{array} broadcast(%stop), dimensions={{}}
  %below = pred{array} compare(%clamped, %first), direction=LT
  %above = pred{array} compare(%clamped, %last), direction=GT
  %outside.1 = pred{array} or(%below, %above)
  %false = pred[] constant(false)
  %outside = pred[{rows}]{{0}} reduce(%outside.1, %false), dimensions={{1}},\
 to_apply=%any
  %mask = pred[1,2]{{1,0}} broadcast(%outside), dimensions={{{target}}}
"""


@pytest.mark.parametrize("dtype, outcome", [("u16", True), ("u8", False)])
def test_indices_that_wrap_are_others(dtype, outcome):
    partitioned = TABLE + (
        f"""
  %zero = s32[] constant(0)
  %low = s32[4,1]{{1,0}} broadcast(%zero), dimensions={{}}
  %last = s32[] constant(299)
  %high = s32[4,1]{{1,0}} broadcast(%last), dimensions={{}}
  %clamped = s32[4,1]{{1,0}} clamp(%low, %i, %high)
  %short = {dtype}[4,1]{{1,0}} convert(%clamped)
  ROOT %y = f32[4,4]{{1,0}} gather(%table, %short), {LOOKUP}, {named("y")}
"""
    )
    verdict = verdict_of(
        WHOLE_LOOKUP.replace("ROWS", "300"), partitioned.replace("ROWS", "300")
    )
    assert (verdict == "proved") == outcome


def test_a_row_that_a_device_lacks_is_not_looked_up():
    # Device 1 has row 2 in the place of row 0.
    def gathered(rows: int) -> str:
        return f"""
  %x = f32[{rows},4]{{1,0}} parameter(0), {ROWS}
  %i = s32[4,1]{{1,0}} parameter(1), {REPLICATED}
  %row = f32[1,4]{{1,0}} slice(%x), slice={{[0:1], [0:4]}}, {named("row")}
  ROOT %y = f32[4,4]{{1,0}} gather(%row, %i), {LOOKUP}, {named("y")}
"""

    assert verdict_of(gathered(4), gathered(2)) != "proved"


SUMS_BY_INDEX = f"""
  %i = s32[ROWS,1]{{1,0}} parameter(0), {ROWS}
  %u = f32[ROWS]{{0}} parameter(1), sharding={{devices=[2]<=[2]}}
  %zero = f32[] constant(0)
  %zeros = f32[8]{{0}} broadcast(%zero), dimensions={{}}
"""
SCATTER = f"""
  NAME = f32[8]{{0}} scatter(%zeros, %i, %u), update_window_dims={{}},\
 inserted_window_dims={{0}}, scatter_dims_to_operand_dims={{0}}, index_vector_dim=1,\
 to_apply=%sum, {named("y")}
"""


@pytest.mark.parametrize("rows, outcome", [(6, True), (5, False)])
def test_padding_is_not_added_by_its_index(rows, outcome):
    # Of five rows, device 1 has two and padding, which may be any.
    whole = SUMS_BY_INDEX + SCATTER.replace("NAME", "ROOT %y")
    partitioned = (
        SUMS_BY_INDEX
        + SCATTER.replace("NAME", "%term")
        + (f"  ROOT %y = f32[8]{{0}} all-reduce(%term), {GROUP}, to_apply=%sum\n")
    )
    verdict = verdict_of(
        whole.replace("ROWS", str(rows)), partitioned.replace("ROWS", "3")
    )
    assert (verdict == "proved") == outcome


SORTED = "indices_are_sorted=true"


def sums_by_index(rows: int, order: str, name: str) -> str:
    scatter = SCATTER.replace("to_apply", f"{order}, to_apply")
    return (SUMS_BY_INDEX + scatter.replace("NAME", name)).replace("ROWS", str(rows))


@pytest.mark.parametrize(
    "whole_order, order, rows, outcome",
    [
        ("indices_are_sorted=false", SORTED, 6, False),
        (SORTED, SORTED, 6, True),
        (SORTED, "indices_are_sorted=false", 6, True),
        # A single index is sorted.
        ("indices_are_sorted=false", SORTED, 2, True),
    ],
)
def test_a_scatter_is_sorted_where_the_whole_program_says_so(
    whole_order, order, rows, outcome
):
    whole = sums_by_index(rows, whole_order, "ROOT %y")
    term = sums_by_index(rows // 2, order, "%term")
    total = f"  ROOT %y = f32[8]{{0}} all-reduce(%term), {GROUP}, to_apply=%sum\n"
    assert (verdict_of(whole, term + total) == "proved") == outcome


@pytest.mark.parametrize(
    "whole_order, order, outcome",
    [
        ("indices_are_sorted=false", SORTED, False),
        (SORTED, SORTED, True),
        (SORTED, "indices_are_sorted=false", True),
    ],
)
def test_a_lookup_is_sorted_where_the_whole_program_says_so(
    whole_order, order, outcome
):
    def of_columns(size: int, order: str) -> str:
        attributes = (
            f"offset_dims={{1}}, collapsed_slice_dims={{0}}, slice_sizes={{1,{size}}},"
            f" {order}, {COLUMNS}"
        )
        return gathered(size, attributes, f"4,{size}")

    verdict = verdict_of(of_columns(8, whole_order), of_columns(4, order))
    assert (verdict == "proved") == outcome


LARGER = """
%larger (v: f32[], i: s32[], w: f32[], j: s32[]) -> (f32[], s32[]) {
  %v = f32[] parameter(0)
  %i = s32[] parameter(1)
  %w = f32[] parameter(2)
  %j = s32[] parameter(3)
  %is_larger = pred[] compare(%v, %w), direction=GT
  %is_equal = pred[] compare(%v, %w), direction=EQ
  %is_before = pred[] compare(%i, %j), direction=LT
  %is_first = pred[] and(%is_equal, %is_before)
  %is_chosen = pred[] or(%is_larger, %is_first)
  %largest = f32[] select(%is_larger, %v, %w)
  %place = s32[] select(%is_chosen, %i, %j)
  ROOT %both = (f32[], s32[]) tuple(%largest, %place)
}

ENTRY"""


def largest(rows: int, name: str) -> str:
    return f"""
  %x = f32[{rows},3]{{1,0}} parameter(0), {ROWS}
  %i = s32[{rows},3]{{1,0}} parameter(1), {ROWS}
  %lowest = f32[] constant(-inf)
  %none = s32[] constant(0)
  {name} = (f32[3], s32[3]) reduce(%x, %i, %lowest, %none), dimensions={{0}},\
 to_apply=%larger, {named("largest")}
"""


def gathered_places(start: str, order: str) -> str:
    """The largest of what both devices found, with the places in `order`."""
    turned = GROUP.replace("0,1", order)
    return f"""
  %largest = f32[3]{{0}} get-tuple-element(%found), index=0
  %place = s32[3]{{0}} get-tuple-element(%found), index=1
  %largest.1 = f32[1,3]{{1,0}} reshape(%largest)
  %place.1 = s32[1,3]{{1,0}} reshape(%place)
  %largest.2 = f32[2,3]{{1,0}} all-gather(%largest.1), {GROUP}, dimensions={{0}}
  %place.2 = s32[2,3]{{1,0}} all-gather(%place.1), {turned}, dimensions={{0}}
  %start = f32[] constant({start})
  ROOT %y = (f32[3], s32[3]) reduce(%largest.2, %place.2, %start, %none),\
 dimensions={{0}}, to_apply=%larger
"""


@pytest.mark.parametrize(
    "start, order, outcome",
    [("-inf", "0,1", True), ("inf", "0,1", False), ("-inf", "1,0", False)],
)
def test_a_maximum_keeps_its_place_and_its_start(start, order, outcome):
    whole = module(largest(8, "ROOT %y"))
    partitioned = module(largest(4, "%found") + gathered_places(start, order))
    verdict = verdict_of_texts(
        whole.replace("\nENTRY", LARGER), partitioned.replace("\nENTRY", LARGER)
    )
    assert (verdict.outcome == "proved") == outcome
