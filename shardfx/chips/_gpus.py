"""GPUs, as eight of them sit in one machine, or 72 in one rack."""

from typing import Any

from ._chip import Chip, gib, peaks


_SHEET = "NVIDIA's data sheet"
_NVIDIA = f"{_SHEET}; scaling book, table of GPUs"
_ENGINEERING = "secondary: ml-engineering"
# What most of them have in common, and where that is from.
_SHARED = {"torus_dims": 0, "island_chips": 8, "dcn_bytes_per_second": 50e9, "host_bytes_per_second": 64e9}
_SOURCES = {
    "usable_hbm_bytes": "secondary: what CUDA or HIP reports, in public logs of programs that ran out of memory",
    "flops_per_second": f"{_NVIDIA}; float32 is TF32",
    "dcn_bytes_per_second": "secondary: the usual machine, one network card a GPU, 400 Gb/s",
    "*": _NVIDIA,
}


def _gpu(
    name: str, kind: str, hbm: int, usable: int, hbm_speed: float, link_speed: float, flops: object, **other: Any
) -> Chip:
    """A row of the table below. Speeds are in bytes a second; `other` has fields of a Chip, and more `sources`."""
    told = _SOURCES | other.pop("sources", {})
    sizes = {"hbm_bytes": hbm, "usable_hbm_bytes": usable, "hbm_bytes_per_second": hbm_speed}
    speeds = {"flops_per_second": flops, "link_bytes_per_second": link_speed}
    return Chip(name=name, kinds=(kind,), sources=tuple(told.items()), **{**_SHARED, **sizes, **speeds, **other})


_A100 = peaks(bfloat16=312, int8=624, float32=156)
_A100_HOST: dict[str, Any] = {
    "dcn_bytes_per_second": 25e9,
    "host_bytes_per_second": 32e9,
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
        host_bytes=240_000_000_000,
        host_bytes_per_second=450e9,
        sources={
            "hbm_bytes": f"{_SHEET}: 13.4 TB in a rack of 72; secondary for one GPU",
            "flops_per_second": f"{_SHEET}, half of a superchip; float32 is TF32",
            "host_bytes_per_second": f"{_SHEET}: NVLink-C2C, 900 GB/s both ways, shared by two GPUs",
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
