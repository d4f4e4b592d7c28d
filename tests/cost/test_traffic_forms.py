"""The traffic of collectives in every HLO notation for replica groups, against a count
for each device.
"""

import re
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx import MeshSpec
from shardfx._step import KINDS
from shardfx.cost import traffic
from shardfx.errors import MeshError, ProgramError


HLO = Path(__file__).parents[1] / "data" / "hlo"
GROUPED = sorted(set(KINDS) - {"collective-permute"})
FLAT = ("all-gather", "all-reduce", "reduce-scatter")
SIZE = 64  # bytes of a result


def program(line, devices=1):
    return (
        f"HloModule m, num_partitions={devices}\n\nENTRY %main (p: f32[4]) -> f32[4]"
        f" {{\n  {line}\n}}\n"
    )


def received(kind, rows, devices):
    """The bytes that a device receives, as the mean over devices."""
    # In an all-reduce, a device takes in its piece of the sum from each, then the other
    # pieces. What a reduce-scatter returns is one piece.
    times = {"all-reduce": lambda count: 2, "reduce-scatter": lambda count: count}.get(
        kind, lambda count: 1
    )
    total = sum(SIZE * (len(row) - 1) * times(len(row)) for row in rows)
    return Fraction(total, devices)


@st.composite
def drawn(draw):
    """The text of a collective, the number of devices, and the bytes that a device
    receives.

    Without a channel, each device is its own replica group.
    """
    kind = draw(st.sampled_from(GROUPED))
    devices = draw(st.sampled_from([1, 2, 3, 4, 8]))
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    size = draw(st.sampled_from(sizes))
    form = draw(
        st.sampled_from(
            ["empty", "listed", "uneven", "iota", "swapped", "mesh", "alone"]
        )
    )
    order = list(range(devices))
    if form in ("listed", "uneven"):
        order = draw(st.permutations(order))
    if form == "swapped":
        columns = np.arange(devices).reshape(size, devices // size)
        order = columns.T.ravel().tolist()
    rows = [order[start : start + size] for start in range(0, devices, size)]
    if form in ("empty", "alone"):
        if form == "empty":
            rows = [order]
        else:
            rows = [[device] for device in order]
    if form == "uneven" and kind in FLAT and devices > 2:
        rows = [order[:1], order[1:]]
    listed = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}"
    text = {
        "empty": draw(st.sampled_from(["replica_groups={}, ", ""])),
        "alone": "replica_groups={{0}}, ",
        "iota": f"replica_groups=[{devices // size},{size}]<=[{devices}], ",
        "swapped": (
            f"replica_groups=[{devices // size},{size}]<=[{size},{devices // size}]T(1,0), "
        ),
        "mesh": f"replica_groups=mesh['a'={devices // size},'b'={size}] {{'b'}}, ",
    }.get(form, f"replica_groups={listed}, ")
    # Those that say whose their numbers are need no word where all devices are one
    # group.
    flat = kind in FLAT and form != "alone" and (form != "empty" or draw(st.booleans()))
    channel = "" if form == "alone" else "channel_id=7, "
    line = f"%g = f32[16]{{0}} {kind}(%p), {text}{channel}use_global_device_ids={flat}".lower()
    return line, devices, received(kind, rows, devices)


@given(drawn())
@settings(max_examples=120, deadline=None)
def test_groups_of_devices_against_a_count_device_by_device(case):
    line, devices, right = case
    (row,) = traffic(program(line, devices)).rows
    assert row.wire_bytes == round(right), line


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("[2,4]<=[2,4]", ("tensor",)),
        ("[2,4]<=[8]", ("tensor",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
    ],
)
def test_groups_from_a_count_in_several_dimensions(groups, axes):
    mesh = MeshSpec({"data": 2, "tensor": 4})
    line = f"%g = f32[16] all-gather(%p), channel_id=7, replica_groups={groups}"
    line += ", use_global_device_ids=true"
    (row,) = traffic(program(line, 8), mesh).rows
    assert row.axes == axes


