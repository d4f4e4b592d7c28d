"""The table of TPUs and GPUs, each number with its source."""

from typing import Any

from ._chip import Chip, gib, peaks


_DOCS = "Google Cloud TPU documentation, 2026"
_BOOK = "scaling book, table of TPUs, 2026"
_PAPER = "A Domain Specific Supercomputer (2020)"
_OOM = "secondary: the compiler's own messages where it runs out of memory"
_NOMINAL = f"{_BOOK}: 90 % of the nominal one; sources differ: the {_DOCS}, give"
_LINKS = {"link_bytes_per_second": f"{_NOMINAL} 100 GB/s a link"}
_EARLY_DCN = {"dcn_bytes_per_second": f"{_BOOK}: 25 GB/s a host, taken for all generations before v5"}
_SHARED_SOURCES = {
    "tile": "the layouts that the compiler for TPUs gives arguments, T(8,128); read off compiled programs for v5e",
    "*": _DOCS,
}


def _tpu(
    name: str, hbm: int, usable: int, speeds: tuple[float, float, float], dims: int, chips: int, **other: Any
) -> Chip:
    """A row of the TPU table: memory, bytes per second (of memory, of a link, to other slices), and the torus."""
    sizes = {"hbm_bytes": hbm, "usable_hbm_bytes": usable, "torus_dims": dims, "island_chips": chips}
    names = ("hbm_bytes_per_second", "link_bytes_per_second", "dcn_bytes_per_second")
    told = _SHARED_SOURCES | other.pop("sources")
    given: dict[str, Any] = {**sizes, **dict(zip(names, speeds, strict=True)), "tile": (8, 128), **other}
    return Chip(name=name, sources=tuple(told.items()), **given)


TPUS: tuple[Chip, ...] = (
    _tpu(
        *("v2", gib(16), gib(14.96), (700e9, 62e9, 6.25e9), 2, 256),
        flops_per_second=peaks(bfloat16=46),
        devices_per_chip=2,
        kinds=("TPU v2",),
        sources={
            "usable_hbm_bytes": f"{_OOM}: 7.48 GiB a core",
            "flops_per_second": _PAPER,
            "link_bytes_per_second": f"{_PAPER}: 496 Gb/s a link",
        }
        | _EARLY_DCN,
    ),
    _tpu(
        *("v3", gib(32), gib(30.96), (900e9, 82e9, 6.25e9), 2, 1024),
        flops_per_second=peaks(bfloat16=123),
        devices_per_chip=2,
        kinds=("TPU v3",),
        sources={
            "usable_hbm_bytes": f"{_OOM}: 15.48 GiB a core",
            "link_bytes_per_second": f"{_PAPER}: 656 Gb/s a link; sources differ: {_BOOK}, 100 GB/s",
        }
        | _EARLY_DCN,
    ),
    _tpu(
        *("v4", gib(32), gib(30.75), (1.2e12, 45e9, 6.25e9), 3, 4096),
        flops_per_second=peaks(bfloat16=275, int8=275),
        kinds=("TPU v4",),
        sources={
            "usable_hbm_bytes": f"{_OOM}: maxtext#4117",
            "link_bytes_per_second": _BOOK,
            "dcn_bytes_per_second": f"{_BOOK}: 25 GB/s a host of 4 chips",
        },
    ),
    _tpu(
        *("v5e", gib(16), gib(15.75), (819e9, 45e9, 3.125e9), 2, 256),
        flops_per_second=peaks(bfloat16=197, int8=393),
        kinds=("TPU v5 lite", "TPU v5e"),
        sources={
            "usable_hbm_bytes": f"{_OOM}: kubernetes-engine-samples#1467",
            "link_bytes_per_second": f"{_NOMINAL} 50 GB/s a link",
            "dcn_bytes_per_second": f"{_DOCS}: 2 cards of 100 Gb/s a host of 8 chips",
        },
    ),
    _tpu(
        *("v5p", gib(96), gib(95.74), (2.765e12, 90e9, 6.25e9), 3, 8960),
        flops_per_second=peaks(bfloat16=459, int8=918),
        kinds=("TPU v5", "TPU v5p"),
        sources={
            "hbm_bytes": f"{_BOOK}; sources differ: the {_DOCS}, give 95 GiB",
            "usable_hbm_bytes": f"{_OOM}: 95.74 GiB; sources differ: a runtime may keep more for its own use",
            "flops_per_second": f"{_DOCS}; int8: {_BOOK}",
        }
        | _LINKS,
    ),
    _tpu(
        *("v6e", gib(32), gib(31.25), (1.638e12, 90e9, 12.5e9), 2, 256),
        flops_per_second=peaks(bfloat16=918, int8=1836, float8=918),
        kinds=("TPU v6 lite", "TPU v6e"),
        sources={
            "usable_hbm_bytes": f"{_OOM}: tpu-inference#1021",
        }
        | _LINKS,
    ),
    _tpu(
        *("v7x", gib(192), gib(189.5), (7.38e12, 90e9, 12.5e9), 3, 9216),
        flops_per_second=peaks(bfloat16=2307, float8=4614),
        devices_per_chip=2,
        kinds=("TPU7x", "TPU7", "TPU v7", "TPU v7x"),
        sources={
            "usable_hbm_bytes": f"{_OOM}: 94.75 GiB a device",
            "link_bytes_per_second": "secondary: 1,200 GB/s both ways, of which 90 % are taken as for the others",
        },
    ),
)


