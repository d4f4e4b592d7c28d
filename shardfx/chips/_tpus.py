"""The known TPUs and GPUs as `Chip` values, each number with its source."""

from typing import TypeAlias

from ._chip import Chip


# The peak rates of arithmetic by dtype.
_Peaks: TypeAlias = tuple[tuple[str, float], ...]


def _peaks(**teraflops: int) -> _Peaks:
    return tuple((name, 1e12 * count) for name, count in teraflops.items())


def _gib(count: int | float) -> int:
    return int(count * 2**30)


_DOCS = "Google Cloud TPU documentation, 2026"
_BOOK = "scaling book, table of TPUs, 2026"
_PAPER = "A Domain Specific Supercomputer (2020)"
_OOM = "secondary: the compiler's own messages where it runs out of memory"
_NOMINAL = f"{_BOOK}: 90 % of the nominal one; sources differ: the {_DOCS}, give"
_LINKS = f"{_NOMINAL} 100 GB/s a link"
_PCIE = (
    f"{_BOOK}, PCIe of v4, taken for later ones too; sources differ: 11.5 GB/s to the"
    " host and 16.4 GB/s back measured in verl#7905"
)
_HOP_SECONDS = 1e-6
_HOP = (
    "scaling book, part 3: typically around 1 us a hop; sources differ: its own"
    " measurement on v5e, a gather of 32 kB over 3 hops, took 8 us"
)
_EARLY_DCN = f"{_BOOK}: 25 GB/s a host, taken for all generations before v5"
_TPU_SOURCES = {
    "tile": (
        "the layouts that the compiler for TPUs gives arguments, T(8,128); read off"
        " compiled programs for v5e"
    ),
    "*": _DOCS,
}


def _tpu(
    *,
    name: str,
    kinds: tuple[str, ...],
    hbm_gib: int | float,
    usable_gib: int | float,
    memory_bandwidth: int | float,
    link_bandwidth: int | float,
    dcn_bandwidth: int | float,
    torus_dims: int,
    pod_chips: int,
    flops: _Peaks,
    devices: int = 1,
    host_link: int | float = 0,
    **sources: str,
) -> Chip:
    """The `Chip` of a TPU with `devices` JAX devices, whose `device_kind` is one of
    `kinds`. `hbm_gib` is nominal. Bandwidths are in bytes per second: `host_link` is
    the one to the host, 0 if it is not known. `sources` has, by a field's name, the
    source of its value.
    """
    host_source = _PCIE if host_link else "not known"
    link_source = {"host_bytes_per_second": host_source, "hop_seconds": _HOP}
    return Chip(
        name=name,
        hbm_bytes=_gib(hbm_gib),
        usable_hbm_bytes=_gib(usable_gib),
        hbm_bytes_per_second=memory_bandwidth,
        flops_per_second=flops,
        link_bytes_per_second=link_bandwidth,
        torus_dims=torus_dims,
        island_chips=pod_chips,
        dcn_bytes_per_second=dcn_bandwidth,
        devices_per_chip=devices,
        tile=(8, 128),
        kinds=kinds,
        sources=tuple((_TPU_SOURCES | link_source | sources).items()),
        host_bytes_per_second=host_link,
        hop_seconds=_HOP_SECONDS,
    )