@given(st.integers(2, 5), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_permutes(devices, channel, data):
    targets = data.draw(st.permutations(range(devices)))
    if channel:
        senders = data.draw(st.lists(st.integers(0, devices - 1), unique=True))
        pairs = [(source, targets[source]) for source in senders]
    else:
        pairs = [(0, 0)]
    text = ",".join(f"{{{source},{target}}}" for source, target in pairs)
    line = (
        "%c = (f32[12], s8[16]) collective-permute(%p, %q),"
        f" source_target_pairs={{{text}}}"
    )
    sent = traffic(program(line + (", channel_id=1" if channel else ""), devices))
    (row,) = sent.rows
    moved = sum(source != target for source, target in pairs)
    assert row.wire_bytes == round(Fraction(64 * moved, devices))


ALL = "channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true"


@pytest.mark.parametrize(
    "line, words",
    [
        (
            f"%r = f32[8] all-reduce(%x), {ALL.replace('[1,4]<=[4]', '{{0,7}}')}",
            "names number 7",
        ),
        (
            "%r = f32[8] all-reduce(%x), channel_id=1, replica_groups={{0},{1}}",
            "the program has 1 of what it names",
        ),
        (
            "%r = f32[8] all-to-all(%x), channel_id=1, replica_groups={{0,1},{1,2}}",
            "names a device twice",
        ),
        (f"%r = q8[8] all-gather(%x), {ALL}", r"size of `q8\[8\]` is not known"),
        (f"%r = f32[?] all-gather(%x), {ALL}", r"size of `f32\[\?\]` is not known"),
        (
            "%r = token[] all-gather(%x), channel_id=1, replica_groups=[4]<=[4]",
            "groups of a collective cannot be read",
        ),
        (f"%r = () all-gather(%x), {ALL}", "does not say what it sends"),
        (
            "%r = (f32[64], u32[], token[]) recv(%t), channel_id=1",
            "a kind that is not known, `recv`",
        ),
        (
            "%u = f32[8]{0} all-shuffle(%x), replica_groups={{0,1}}",
            "a kind that is not known, `all-shuffle`",
        ),
        (
            '%u = f32[8]{0} custom-call(%x), channel_id=4, custom_call_target="mine"',
            "not known, `custom-call`",
        ),
        ("%u = f32[8]{0} collective-quantum(%x)", "not known, `collective-quantum`"),
        (
            "%r = f32[8] collective-permute(%t), channel_id=1",
            "does not say who sends to whom",
        ),
        (
            (
                "%r = (f32[8], u32[], token[]) recv(%t), is_host_transfer=true,"
                " frontend_attributes={"
                '_xla_megascale_target={{100000->200000}},_xla_megascale_transfer_type="SHUFFLE"}'
            ),
            "does not say what goes whither",
        ),
    ],
)
def test_what_cannot_be_counted_is_an_error_with_its_line(line, words):
    with pytest.raises(ProgramError, match=words) as caught:
        traffic(program(line, 4))
    assert line.partition("(")[0] in str(caught.value)


def test_a_ragged_exchange_has_unknown_sizes():
    line = (
        "%r = s8[16]{0} ragged-all-to-all(%x, %o, %a, %b, %c, %d), channel_id=1,"
        " replica_groups={{0,1,2,3}}"
    )
    (row,) = traffic(program(line, 4)).rows
    assert row.wire_bytes == 12
    assert "a ragged exchange sends what its sizes say" in row.note
    with pytest.raises(
        ProgramError,
        match="runs as 4 replicas, as `jax.pmap` once wrote it; write the step for",
    ):
        traffic(program(line, 4).replace("HloModule m", "HloModule m, replica_count=4"))


def test_a_kernel_that_communicates_is_an_error():
    # Its attributes go over several lines, one of which begins with a bracket.
    text = (HLO / "tpu_kernel_that_sends.txt").read_text()
    with pytest.raises(
        ProgramError,
        match=(
            r"not known, `custom-call`, so its traffic .* %shard_map.12 = f32\[8,128\]"
        ),
    ):
        traffic(text)
    assert (
        traffic(
            text.replace('"has_communication":true', '"has_communication":false')
        ).rows
        == ()
    )
    with pytest.raises(ProgramError, match="cut off after: %shard_map.12"):
        traffic(text[: text.index("}}, metadata=")])


SLICES = MeshSpec({"dcn": 2, "ici": 4}, dcn={"dcn": 2})


def test_a_step_on_two_slices_of_tpus_whose_text_is_that_of_one():
    # Batch over all, a weight of 1,024 x 1,024 over the devices of a slice: it is
    # gathered there in bf16, its gradient scattered there, and a quarter of it added up
    # between slices.
    text = (HLO / "tpu_two_slices.txt").read_text()
    sent = traffic(text, SLICES)
    weight = 1024 * 1024
    actual = [
        (row.kind, row.axes, row.wire_bytes, row.dcn_bytes, row.leaf)
        for row in sent.rows
    ]
    expected = [
        ("reduce-scatter", ("ici",), weight * 4 * 3 // 4, 0, "w"),
        ("all-gather", ("ici",), weight * 2 * 3 // 4, 0, "w"),
        ("all-reduce", ("dcn",), 2 * weight // 4 * 4 // 2, weight // 4 * 4, "w"),
    ]
    assert actual == expected
    assert sent.devices == 8
    actual = {row.source and row.source.line for row in sent.rows}
    assert actual == {23}


ONE_DEVICE_A_SLICE = """HloModule m

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %t = token[] after-all()
  %r = (f32[8]{0}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true, \
frontend_attributes={_xla_megascale_target={{100000->200000},{200000->100000}},\
_xla_megascale_transfer_type="ONE_TO_ONE"}
  ROOT %c = f32[8]{0} copy(%p)
}
"""


def test_an_exchange_between_slices_of_one_device_each():
    mesh = MeshSpec({"d": 2}, dcn={"d": 2})
    (row,) = traffic(ONE_DEVICE_A_SLICE, mesh).rows
    assert (row.axes, row.dcn_bytes) == (("d",), 32)
    (row,) = traffic(ONE_DEVICE_A_SLICE).rows
    assert (row.axes, row.dcn_bytes) == ((), 32)
    with pytest.raises(MeshError, match="runs on 2 devices, and the mesh"):
        traffic(ONE_DEVICE_A_SLICE, MeshSpec({"d": 3}))


def test_a_transfer_between_the_last_two_of_three_slices():
    (line,) = [line for line in ONE_DEVICE_A_SLICE.splitlines() if "recv" in line]
    later = line.replace("%r", "%s").replace("200000", "300000")
    later = later.replace("100000", "200000")
    text = ONE_DEVICE_A_SLICE.replace(line, f"{line}\n{later}")
    mesh = MeshSpec({"d": 3}, dcn={"d": 3})
    first, last = traffic(text, mesh).rows
    assert first.pairs == ((0, 1), (1, 0))
    assert last.pairs == ((1, 2), (2, 1))


def test_exchanges_with_the_own_and_another_slice():
    # 64 x 256 f32 from rows over (ici, dcn) to rows over dcn and columns over ici. What
    # each slice does differently is in branches, of which every one runs.
    sent = traffic((HLO / "tpu_exchange_between_slices.txt").read_text(), SLICES)
    shard = 64 * 256 * 4 // 8
    actual = sorted(
        (row.kind, row.axes, row.wire_bytes, row.dcn_bytes, row.calls)
        for row in sent.rows
    )
    expected = [
        ("all-to-all", ("dcn", "ici"), shard * 3 // 4, shard // 2, 1),
        ("collective-permute", ("dcn", "ici"), shard // 2, shard // 2, 1),
        # One of four devices in each slice.
        (
            "collective-permute",
            ("ici",),
            shard // 8,
            0,
            1,
        ),
        ("collective-permute", ("ici",), shard // 8, 0, 1),
    ]
    assert actual == expected
    text = (HLO / "tpu_exchange_between_slices.txt").read_text()
    local = re.sub(r"^.* (send|recv)(-done)?\(.*\n", "", text, flags=re.MULTILINE)
    assert traffic(local).devices == 8  # the branches say how many slices there are


def test_collectives_of_loop_conditions_and_branches_count():
    mesh = MeshSpec({"x": 8}).build(jax.devices())
    whole = NamedSharding(mesh, P())
    rows = NamedSharding(mesh, P("x"))

    def step(flag, w, x):
        product = jax.lax.cond(
            flag > 0,
            lambda w, x: x @ jax.lax.with_sharding_constraint(w, whole),
            lambda w, x: x,
            w,
            x,
        )

        def asked(x):
            go = lambda c: (jax.lax.pmax(c[1], "x").max() * 0 + c[0]) < 5
            return jax.lax.while_loop(
                go, lambda c: (c[0] + 1, jnp.cos(c[1])), (0.0, x)
            )[1]

        return jax.shard_map(
            asked,
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
            check_vma=False,
        )(product)

    w, x = (
        jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=where)
        for where in (rows, rows)
    )
    struct = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    lowered = jax.jit(step).lower(struct, w, x)
    compiled = lowered.compile()
    sent = traffic(compiled)
    actual = {(row.kind, row.calls, row.leaf) for row in sent.rows}
    expected = {
        ("all-gather", 1, "w"),
        ("all-reduce", None, None),
    }
    assert actual == expected


CALLED_TWICE = f"""HloModule m, num_partitions=4

%g (p: f32[4]) -> f32[16] {{
  ROOT %h = f32[16]{{0}} all-gather(%p), {ALL}
}}

%left (p: f32[4]) -> f32[16] {{
  ROOT %c = f32[16]{{0}} call(%p), to_apply=%g
}}

%right (p: f32[4]) -> f32[16] {{
  %c = f32[16]{{0}} call(%p), to_apply=%g
  ROOT %d = f32[16]{{0}} call(%p), to_apply=%g
}}

%both (p: f32[4]) -> f32[16] {{
  %p = f32[4]{{0}} parameter(0)
  %k = pred[] constant(true)
  ROOT %c = f32[16]{{0}} conditional(%k, %p, %p), true_computation=%left, false_computation=%right
}}

%less (p: f32[4]) -> f32[16] {{
  ROOT %a = f32[20]{{0}} all-gather(%p), {ALL}
}}

ENTRY %main (k: s32[], p: f32[4]) -> f32[16] {{
  %k = s32[] parameter(0)
  %p = f32[4]{{0}} parameter(1)
  ROOT %b = f32[16]{{0}} conditional(%k, %p, %p), branch_computations={{%both, %less}}
}}
"""


ON_SPARSE_CORE = f"""HloModule m, num_partitions=4

%scattered (p: f32[4], q: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  %q = f32[4]{{0}} parameter(1)
  ROOT %add = f32[4]{{0}} add(%p, %q)
}}, execution_thread="sparsecore"

ENTRY %main (w: f32[4], q: f32[4]) -> f32[16] {{
  %w = f32[4]{{0}} parameter(0), metadata={{op_name="w"}}
  %q = f32[4]{{0}} parameter(1), metadata={{op_name="q"}}
  %begin = ((f32[4]{{0}}, f32[4]{{0}}), f32[4]{{0}}, u32[]) call-start(%w, %q), to_apply=%scattered
  %sum = f32[4]{{0}} call-done(%begin)
  %other = f32[16]{{0}} all-gather(%sum), {ALL}
  ROOT %own = f32[16]{{0}} all-gather(%w), {ALL.replace("channel_id=1", "channel_id=2")}
}}
"""


def test_work_of_a_sparse_core_is_no_collective():
    gathers = {row.leaf: row for row in traffic(ON_SPARSE_CORE).rows}
    assert [row.kind for row in gathers.values()] == ["all-gather"] * 2
    # The sum is a computed value.
    assert gathers.keys() == {None, "w"}


def test_one_computation_in_two_branches_of_a_branch():
    # The inner right branch gathers twice and counts, the left one once, and the outer
    # one less than both.
    actual = sorted((row.calls, row.wire_bytes) for row in traffic(CALLED_TWICE).rows)
    expected = [(0, 0), (0, 0), (2, 2 * 48)]
    assert actual == expected
