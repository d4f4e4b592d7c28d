import dataclasses

import jax
import jax.numpy as jnp
import pytest

from shardfx import auto, chips, topology
from shardfx.chips import _chip
from shardfx.errors import ChipError, MeshError


@pytest.mark.parametrize(
    "name, asked",
    [
        ("v5p", ["v5p", "TPU v5"]),
        ("v5e", ["TPU v5 lite", "tpu:v5e:4x4", "v5litepod"]),
        ("v6e", ["V6E", "Trillium"]),
        ("v7x", ["TPU7x", "ironwood", "tpu:v7x:4x4x4"]),
        ("h100", ["NVIDIA H100 80GB HBM3", "H100_SXM"]),
        ("h200", ["nvidia h200", "NVIDIA H200 141GB HBM3e"]),
        ("a100", ["A100-SXM4-80GB"]),
        ("mi300x", ["AMD Instinct MI300X"]),
    ],
)
def test_a_chip_is_found_by_the_names_that_people_and_jax_use(name, asked):
    assert {chips.find(spelling).name for spelling in asked} == {name}
    assert chips.find(chips.find(name)) is chips.find(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "v5q",
            (
                r"no chip 'v5q'; did you mean v5.*There are v2, .*mi300x. Make your own"
                r" with `shardfx.chips.Chip"
            ),
        ),
        ("abacus", "no chip 'abacus'. There are v2"),
        # A card of another form factor has other numbers.
        (
            "NVIDIA H100 PCIe",
            "did you mean",
        ),
    ],
)
def test_an_unknown_chip_names_near_ones(name, message):
    with pytest.raises(ChipError, match=message):
        chips.find(name)


@pytest.mark.parametrize("chip", chips.CHIPS, ids=lambda chip: chip.name)
def test_every_number_has_a_source_and_a_size_that_can_be(chip):
    numbers = [
        field.name
        for field in dataclasses.fields(chip)
        if field.name not in ("name", "kinds", "sources")
    ]
    for name in numbers:
        assert chip.source(name)
    assert 0.9 < chip.usable_hbm_bytes / chip.hbm_bytes <= 1
    assert 3e11 < chip.hbm_bytes_per_second < 1e13
    # What leaves a chip is slower than its memory and faster than the network between
    # hosts.
    assert (
        chip.dcn_bytes_per_second
        < chip.links * chip.link_bytes_per_second
        < chip.hbm_bytes_per_second
    )
    assert chip.flops("bfloat16") > 1e13
    assert (
        chip.usable_hbm_bytes_per_device * chip.devices_per_chip
        <= chip.usable_hbm_bytes
    )
    assert hash(chip) == hash(dataclasses.replace(chip))


def test_each_name_is_of_one_chip():
    names = []
    for chip in chips.CHIPS:
        names += [chip.name, *chip.kinds]
    assert len(names) == len(set(names))
    for chip in chips.CHIPS:
        if chip.torus_dims:
            assert any(
                any(topology.wraps(kind, (16, 16, 16))) or kind == "TPU v3"
                for kind in chip.kinds
            ), chip.name


def test_peaks_by_dtype():
    v7x = chips.find("v7x")
    assert v7x.flops(jnp.bfloat16) == v7x.flops("float16") == 2307e12
    assert v7x.flops(jnp.float8_e4m3fn) == v7x.flops("float8") == 4614e12
    assert chips.find("b200").flops(jnp.float4_e2m1fn) == 9000e12
    with pytest.raises(
        ChipError,
        match="'v4': no peak is known for float8; there are bfloat16, int8. Add one",
    ):
        chips.find("v4").flops(jnp.float8_e5m2)
    with pytest.raises(
        ChipError, match="'bfloat17' is no dtype of JAX; write it as in"
    ):
        chips.find("v4").flops("bfloat17")


def test_users_make_their_own_and_the_table_has_a_line_for_each():
    mine = dataclasses.replace(
        chips.find("h100"), name="mine", usable_hbm_bytes=60 * 2**30
    )
    assert "60.0 of 80.0 GiB" in chips.table((mine,))
    assert "h100" not in chips.table((mine,))
    with pytest.raises(ChipError, match="are more than it has"):
        dataclasses.replace(mine, usable_hbm_bytes=81 * 2**30)
    with pytest.raises(
        ChipError, match="`devices_per_chip` must be more than 0, not 0"
    ):
        dataclasses.replace(mine, devices_per_chip=0)
    lines = chips.table().splitlines()
    assert len(lines) == 1 + len(chips.CHIPS)
    (line,) = [line for line in lines if line.startswith("v5p")]
    expected = [
        "v5p",
        "95.7",
        "of",
        "96.0",
        "GiB",
        "2.77",
        "TB/s",
        "459",
        "TFLOP/s",
        "6",
    ]
    assert line.split()[:10] == expected


