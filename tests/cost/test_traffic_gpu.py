"""What GPUs send, from the texts of programs that XLA compiled for eight H200, with JAX 0.12 and no GPU at hand."""

from pathlib import Path

import pytest

from shardfx import MeshSpec
from shardfx.cost import traffic


HLO = Path(__file__).parents[1] / "data" / "hlo"
MESH = MeshSpec({"data": 2, "tensor": 4})
MIB = 2**20


def read(name, mesh=MESH):
    return traffic((HLO / f"{name}.txt").read_text(), mesh)


def listed(made):
    return sorted((row.kind, row.axes, row.wire_bytes, row.calls, row.leaf) for row in made.rows)


def test_every_kind_on_a_gpu_sends_what_it_does_on_a_cpu():
    assert [row[:4] for row in listed(read("gpu_kinds"))] == [row[:4] for row in listed(read("cpu_kinds"))]
    assert read("gpu_kinds").by("axes") == read("cpu_kinds").by("axes")


def test_what_a_fusion_begins_to_slice_is_still_the_weight():
    # A GPU begins the slice of a layer's weight (`fusion-start`), and gathers what is there when it ends.
    made = read("gpu_nested_loops")
    assert listed(made) == [
        ("all-gather", ("tensor",), 6 * 256 * 256 * 4 * 3 // 4, 6, "w"),
        ("all-reduce", ("data",), 2 * 4 // 2, 1, None),
    ]
    row = made.rows[0]
    assert row.source is not None and row.source.file == "/home/me/step.py"


def test_a_gradient_that_is_scattered_and_then_begun_to_be_added_up_is_of_its_weight():
    made, weight = read("gpu_gathered_weights"), 2048 * 8192 * 4
    sums = 2 * (weight // 4) // 2
    assert [row for row in listed(made) if row[4]] == [
        ("all-gather", ("tensor",), weight * 3 // 4, 1, "down"),
        ("all-gather", ("tensor",), weight * 3 // 4, 1, "up"),
        ("all-reduce", ("data",), sums, 1, "down"),
        ("all-reduce", ("data",), sums, 1, "up"),
        ("reduce-scatter", ("tensor",), weight * 3 // 4, 1, "down"),
        ("reduce-scatter", ("tensor",), weight * 3 // 4, 1, "up"),
    ]
    assert made.by("leaf")[None] == 2 * (1024 // 2 * 2048 * 4 * 3 // 4)  # the activations


def test_weights_that_are_gathered_together_have_their_own_bytes():
    # The compiler joins what it gathers of a layer, and what it scatters, into one collective of two arrays.
    made = read("gpu_scanned_layers")
    half = 1024 * 256 * 2 // 2  # of a layer's weight that is whole along data, what one of two devices lacks
    for row in made.rows:
        if row.kind != "all-reduce":
            assert row.calls == 6 and row.axes == ("data",) and row.dtype == "bf16"
            assert dict(row.shares) == {"up": 6 * half, "down": 6 * half}
    assert made.by("leaf") == {"up": 3 * 6 * half, "down": 3 * 6 * half, None: 9 * MIB}


def test_a_loop_without_an_end_and_a_branch():
    made = read("gpu_branches")
    assert listed(made) == [
        ("all-gather", ("tensor",), 1024 * 1024 * 4 * 3 // 4, 1, "w"),
        ("all-reduce", ("data",), 4, None, None),
    ]
    assert "the trips of a loop are not known and count once: %while" in str(made)


def test_a_permute_that_is_sent_and_received_counts_once_a_trip():
    # Six of eight devices receive a shard of 256 x 256 in each of five trips.
    assert listed(read("gpu_permute_sent_and_received")) == [
        ("collective-permute", ("tensor",), 5 * 256 * 256 * 4 * 6 // 8, 5, None)
    ]


@pytest.mark.parametrize("name, across", [("gpu_kinds", (32 + 4) * 1024), ("gpu_gathered_weights", 2 * 16 * MIB)])
def test_what_crosses_nodes(name, across):
    # Each of two nodes holds a group of `tensor`. Of what all eight scatter, a node takes in what four devices keep.
    made = read(name, MeshSpec({"data": 2, "tensor": 4}, dcn={"data": 2}))
    assert made.wire_bytes == read(name).wire_bytes
    assert made.dcn_bytes == across and all("data" in row.axes for row in made.rows if row.dcn_bytes)
