"""Programs of two devices written by hand, as no partitioner writes them: what is almost
right is not proved.
"""

import pytest
from judging import verdict_of_texts


WHOLE = """HloModule whole, num_partitions=2

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

%product (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] multiply(%a, %b)
}}

%largest (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] maximum(%a, %b)
}}

%any (a: pred[], b: pred[]) -> pred[] {{
  %a = pred[] parameter(0)
  %b = pred[] parameter(1)
  ROOT %c = pred[] or(%a, %b)
}}

%whole_sum (a: s32[], b: s32[]) -> s32[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = s32[] add(%a, %b)
}}

%whole_maximum (a: s32[], b: s32[]) -> s32[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = s32[] maximum(%a, %b)
}}

ENTRY %main {{
{lines}
}}
"""
GROUP = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"


def module(lines: str) -> str:
    return WHOLE.format(lines=lines.strip("\n"))


def verdict_of(whole: str, partitioned: str) -> str:
    return verdict_of_texts(module(whole), module(partitioned)).outcome


def named(name: str) -> str:
    return f'metadata={{op_name="{name}"}}'


SUM_OF_SLICE = f"""
  %x = f32[5,8]{{1,0}} parameter(0), sharding={{replicated}}
  %part = f32[4,8]{{1,0}} slice(%x), slice={{[1:5], [0:8]}}
  %zero = f32[] constant(0)
  ROOT %total = f32[8]{{0}} reduce(%part, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
"""
ROWS_OF_DEVICE = """
  %starts = s32[2]{{0}} constant({{0, {rows}}})
  %device = u32[] partition-id()
  %start.1 = s32[1]{{0}} dynamic-slice(%starts, %device), dynamic_slice_sizes={{1}}
  %start = s32[] reshape(%start.1)
  %none = s32[] constant(0)
  %rows = f32[{rows},8]{{1,0}} dynamic-slice({source}, %start, %none),\
 dynamic_slice_sizes={{{rows},8}}
"""
SUMMED = f"""
  %some = f32[8]{{0}} reduce(%rows, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
  ROOT %all = f32[8]{{0}} all-reduce(%some), {GROUP}, to_apply=%sum, {named("total")}
"""


def test_a_sum_over_the_sliced_rows_is_proved():
    partitioned = """
  %x = f32[5,8]{1,0} parameter(0), sharding={replicated}
  %zero = f32[] constant(0)
  %part = f32[4,8]{1,0} slice(%x), slice={[1:5], [0:8]}
"""
    partitioned += ROWS_OF_DEVICE.format(rows=2, source="%part") + SUMMED
    assert verdict_of(SUM_OF_SLICE, partitioned) == "proved"


def test_a_sum_over_all_rows_is_none_over_the_sliced_ones():
    # Six rows, of which the last is padding, for two devices of three rows. The first
    # row is none of the slice, and is no zero.
    partitioned = """
  %x = f32[5,8]{1,0} parameter(0), sharding={replicated}
  %zero = f32[] constant(0)
  %padded = f32[6,8]{1,0} pad(%x, %zero), padding=0_1x0_0
"""
    partitioned += ROWS_OF_DEVICE.format(rows=3, source="%padded") + SUMMED
    assert verdict_of(SUM_OF_SLICE, partitioned) != "proved"


@pytest.mark.parametrize(
    "high, low, outcome", [("[1:3]", "[1:3]", "proved"), ("[0:3]", "[1:4]", "other")]
)
def test_an_element_in_the_hole_of_another_operand_is_no_zero(high, low, outcome):
    whole = f"""
  %x = f32[4]{{0}} parameter(0), sharding={{replicated}}
  %y = f32[4]{{0}} parameter(1), sharding={{replicated}}
  %both = f32[4]{{0}} add(%x, %y), {named("both")}
  %part = f32[2]{{0}} slice(%both), slice={{[1:3]}}
  %zero = f32[] constant(0)
  ROOT %total = f32[] reduce(%part, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
"""
    start = int(high[1])
    size = int(high[3]) - start
    partitioned = f"""
  %x = f32[4]{{0}} parameter(0), sharding={{replicated}}
  %y = f32[4]{{0}} parameter(1), sharding={{replicated}}
  %zero = f32[] constant(0)
  %some.x = f32[{size}]{{0}} slice(%x), slice={{{high}}}
  %some.y = f32[{size}]{{0}} slice(%y), slice={{{low}}}
  %padded.x = f32[4]{{0}} pad(%some.x, %zero), padding={start}_1
  %padded.y = f32[4]{{0}} pad(%some.y, %zero), padding=1_{3 - size}
  %both = f32[4]{{0}} add(%padded.x, %padded.y), {named("both")}
  ROOT %total = f32[] reduce(%both, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
"""
    verdict = verdict_of(whole, partitioned)
    assert (verdict == "proved") == (outcome == "proved")


