"""Operations of two devices of which the judge knows no more than what they take."""

import pytest
from judging import verdict_of_texts
from test_judge_by_hand import GROUP, module, named, verdict_of


CUT = "sharding={devices=[2]<=[2]}"
ROWS = "sharding={devices=[2,1]<=[2]}"
REPLICATED = "sharding={replicated}"


def test_a_scalar_of_a_custom_call_needs_all_elements():
    def called(size: int) -> str:
        return f"""
  %x = f32[{size}]{{0}} parameter(0), {CUT}
  ROOT %y = f32[] custom-call(%x), custom_call_target="norm"
"""

    assert verdict_of(called(8), called(4)) != "proved"


def test_a_custom_call_within_a_named_scope_is_what_it_is():
    def called(rows: int) -> str:
        return f"""
  %x = f32[{rows},4]{{1,0}} parameter(0), {ROWS}
  ROOT %y = f32[{rows},4]{{1,0}} custom-call(%x), custom_call_target="solve", {ROWS},\
 {named("TopK/solve")}
"""

    assert verdict_of(called(8), called(4)) != "proved"


@pytest.mark.parametrize("size, outcome", [(8, True), (4, False)])
def test_a_generator_of_fewer_bits_has_another_state(size, outcome):
    def drawn(size: int) -> str:
        return f"""
  %state = u64[2]{{0}} parameter(0), {REPLICATED}
  %drawn = (u64[2]{{0}}, u32[{size}]{{0}}) rng-bit-generator(%state),\
 algorithm=rng_default, {named("drawn")}
  ROOT %after = u64[2]{{0}} get-tuple-element(%drawn), index=0
"""

    assert (verdict_of(drawn(8), drawn(size)) == "proved") == outcome


def test_generators_of_more_and_fewer_bits_have_two_states():
    def drawn(bits: str) -> str:
        return f"""
  %state = u64[2]{{0}} parameter(0), {REPLICATED}
  %few = (u64[2]{{0}}, u32[4]{{0}}) rng-bit-generator(%state), algorithm=rng_default
  %many = (u64[2]{{0}}, u32[8]{{0}}) rng-bit-generator(%state), algorithm=rng_default
  %after.few = u64[2]{{0}} get-tuple-element(%few), index=0
  %after.many = u64[2]{{0}} get-tuple-element(%many), index=0
  ROOT %y = u64[2]{{0}} subtract(%after.many, %after.{bits})
"""

    assert verdict_of(drawn("few"), drawn("few")) == "proved"
    assert verdict_of(drawn("few"), drawn("many")) != "proved"


def test_a_permute_without_a_channel_is_between_replicas():
    # Each device is replica 0, and sends to itself.
    whole = f"""
  %x = f32[4]{{0}} parameter(0), {REPLICATED}
  ROOT %y = f32[4]{{0}} negate(%x)
"""
    partitioned = f"""
  %x = f32[4]{{0}} parameter(0), {REPLICATED}
  %negated = f32[4]{{0}} negate(%x)
  %sent = f32[4]{{0}} collective-permute(%negated), CHANNELsource_target_pairs={{{{0,0}}}}
  ROOT %y = f32[4]{{0}} all-reduce(%sent), {GROUP}, to_apply=%sum
"""
    with_channel = partitioned.replace("CHANNEL", "channel_id=2, ")
    assert verdict_of(whole, with_channel) == "proved"
    assert verdict_of(whole, partitioned.replace("CHANNEL", "")) != "proved"


# The body of a `shard_map` with a kernel whose code is in its options.
KERNEL = """
%body (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %y = f32[4]{0} custom-call(%x), custom_call_target="kernel",\
 backend_config={"code"="CODE"}
}

ENTRY"""
MAPPED = f"""
  %x = f32[8]{{0}} parameter(0), {CUT}
  %x.1 = f32[8]{{0}} copy(%x), {CUT}
  %part = f32[4]{{0}} custom-call(%x.1), custom_call_target="SPMDFullToShardShape",\
 sharding={{manual}}
  %called = f32[4]{{0}} call(%part), to_apply=%body
  %called.1 = f32[4]{{0}} copy(%called), sharding={{manual}}
  ROOT %y = f32[8]{{0}} custom-call(%called.1),\
 custom_call_target="SPMDShardToFullShape", {CUT}
"""
MAPPED_PART = f"""
  %x = f32[4]{{0}} parameter(0), {CUT}
  ROOT %y = f32[4]{{0}} call(%x), to_apply=%body
"""


@pytest.mark.parametrize("code, outcome", [("a", True), ("b", False)])
def test_kernels_with_other_options_are_others(code, outcome):
    whole = module(MAPPED).replace("\nENTRY", KERNEL.replace("CODE", "a"))
    partitioned = module(MAPPED_PART).replace("\nENTRY", KERNEL.replace("CODE", code))
    verdict = verdict_of_texts(whole, partitioned)
    assert (verdict.outcome == "proved") == outcome


# A `shard_map` over the first axis of a mesh of two by two devices alone.
PARTS = "sharding={devices=[1,1,2,2]<=[4] last_tile_dims={manual,replicated}}"
FIRST = "sharding={devices=[2,1,2]<=[4] last_tile_dim_replicate}"
SLICED_PART = f"""HloModule whole, num_partitions=4

%body (x: f32[4,8]) -> f32[2,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  %rows = f32[2,8]{{1,0}} slice(%x), slice={{[1:3], [0:8]}}
  ROOT %y = f32[2,8]{{1,0}} negate(%rows)
}}

ENTRY %main {{
  %x = f32[8,8]{{1,0}} parameter(0), {FIRST}
  %part = f32[4,8]{{1,0}} custom-call(%x), custom_call_target="SPMDFullToShardShape",\
 {PARTS}
  %called = f32[2,8]{{1,0}} call(%part), to_apply=%body
  %called.1 = f32[2,8]{{1,0}} copy(%called), {PARTS}
  ROOT %y = f32[4,8]{{1,0}} custom-call(%called.1),\
 custom_call_target="SPMDShardToFullShape", {FIRST}
}}
"""
NEGATED_PART = f"""HloModule partitioned, num_partitions=4

%body_spmd (x: f32[4,8]) -> f32[2,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  %negated = f32[4,8]{{1,0}} negate(%x)
  %moved = f32[4,8]{{1,0}} collective-permute(%negated), channel_id=1,\
 source_target_pairs=PAIRS
  ROOT %y = f32[2,8]{{1,0}} slice(%moved), slice={{[1:3], [0:8]}}
}}

ENTRY %main {{
  %x = f32[4,8]{{1,0}} parameter(0), {FIRST}
  ROOT %y = f32[2,8]{{1,0}} call(%x), to_apply=%body_spmd
}}
"""


@pytest.mark.parametrize(
    "pairs, outcome",
    [("{{0,1},{1,0},{2,3},{3,2}}", True), ("{{0,2},{2,0},{1,3},{3,1}}", False)],
)
def test_what_a_part_computes_stays_within_the_part(pairs, outcome):
    verdict = verdict_of_texts(SLICED_PART, NEGATED_PART.replace("PAIRS", pairs))
    assert (verdict.outcome == "proved") == outcome