TPUS: tuple[Chip, ...] = (
    _tpu(
        name="v2",
        kinds=("TPU v2",),
        hbm_gib=16,
        usable_gib=14.96,
        memory_bandwidth=700e9,
        link_bandwidth=62e9,
        dcn_bandwidth=6.25e9,
        torus_dims=2,
        pod_chips=256,
        flops=_peaks(bfloat16=46),
        devices=2,
        usable_hbm_bytes=f"{_OOM}: 7.48 GiB a core",
        flops_per_second=_PAPER,
        link_bytes_per_second=f"{_PAPER}: 496 Gb/s a link",
        dcn_bytes_per_second=_EARLY_DCN,
    ),
    _tpu(
        name="v3",
        kinds=("TPU v3",),
        hbm_gib=32,
        usable_gib=30.96,
        memory_bandwidth=900e9,
        link_bandwidth=82e9,
        dcn_bandwidth=6.25e9,
        torus_dims=2,
        pod_chips=1024,
        flops=_peaks(bfloat16=123),
        devices=2,
        usable_hbm_bytes=f"{_OOM}: 15.48 GiB a core",
        link_bytes_per_second=(
            f"{_PAPER}: 656 Gb/s a link; sources differ: {_BOOK}, 100 GB/s"
        ),
        dcn_bytes_per_second=_EARLY_DCN,
    ),
    _tpu(
        name="v4",
        kinds=("TPU v4",),
        hbm_gib=32,
        usable_gib=30.75,
        memory_bandwidth=1.2e12,
        link_bandwidth=45e9,
        dcn_bandwidth=6.25e9,
        torus_dims=3,
        pod_chips=4096,
        flops=_peaks(bfloat16=275, int8=275),
        host_link=16e9,
        usable_hbm_bytes=f"{_OOM}: maxtext#4117",
        link_bytes_per_second=_BOOK,
        dcn_bytes_per_second=f"{_BOOK}: 25 GB/s a host of 4 chips",
    ),
    _tpu(
        name="v5e",
        kinds=("TPU v5 lite", "TPU v5e"),
        hbm_gib=16,
        usable_gib=15.75,
        memory_bandwidth=819e9,
        link_bandwidth=45e9,
        dcn_bandwidth=3.125e9,
        torus_dims=2,
        pod_chips=256,
        flops=_peaks(bfloat16=197, int8=393),
        host_link=16e9,
        usable_hbm_bytes=f"{_OOM}: kubernetes-engine-samples#1467",
        link_bytes_per_second=f"{_NOMINAL} 50 GB/s a link",
        dcn_bytes_per_second=f"{_DOCS}: 2 cards of 100 Gb/s a host of 8 chips",
    ),
    _tpu(
        name="v5p",
        kinds=("TPU v5", "TPU v5p"),
        hbm_gib=96,
        usable_gib=95.74,
        memory_bandwidth=2.765e12,
        link_bandwidth=90e9,
        dcn_bandwidth=6.25e9,
        torus_dims=3,
        pod_chips=8960,
        flops=_peaks(bfloat16=459, int8=918),
        host_link=16e9,
        hbm_bytes=f"{_BOOK}; sources differ: the {_DOCS}, give 95 GiB",
        usable_hbm_bytes=(
            f"{_OOM}: 95.74 GiB; sources differ: a runtime may keep more for its"
            " own use"
        ),
        flops_per_second=f"{_DOCS}; int8: {_BOOK}",
        link_bytes_per_second=_LINKS,
    ),
    _tpu(
        name="v6e",
        kinds=("TPU v6 lite", "TPU v6e"),
        hbm_gib=32,
        usable_gib=31.25,
        memory_bandwidth=1.638e12,
        link_bandwidth=90e9,
        dcn_bandwidth=12.5e9,
        torus_dims=2,
        pod_chips=256,
        flops=_peaks(bfloat16=918, int8=1836, float8=918),
        host_link=16e9,
        usable_hbm_bytes=f"{_OOM}: tpu-inference#1021",
        link_bytes_per_second=_LINKS,
    ),
    _tpu(
        name="v7x",
        kinds=("TPU7x", "TPU7", "TPU v7", "TPU v7x"),
        hbm_gib=192,
        usable_gib=189.5,
        memory_bandwidth=7.38e12,
        link_bandwidth=90e9,
        dcn_bandwidth=12.5e9,
        torus_dims=3,
        pod_chips=9216,
        flops=_peaks(bfloat16=2307, float8=4614),
        devices=2,
        usable_hbm_bytes=f"{_OOM}: 94.75 GiB a device",
        link_bytes_per_second=(
            "secondary: 1,200 GB/s both ways, of which 90 % are taken as for the others"
        ),
    ),
)


_SHEET = "NVIDIA's data sheet"
_NVIDIA = f"{_SHEET}; scaling book, table of GPUs"
_ENGINEERING = "secondary: ml-engineering"
# Of a collective: the base latency of NCCL's rings.
_SWITCH_SECONDS = 8.4e-6
_GPU_SOURCES = {
    "hop_seconds": (
        "secondary: baseLat of a ring with the simple protocol in NCCL's"
        " src/graph/tuning.cc; sources differ: 3.6 and 10.0 us with its two others, and"
        " each further GPU adds 0.5 to 3.4 us there"
    ),
    "usable_hbm_bytes": (
        "secondary: what CUDA or HIP reports, in public logs of programs that ran out"
        " of memory"
    ),
    "flops_per_second": f"{_NVIDIA}; float32 is TF32",
    "host_bytes_per_second": (
        f"{_SHEET}: the nominal rate of PCIe with 16 lanes in one direction"
    ),
    "dcn_bytes_per_second": (
        "secondary: the usual machine, one network card a GPU, 400 Gb/s"
    ),
}