@pytest.mark.parametrize("first, outcome", [("0", "proved"), ("5", "other")])
def test_a_row_of_padding_that_starts_with_a_number_is_no_zero(first, outcome):
    whole = f"""
  %x = f32[5,8]{{1,0}} parameter(0), sharding={{replicated}}
  %zero = f32[] constant(0)
  %first = f32[] constant({first})
  %rows = f32[5]{{0}} reduce(%x, %first), dimensions={{1}}, to_apply=%sum,\
 {named("rows")}
  ROOT %total = f32[] reduce(%rows, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
"""
    partitioned = f"""
  %x = f32[5,8]{{1,0}} parameter(0), sharding={{replicated}}
  %zero = f32[] constant(0)
  %first = f32[] constant({first})
  %padded = f32[6,8]{{1,0}} pad(%x, %zero), padding=0_1x0_0
"""
    partitioned += ROWS_OF_DEVICE.format(rows=3, source="%padded")
    partitioned += f"""
  %sums = f32[3]{{0}} reduce(%rows, %first), dimensions={{1}}, to_apply=%sum,\
 {named("rows")}
  %some = f32[] reduce(%sums, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
  ROOT %all = f32[] all-reduce(%some), {GROUP}, to_apply=%sum, {named("total")}
"""
    verdict = verdict_of(whole, partitioned)
    assert (verdict == "proved") == (outcome == "proved")


@pytest.mark.parametrize("first, outcome", [("0", "proved"), ("5", "other")])
def test_parts_of_a_sum_of_equal_rows_start_with_zero(first, outcome):
    def reduced(rows: int, name: str) -> str:
        return f"""
  %x = f32[3]{{0}} parameter(0), sharding={{replicated}}
  %first = f32[] constant({first})
  %rows = f32[{rows},3]{{1,0}} broadcast(%x), dimensions={{1}}
  {name} = f32[3]{{0}} reduce(%rows, %first), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
"""

    partitioned = reduced(4, "%some") + (
        f"  ROOT %all = f32[3]{{0}} all-reduce(%some), {GROUP}, to_apply=%sum,"
        f" {named('total')}"
    )
    verdict = verdict_of(reduced(8, "ROOT %total"), partitioned)
    assert (verdict == "proved") == (outcome == "proved")


@pytest.mark.parametrize(
    "dtype, operation, outcome",
    [
        ("bf16", "convert(%{})", "proved"),
        ("s32", "convert(%{})", "other"),
        ("f32", "divide(%{}, %two)", "proved"),
    ],
)
def test_a_sum_is_finished_before_it_is_rounded(dtype, operation, outcome):
    to_apply = "%whole_sum" if dtype == "s32" else "%sum"
    whole = f"""
  %x = f32[4,8]{{1,0}} parameter(0), sharding={{devices=[2,1]<=[2]}}
  %zero = f32[] constant(0)
  %two.1 = f32[] constant(2)
  %two = f32[8]{{0}} broadcast(%two.1), dimensions={{}}
  %total = f32[8]{{0}} reduce(%x, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
  ROOT %other = {dtype}[8]{{0}} {operation.format("total")}, {named("other")}
"""
    partitioned = f"""
  %x = f32[2,8]{{1,0}} parameter(0), sharding={{devices=[2,1]<=[2]}}
  %zero = f32[] constant(0)
  %two.1 = f32[] constant(2)
  %two = f32[8]{{0}} broadcast(%two.1), dimensions={{}}
  %some = f32[8]{{0}} reduce(%x, %zero), dimensions={{0}}, to_apply=%sum,\
 {named("total")}
  %other = {dtype}[8]{{0}} {operation.format("some")}, {named("other")}
  ROOT %all = {dtype}[8]{{0}} all-reduce(%other), {GROUP}, to_apply={to_apply},\
 {named("total")}
"""
    verdict = verdict_of(whole, partitioned)
    assert (verdict == "proved") == (outcome == "proved")


