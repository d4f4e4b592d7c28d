"""Texts of compiled programs that the tests of `traffic` read."""

from shardfx import MeshSpec


MESH, SLICED = (
    MeshSpec({"data": 2, "tensor": 4}, dcn={"data": slices}) for slices in (1, 2)
)


def one(line, n):
    """The text of a program of one instruction. The groups of a collective have device
    numbers by default.
    """
    if "replica_groups=" in line and "channel_id" not in line:
        is_flat = any(
            kind in line for kind in ("all-gather", "all-reduce", "reduce-scatter")
        )
        line += (
            ", channel_id=1, use_global_device_ids=true"
            if is_flat
            else ", channel_id=1"
        )
    if "source_target_pairs=" in line and "channel_id" not in line:
        line += ", channel_id=1"
    return (
        f"HloModule m, num_partitions={n}\n\nENTRY %main (p: f32[4]) -> f32[4] {{\n "
        f" {line}\n}}\n"
    )


ALL = "channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true"
