import operator

from hypothesis import given, settings, strategies as st

from shardfx.cost import traffic
from tests.cost.compiled_texts import ALL


LOOP = """HloModule m, num_partitions=4

%apart (p: f32[64]) -> f32[16] {
  %p = f32[64]{0} parameter(0)
  ROOT %rs = f32[16]{0} reduce-scatter(%p), channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true
}

%body (c: (s32[], f32[64])) -> (s32[], f32[64]) {
  %c = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[64]{0} get-tuple-element(%c), index=1
  %s = ((f32[64]{0}), f32[16]{0}) async-start(%x), calls=%apart
  %d = f32[16]{0} async-done(%s), calls=%apart
  %g = (f32[16], f32[64]) all-gather-start(%d), channel_id=2, replica_groups=[1,4]<=[4], use_global_device_ids=true
  %e = f32[64]{0} all-gather-done(%g)
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[64]{0}) tuple(%j, %e)
}

%condition (c: (s32[], f32[64])) -> pred[] {
  %c = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(COUNT)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0), metadata={op_name="x"}
  %zero = s32[] constant(2)
  %t = (s32[], f32[64]{0}) tuple(%zero, %x)
  %w = (s32[], f32[64]{0}) while(%t), condition=%condition, body=%body
  ROOT %r = f32[64]{0} get-tuple-element(%w), index=1
}
"""
ADDED = "%j = s32[] add(%i, %one)"
# A TPU's compiler keeps the counter of some loops in another memory.
MOVED = [
    "%k = s32[] add(%i, %one)",
    "%c0 = (s32[], s32[], u32[]) copy-start(%k)",
    "%j = s32[] copy-done(%c0)",
]


def test_asynchronous_operations_on_a_gpu_count_once_a_trip():
    for added in (
        ADDED,
        "\n  ".join(MOVED),
        f"{MOVED[0]}\n  %j = s32[] copy(%k)",
        "%j = s32[] add(%one, %i)",
    ):
        replaced = LOOP.replace(ADDED, added).replace("COUNT", "7")
        sent = traffic(replaced)
        actual = {row.kind: (row.calls, row.wire_bytes) for row in sent.rows}
        expected = {
            "reduce-scatter": (5, 5 * 3 * 64),
            "all-gather": (5, 5 * 3 * 64),
        }
        assert actual == expected
    # Five trips ask six times.
    asked = LOOP.replace("%n =", f"%q = f32[64] all-reduce(%x), {ALL}\n  %n =").replace(
        "COUNT", "7"
    )
    actual = [
        (row.kind, row.wire_bytes) for row in traffic(asked).rows if row.calls == 6
    ]
    assert actual == [("all-reduce", 6 * 384)]
    counted_loop = LOOP.replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"9"}}'
    )
    assert {row.calls for row in traffic(counted_loop).rows} == {9}


TURNS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "NE": operator.ne,
}


@given(
    st.sampled_from(sorted(TURNS)),
    st.integers(-6, 9),
    st.integers(-3, 3),
    st.sampled_from(["add", "subtract"]),
)
@settings(deadline=None)
def test_a_loop_runs_as_often_as_its_counter_says(direction, stop, step, update):
    text = LOOP.replace("direction=LT", f"direction={direction}").replace(
        "COUNT", str(stop)
    )
    text = text.replace("%one = s32[] constant(1)", f"%one = s32[] constant({step})")
    text = text.replace("s32[] add", f"s32[] {update}")
    counter = 2
    trips = 0
    while TURNS[direction](counter, stop) and trips < 50:
        counter = counter + (step if update == "add" else -step)
        trips = trips + 1
    calls = {row.calls for row in traffic(text).rows}
    assert calls == {trips if trips < 50 else None}