def test_a_whole_number_is_divided_after_its_sum():
    whole = f"""
  %x = s32[4,8]{{1,0}} parameter(0), sharding={{devices=[2,1]<=[2]}}
  %zero = s32[] constant(0)
  %two.1 = s32[] constant(2)
  %two = s32[8]{{0}} broadcast(%two.1), dimensions={{}}
  %total = s32[8]{{0}} reduce(%x, %zero), dimensions={{0}}, to_apply=%whole_sum,\
 {named("total")}
  ROOT %half = s32[8]{{0}} divide(%total, %two), {named("half")}
"""
    partitioned = f"""
  %x = s32[2,8]{{1,0}} parameter(0), sharding={{devices=[2,1]<=[2]}}
  %zero = s32[] constant(0)
  %two.1 = s32[] constant(2)
  %two = s32[8]{{0}} broadcast(%two.1), dimensions={{}}
  %some = s32[8]{{0}} reduce(%x, %zero), dimensions={{0}}, to_apply=%whole_sum,\
 {named("total")}
  %half = s32[8]{{0}} divide(%some, %two), {named("half")}
  ROOT %all = s32[8]{{0}} all-reduce(%half), {GROUP}, to_apply=%whole_sum,\
 {named("total")}
"""
    assert verdict_of(whole, partitioned) == "refuted"


@pytest.mark.parametrize("first, outcome", [("0", "proved"), ("1", "other")])
def test_zeros_of_a_neighbour_are_no_padding_by_another_number(first, outcome):
    # The first and the last window read padding: zeros here, `first` in the whole
    # program.
    window = "window={{size=3 pad={}}}"
    whole = f"""
  %x = f32[8]{{0}} parameter(0), sharding={{devices=[2]<=[2]}}
  %first = f32[] constant({first})
  ROOT %pooled = f32[8]{{0}} reduce-window(%x, %first), {window.format("1_1")},\
 to_apply=%sum, sharding={{devices=[2]<=[2]}}, {named("pooled")}
"""
    moved = "channel_id={}, source_target_pairs={{{{{}}}}}"
    partitioned = f"""
  %x = f32[4]{{0}} parameter(0), sharding={{devices=[2]<=[2]}}
  %first = f32[] constant({first})
  %last = f32[1]{{0}} slice(%x), slice={{[3:4]}}
  %left = f32[1]{{0}} collective-permute(%last), {moved.format(1, "0,1")}
  %start = f32[1]{{0}} slice(%x), slice={{[0:1]}}
  %right = f32[1]{{0}} collective-permute(%start), {moved.format(2, "1,0")}
  %joined = f32[6]{{0}} concatenate(%left, %x, %right), dimensions={{0}}
  ROOT %pooled = f32[4]{{0}} reduce-window(%joined, %first), {window.format("0_0")},\
 to_apply=%sum, {named("pooled")}
"""
    verdict = verdict_of(whole, partitioned)
    assert (verdict == "proved") == (outcome == "proved")


@pytest.mark.parametrize("added, outcome", [("0", "proved"), ("-1", "other")])
def test_a_negative_number_is_shifted_without_its_sign(added, outcome):
    # -1 becomes 1, and the judge took it for -1, which is clamped to 0.
    whole = """
  %x = f32[2]{0} parameter(0), sharding={replicated}
  ROOT %first = f32[1]{0} slice(%x), slice={[0:1]}
"""
    partitioned = f"""
  %x = f32[2]{{0}} parameter(0), sharding={{replicated}}
  %id = u32[] partition-id()
  %device = s32[] convert(%id)
  %added = s32[] constant({added})
  %sum.1 = s32[] add(%device, %added)
  %bits = s32[] constant(31)
  %start = s32[] shift-right-logical(%sum.1, %bits)
  ROOT %first = f32[1]{{0}} dynamic-slice(%x, %start), dynamic_slice_sizes={{1}}
"""
    verdict = verdict_of(whole, partitioned)
    assert (verdict == "proved") == (outcome == "proved")


@pytest.mark.parametrize(
    "sharding, rows, outcome",
    [("devices=[2,1]<=[2]", 2, "proved"), ("replicated", 4, "refuted")],
)
def test_a_product_of_what_all_devices_hold_is_refuted(sharding, rows, outcome):
    def reduced(rows: int, name: str) -> str:
        return f"""
  %x = f32[{rows},8]{{1,0}} parameter(0), sharding={{{sharding}}}
  %one = f32[] constant(1)
  {name} = f32[8]{{0}} reduce(%x, %one), dimensions={{0}}, to_apply=%product,\
 {named("total")}
"""

    partitioned = reduced(rows, "%some") + (
        f"  ROOT %all = f32[8]{{0}} all-reduce(%some), {GROUP}, to_apply=%product,"
        f" {named('total')}"
    )
    assert verdict_of(reduced(4, "ROOT %total"), partitioned) == outcome