@pytest.mark.parametrize(
    ("text", "name", "devices"),
    [
        ("tpu:v5e:4x4", "tpu:v5e:4x4", 16),
        ("v5p:4x4x8", "tpu:v5p:4x4x8", 128),
        ("TPU v5 lite:2x2", "tpu:v5e:2x2", 4),
        ("v5e-8", "tpu:v5e:2x4", 8),
        ("v5litepod-16", "tpu:v5e:4x4", 16),
        ("v4-32", "tpu:v4:2x2x4", 16),
        ("v3-8", "tpu:v3:2x2", 8),
        ("nvidia:h100:64", "h100:64", 64),
        ("gpu:h100:8", "h100:8", 8),
    ],
)
def test_slices_by_name(text, name, devices):
    slice_ = chips.parse_slice(text)
    assert slice_.name == name
    assert slice_.devices == devices
    assert slice_.chip == chips.find(text)


@pytest.mark.parametrize("prefix", ["", "gpu:", "nvidia:"])
def test_nodes_of_gpus_by_name(prefix):
    assert chips.find(f"{prefix}h100:8*2") is chips.find("h100")
    weight = jax.ShapeDtypeStruct((1024,), "float32")
    mesh = auto.plan({"w": weight}, f"{prefix}h100:8*2").mesh
    assert mesh.size == 16
    assert mesh.dcn_sizes == (2,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "v5e:32x32",
            (
                r"has 1,024 chips, and a pod of v5e is 16x16; take several slices, as"
                r' `"tpu:v5e:8x8\*2"`'
            ),
        ),
        ("v5e:1x32", "has 32 chips, and a pod of v5e is 16x16"),
        ("tpu:v5p:4x4x4x4", "v5p has 3 dimensions, as in 4x4x4, and this has 4"),
        ("v5p:32x32x32", "has 32,768 chips, and a pod of v5p is 8,960 chips"),
        ("v5e-512", "has 512 chips, and a pod of v5e is 16x16"),
        ("v4-9", "v4 has 2 cores a chip, and 9 cores are no whole chips"),
        (
            "v5p",
            (
                "'v5p' is no slice; write it as `tpu:v5p:4x4x4`, or as clouds do:"
                " `v5e-16` has 16 chips"
            ),
        ),
        ("v5e:4x0", "'v5e:4x0' is no slice"),
        (None, "a slice is named by a text, not None: write `tpu:v5p:4x4x4`"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_slices_that_do_not_exist(text, message):
    with pytest.raises(MeshError, match=message):
        chips.parse_slice(text)


@pytest.mark.parametrize("extents", [(4, 4), (8, 16), (16, 16)])
def test_an_axis_over_a_slice_has_the_links_of_its_rows(
    extents,
):
    chip = chips.find("v5e")
    network = _chip.average_network(chip, extents)
    sizes = {"data": extents[0] * extents[1]}
    (rings,) = _chip.axes_on(chip, extents, sizes).values()
    actual = network.bytes_per_second * network.dims
    assert actual == chip.link_bytes_per_second * sum(ring.links for ring in rings)
    actual = [ring.closed for ring in rings].count(True)
    assert actual == extents.count(16)


def test_the_slice_of_so_many_devices():
    assert _chip.extents_of(chips.find("v5e"), 8) == (2, 4)
    assert _chip.extents_of(chips.find("v3"), 32) == (4, 4)
    extents = _chip.extents_of(chips.find("v5p"), 64)
    assert extents == (4, 4, 4)
    assert _chip.extents_of(chips.find("h100"), 64) == (64,)


@pytest.mark.parametrize("name", ["hbm", "link", "dcn"])
def test_a_bandwidth_is_more_than_0(name):
    field = f"{name}_bytes_per_second"
    with pytest.raises(ChipError, match=f"`{field}` must be more than 0, not 0"):
        dataclasses.replace(chips.find("v5p"), **{field: 0})