def _gpu(
    *,
    name: str,
    kind: str,
    hbm_gib: int | float,
    usable_gib: int | float,
    memory_bandwidth: int | float,
    link_bandwidth: int | float,
    flops: _Peaks,
    island: int = 8,
    dcn: int | float = 50e9,
    host_link: int | float = 64e9,
    sheet: str = _NVIDIA,
    **sources: str,
) -> Chip:
    """The `Chip` of a GPU: one of `island` GPUs on a switch, with `dcn` bytes per
    second of the data-center network, and `host_link` bytes per second to the host; 0
    if they are not known. `link_bandwidth` is that of all links together. `sources` and
    `_GPU_SOURCES` have, by a field's name, the source of its value. `sheet` is the
    source of all others.
    """
    pairs = tuple((_GPU_SOURCES | sources | {"*": sheet}).items())
    return Chip(
        name=name,
        hbm_bytes=_gib(hbm_gib),
        usable_hbm_bytes=_gib(usable_gib),
        hbm_bytes_per_second=memory_bandwidth,
        flops_per_second=flops,
        link_bytes_per_second=link_bandwidth,
        torus_dims=0,
        island_chips=island,
        dcn_bytes_per_second=dcn,
        kinds=(kind,),
        sources=pairs,
        host_bytes_per_second=host_link,
        hop_seconds=_SWITCH_SECONDS,
    )


_A100 = _peaks(bfloat16=312, int8=624, float32=156)
_A100_DCN = "secondary: the usual machine, one network card a GPU, 200 Gb/s"
_HOPPER = _peaks(bfloat16=989, int8=1979, float8=1979, float32=494)
_B200 = _peaks(bfloat16=2250, int8=4500, float8=4500, float4=9000, float32=1125)
_GB200 = _peaks(bfloat16=2500, int8=5000, float8=5000, float4=10000, float32=1250)
_MI300X = _peaks(bfloat16=1307, int8=2615, float8=2615, float32=654)

GPUS: tuple[Chip, ...] = (
    _gpu(
        name="a100-40",
        kind="NVIDIA A100-SXM4-40GB",
        hbm_gib=40,
        usable_gib=39.4,
        memory_bandwidth=1.555e12,
        link_bandwidth=300e9,
        flops=_A100,
        dcn=25e9,
        host_link=32e9,
        dcn_bytes_per_second=_A100_DCN,
    ),
    _gpu(
        name="a100",
        kind="NVIDIA A100-SXM4-80GB",
        hbm_gib=80,
        usable_gib=79.15,
        memory_bandwidth=2.039e12,
        link_bandwidth=300e9,
        flops=_A100,
        dcn=25e9,
        host_link=32e9,
        dcn_bytes_per_second=_A100_DCN,
    ),
    _gpu(
        name="h100",
        kind="NVIDIA H100 80GB HBM3",
        hbm_gib=80,
        usable_gib=79.18,
        memory_bandwidth=3.35e12,
        link_bandwidth=450e9,
        flops=_HOPPER,
    ),
    _gpu(
        name="h200",
        kind="NVIDIA H200",
        hbm_gib=143_771 / 2**10,
        usable_gib=139.8,
        memory_bandwidth=4.8e12,
        link_bandwidth=450e9,
        flops=_HOPPER,
        hbm_bytes=f"143,771 MiB, as the driver says; {_SHEET} says 141 GB",
        dcn_bytes_per_second="MLPerf system files: 400 Gb/s a GPU",
    ),
    _gpu(
        name="b200",
        kind="NVIDIA B200",
        hbm_gib=192e9 / 2**30,
        usable_gib=178.35,
        memory_bandwidth=8e12,
        link_bandwidth=900e9,
        flops=_B200,
        hbm_bytes=f"{_NVIDIA}; sources differ: ml-engineering gives about 180 GB",
    ),
    _gpu(
        name="gb200",
        kind="NVIDIA GB200",
        hbm_gib=186,
        usable_gib=184.31,
        memory_bandwidth=8e12,
        link_bandwidth=900e9,
        flops=_GB200,
        island=72,
        host_link=0.0,
        host_bytes_per_second="not known for one GPU of a superchip",
        hbm_bytes=f"{_SHEET}: 13.4 TB in a rack of 72; secondary for one GPU",
        flops_per_second=f"{_SHEET}, half of a superchip; float32 is TF32",
        sheet=_SHEET,
    ),
    _gpu(
        name="mi300x",
        kind="AMD Instinct MI300X",
        hbm_gib=192,
        usable_gib=191.69,
        memory_bandwidth=5.3e12,
        link_bandwidth=448e9,
        flops=_MI300X,
        usable_hbm_bytes=(
            f"{_GPU_SOURCES['usable_hbm_bytes']}; sources differ: 191.98 GiB"
        ),
        link_bytes_per_second=(
            f"{_ENGINEERING}, 896 GB/s both ways, 7 links to 7 neighbours"
        ),
        flops_per_second=f"{_ENGINEERING}; float32 is TF32",
        sheet=_ENGINEERING,
    ),
)