LOOKUP = (
    "offset_dims={{1}}, collapsed_slice_dims={{0}}, start_index_map={{0}},"
    " index_vector_dim=1, slice_sizes={{1,4}}"
)
TABLE_AND_INDICES = """
  %table = f32[{rows},4]{{1,0}} parameter(0), sharding={{devices=[2,1]<=[2]}}
  %i = s32[4,1]{{1,0}} parameter(1), sharding={{replicated}}
  %j = s32[2,1]{{1,0}} parameter(2), sharding={{replicated}}
"""


def test_a_lookup_that_is_not_masked_is_no_table():
    def lookup(table, indices, count, name):
        return f"f32[{count},4]{{1,0}} gather({table}, {indices}), " + (
            f"{LOOKUP.format()}, {named(name)}"
        )

    whole = TABLE_AND_INDICES.format(rows=8) + (
        f"  %rows = {lookup('%table', '%i', 4, 'first')}\n"
        f"  ROOT %some = {lookup('%rows', '%j', 2, 'second')}\n"
    )
    partitioned = TABLE_AND_INDICES.format(rows=4) + (
        "  %starts = s32[2]{0} constant({0, 4})\n"
        "  %device = u32[] partition-id()\n"
        "  %start.1 = s32[1]{0} dynamic-slice(%starts, %device),"
        " dynamic_slice_sizes={1}\n"
        "  %start.2 = s32[] reshape(%start.1)\n"
        "  %start = s32[4,1]{1,0} broadcast(%start.2), dimensions={}\n"
        "  %zero = s32[] constant(0)\n"
        "  %low = s32[4,1]{1,0} broadcast(%zero), dimensions={}\n"
        "  %seven = s32[] constant(7)\n"
        "  %high = s32[4,1]{1,0} broadcast(%seven), dimensions={}\n"
        "  %clamped = s32[4,1]{1,0} clamp(%low, %i, %high)\n"
        "  %shifted = s32[4,1]{1,0} subtract(%clamped, %start)\n"
        f"  %rows = {lookup('%table', '%shifted', 4, 'first')}\n"
        f"  ROOT %some = {lookup('%rows', '%j', 2, 'second')}\n"
    )
    assert verdict_of(whole, partitioned) == "not judged"


SQUARE_LOOKUP = (
    "gather(%table, {indices}), offset_dims={{2}}, collapsed_slice_dims={{0}},"
    " start_index_map={{0}}, index_vector_dim=2, slice_sizes={{1,4}}"
)


TRANSPOSED = "f32[2,2,4]{2,1,0} transpose(%some), dimensions={1,0,2}"
# Another layout of the same bytes.
BITCAST = "f32[2,2,4]{2,0,1} bitcast(%some)"