_SHEET = "NVIDIA's data sheet"
_NVIDIA = f"{_SHEET}; scaling book, table of GPUs"
_ENGINEERING = "secondary: ml-engineering"
# The values that most of them share, and their source.
_SHARED = {"torus_dims": 0, "island_chips": 8, "dcn_bytes_per_second": 50e9}
_SOURCES = {
    "usable_hbm_bytes": "secondary: what CUDA or HIP reports, in public logs of programs that ran out of memory",
    "flops_per_second": f"{_NVIDIA}; float32 is TF32",
    "dcn_bytes_per_second": "secondary: the usual machine, one network card a GPU, 400 Gb/s",
    "*": _NVIDIA,
}


def _gpu(
    name: str, kind: str, hbm: int, usable: int, hbm_speed: float, link_speed: float, flops: object, **other: Any
) -> Chip:
    """A row of the GPU table. Speeds are in bytes per second; `other` has further fields of a Chip, and further
    `sources`.
    """
    told = _SOURCES | other.pop("sources", {})
    sizes = {"hbm_bytes": hbm, "usable_hbm_bytes": usable, "hbm_bytes_per_second": hbm_speed}
    speeds = {"flops_per_second": flops, "link_bytes_per_second": link_speed}
    return Chip(name=name, kinds=(kind,), sources=tuple(told.items()), **{**_SHARED, **sizes, **speeds, **other})


_A100 = peaks(bfloat16=312, int8=624, float32=156)
_A100_HOST: dict[str, Any] = {
    "dcn_bytes_per_second": 25e9,
    "sources": {"dcn_bytes_per_second": "secondary: the usual machine, one network card a GPU, 200 Gb/s"},
}
_HOPPER = peaks(bfloat16=989, int8=1979, float8=1979, float32=494)
_B200 = peaks(bfloat16=2250, int8=4500, float8=4500, float4=9000, float32=1125)
_GB200 = peaks(bfloat16=2500, int8=5000, float8=5000, float4=10000, float32=1250)
_MI300X = peaks(bfloat16=1307, int8=2615, float8=2615, float32=654)

GPUS: tuple[Chip, ...] = (
    _gpu("a100-40", "NVIDIA A100-SXM4-40GB", gib(40), gib(39.4), 1.555e12, 300e9, _A100, **_A100_HOST),
    _gpu("a100", "NVIDIA A100-SXM4-80GB", gib(80), gib(79.15), 2.039e12, 300e9, _A100, **_A100_HOST),
    _gpu("h100", "NVIDIA H100 80GB HBM3", gib(80), gib(79.18), 3.35e12, 450e9, _HOPPER),
    _gpu(
        *("h200", "NVIDIA H200", 143_771 * 2**20, gib(139.8), 4.8e12, 450e9, _HOPPER),
        sources={
            "hbm_bytes": f"143,771 MiB, as the driver says; {_SHEET} says 141 GB",
            "dcn_bytes_per_second": "MLPerf system files: 400 Gb/s a GPU",
        },
    ),
    _gpu(
        *("b200", "NVIDIA B200", 192_000_000_000, gib(178.35), 8e12, 900e9, _B200),
        sources={"hbm_bytes": f"{_NVIDIA}; sources differ: ml-engineering gives about 180 GB"},
    ),
    _gpu(
        *("gb200", "NVIDIA GB200", gib(186), gib(184.31), 8e12, 900e9, _GB200),
        island_chips=72,
        sources={
            "hbm_bytes": f"{_SHEET}: 13.4 TB in a rack of 72; secondary for one GPU",
            "flops_per_second": f"{_SHEET}, half of a superchip; float32 is TF32",
            "*": _SHEET,
        },
    ),
    _gpu(
        *("mi300x", "AMD Instinct MI300X", gib(192), gib(191.69), 5.3e12, 448e9, _MI300X),
        sources={
            "usable_hbm_bytes": f"{_SOURCES['usable_hbm_bytes']}; sources differ: 191.98 GiB",
            "link_bytes_per_second": f"{_ENGINEERING}, 896 GB/s both ways, 7 links to 7 neighbours",
            "flops_per_second": f"{_ENGINEERING}; float32 is TF32",
            "*": _ENGINEERING,
        },
    ),
)