@pytest.mark.parametrize(
    "turned, order, outcome",
    [
        (TRANSPOSED, "1,0,2", "proved"),
        (TRANSPOSED, "0,1,2", "not judged"),
        (BITCAST, "0,1,2", "not judged"),
    ],
)
def test_a_transposed_lookup_needs_a_transposed_mask(turned, order, outcome):
    parameters = """
  %table = f32[{rows},4]{{1,0}} parameter(0), sharding={{devices=[2,1]<=[2]}}
  %i = s32[2,2,1]{{2,1,0}} parameter(1), sharding={{replicated}}
"""
    name = named("rows")
    whole = parameters.format(rows=8) + (
        f"  %rows = f32[2,2,4]{{2,1,0}} {SQUARE_LOOKUP.format(indices='%i')}, {name}\n"
        "  ROOT %turned = f32[2,2,4]{2,1,0} transpose(%rows), dimensions={1,0,2}\n"
    )
    indices = "s32[2,2,1]{2,1,0}"
    mask = "pred[2,2,1]{2,1,0}"
    lookup = SQUARE_LOOKUP.format(indices="%shifted")
    partitioned = (
        parameters.format(rows=4)
        + f"""
  %starts = s32[2]{{0}} constant({{0, 4}})
  %stops = s32[2]{{0}} constant({{3, 7}})
  %device = u32[] partition-id()
  %start.1 = s32[1]{{0}} dynamic-slice(%starts, %device), dynamic_slice_sizes={{1}}
  %start.2 = s32[] reshape(%start.1)
  %start = {indices} broadcast(%start.2), dimensions={{}}
  %stop.1 = s32[1]{{0}} dynamic-slice(%stops, %device), dynamic_slice_sizes={{1}}
  %stop.2 = s32[] reshape(%stop.1)
  %stop = {indices} broadcast(%stop.2), dimensions={{}}
  %zero = s32[] constant(0)
  %low = {indices} broadcast(%zero), dimensions={{}}
  %seven = s32[] constant(7)
  %high = {indices} broadcast(%seven), dimensions={{}}
  %clamped = {indices} clamp(%low, %i, %high)
  %shifted = {indices} subtract(%clamped, %start)
  %some = f32[2,2,4]{{2,1,0}} {lookup}, {name}
  %turned = {turned}
  %below = {mask} compare(%clamped, %start), direction=LT
  %above = {mask} compare(%clamped, %stop), direction=GT
  %outside.1 = {mask} or(%below, %above)
  %outside.2 = {mask} transpose(%outside.1), dimensions={{{order}}}
  %false = pred[] constant(false)
  %outside = pred[2,2]{{1,0}} reduce(%outside.2, %false), dimensions={{2}}, to_apply=%any
  %masks = pred[2,2,4]{{2,1,0}} broadcast(%outside), dimensions={{0,1}}
  %nought = f32[] constant(0)
  %zeros = f32[2,2,4]{{2,1,0}} broadcast(%nought), dimensions={{}}
  %part = f32[2,2,4]{{2,1,0}} select(%masks, %zeros, %turned)
  ROOT %all = f32[2,2,4]{{2,1,0}} all-reduce(%part), {GROUP}, to_apply=%sum
"""
    )
    assert verdict_of(whole, partitioned) == outcome


# Device 0 has the rows of `x`, and device 1 has padding; and the other way round.
ROWS_AND_PADDING = """
  %x = f32[2,2]{1,0} parameter(0), sharding={replicated}
  %zero = f32[] constant(0)
  %pad = f32[4,2]{1,0} pad(%x, %zero), padding=0_2x0_0
  %starts = s32[2]{0} constant({0, 2})
  %device = u32[] partition-id()
  %start.1 = s32[1]{0} dynamic-slice(%starts, %device), dynamic_slice_sizes={1}
  %start = s32[] reshape(%start.1)
  %none = s32[] constant(0)
  %own = f32[2,2]{1,0} dynamic-slice(%pad, %start, %none), dynamic_slice_sizes={2,2}
  %other = f32[2,2]{1,0} collective-permute(%own), channel_id=1,\
 source_target_pairs={{0,1},{1,0}}
"""


@pytest.mark.parametrize(
    "joined",
    [
        """
  %left = f32[2,1]{1,0} slice(%other), slice={[0:2], [0:1]}
  %right = f32[2,1]{1,0} slice(%own), slice={[0:2], [1:2]}
  ROOT %y = f32[2,2]{1,0} concatenate(%left, %right), dimensions={1}
""",
        """
  %columns = s32[2,2]{1,0} iota(), iota_dimension=1
  %one = s32[] constant(1)
  %ones = s32[2,2]{1,0} broadcast(%one), dimensions={}
  %mask = pred[2,2]{1,0} compare(%columns, %ones), direction=LT
  ROOT %y = f32[2,2]{1,0} select(%mask, %other, %own)
""",
    ],
)
def test_padding_beside_a_piece_is_no_element(joined):
    whole = """
  %x = f32[2,2]{1,0} parameter(0), sharding={replicated}
  ROOT %y = f32[2,2]{1,0} copy(%x)
"""
    assert verdict_of(whole, ROWS_AND_PADDING + joined) != "proved"


# Numbers that wrap on one of the devices: below 0 for `u32`, and beyond 127 for `s8`.
WRAPPED_NUMBERS = {
    "u32": """
  %one = u32[] constant(1)
  %number = u32[] subtract(%device, %one)
  %limit = u32[] constant(100)
""",
    "s8": """
  %hundred = s8[] constant(100)
  %offset = s8[] convert(%device)
  %times = s8[] multiply(%offset, %hundred)
  %number = s8[] add(%times, %hundred)
  %limit = s8[] constant(-1)
""",
}


@pytest.mark.parametrize("dtype", WRAPPED_NUMBERS)
def test_a_mask_of_numbers_that_wrap_is_not_known(dtype):
    whole = """
  %x = f32[8]{0} parameter(0), sharding={replicated}
  ROOT %y = f32[8]{0} negate(%x)
"""
    direction = {"u32": "LT", "s8": "GT"}[dtype]
    partitioned = f"""
  %x = f32[8]{{0}} parameter(0), sharding={{replicated}}
  %negated = f32[8]{{0}} negate(%x)
  %device = u32[] partition-id()
{WRAPPED_NUMBERS[dtype]}
  %is_within = pred[] compare(%number, %limit), direction={direction}
  %mask = pred[8]{{0}} broadcast(%is_within), dimensions={{}}
  %zero = f32[] constant(0)
  %zeros = f32[8]{{0}} broadcast(%zero), dimensions={{}}
  ROOT %y = f32[8]{{0}} select(%mask, %negated, %zeros)
"""
    assert verdict_of(whole, partitioned) != "proved"


def test_an_iota_that_wraps_is_no_mask():
    whole = """
  %x = f32[300]{0} parameter(0), sharding={replicated}
  ROOT %y = f32[300]{0} negate(%x)
"""
    partitioned = """
  %x = f32[300]{0} parameter(0), sharding={replicated}
  %negated = f32[300]{0} negate(%x)
  %rows = s8[300]{0} iota(), iota_dimension=0
  %limit = s8[] constant(-1)
  %limits = s8[300]{0} broadcast(%limit), dimensions={}
  %mask = pred[300]{0} compare(%rows, %limits), direction=GT
  %zero = f32[] constant(0)
  %zeros = f32[300]{0} broadcast(%zero), dimensions={}
  ROOT %y = f32[300]{0} select(%mask, %negated, %zeros)
"""
    assert verdict_of(whole, partitioned) != "proved"


def test_the_numbers_of_a_scattered_maximum_are_not_known():
    whole = """
  %x = f32[8]{0} parameter(0), sharding={replicated}
  ROOT %y = f32[8]{0} negate(%x)
"""
    partitioned = f"""
  %x = f32[8]{{0}} parameter(0), sharding={{replicated}}
  %negated = f32[8]{{0}} negate(%x)
  %rows = s32[8]{{0}} iota(), iota_dimension=0
  %own = s32[4]{{0}} reduce-scatter(%rows), {GROUP}, dimensions={{0}},\
 to_apply=%whole_maximum
  %first = s32[1]{{0}} slice(%own), slice={{[0:1]}}
  %number = s32[] reshape(%first)
  %limit = s32[] constant(4)
  %is_within = pred[] compare(%number, %limit), direction=LT
  %mask = pred[8]{{0}} broadcast(%is_within), dimensions={{}}
  %zero = f32[] constant(0)
  %zeros = f32[8]{{0}} broadcast(%zero), dimensions={{}}
  ROOT %y = f32[8]{{0}} select(%mask, %negated, %zeros)
"""
    assert verdict_of(whole, partitioned) != "proved"


@pytest.mark.parametrize(
    "dtype, number, rounded, limit",
    [("s32", "257", "bf16", 256), ("f32", "1.001", "bf16", 1), ("s32", "5", "f32", 4)],
)
def test_a_mask_of_numbers_is_rounded_as_on_a_device(dtype, number, rounded, limit):
    whole = """
  %x = f32[8]{0} parameter(0), sharding={replicated}
  ROOT %y = f32[8]{0} negate(%x)
"""
    partitioned = f"""
  %x = f32[8]{{0}} parameter(0), sharding={{replicated}}
  %negated = f32[8]{{0}} negate(%x)
  %number = {dtype}[] constant({number})
  %rounded = {rounded}[] convert(%number)
  %limit = {rounded}[] constant({limit})
  %is_above = pred[] compare(%rounded, %limit), direction=GT
  %mask = pred[8]{{0}} broadcast(%is_above), dimensions={{}}
  %zero = f32[] constant(0)
  %zeros = f32[8]{{0}} broadcast(%zero), dimensions={{}}
  ROOT %y = f32[8]{{0}} select(%mask, %negated, %zeros)
"""
    assert (verdict_of(whole, partitioned) == "proved") == (rounded == "f32")
