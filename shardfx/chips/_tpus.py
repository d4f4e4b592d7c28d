"""The TPUs."""

from typing import Any

from ._chip import Chip, gib, peaks


_DOCS = "Google Cloud TPU documentation, 2026"
_BOOK = "scaling book, table of TPUs, 2026"
_PAPER = "A Domain Specific Supercomputer (2020)"
_OOM = "secondary: the compiler's own messages where it runs out of memory"
_NOMINAL = f"{_BOOK}: 90 % of the nominal one; sources differ: the {_DOCS}, give"
_LINKS = {"link_bytes_per_second": f"{_NOMINAL} 100 GB/s a link"}
_HOSTS = {"host_bytes_per_second": _BOOK}
_EARLY_DCN = {"dcn_bytes_per_second": f"{_BOOK}: 25 GB/s a host, taken for all generations before v5"}
_SHARED_SOURCES = {
    "tile": "the layouts that the compiler for TPUs gives arguments, T(8,128); read off compiled programs for v5e",
    "*": _DOCS,
}


def _tpu(
    name: str, hbm: int, usable: int, speeds: tuple[float, float, float], dims: int, chips: int, **other: Any
) -> Chip:
    """A row of the table below: memory, bytes a second (of memory, of a link, to other slices), and the torus."""
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
        host_bytes_per_second=15e9,
        kinds=("TPU v4",),
        sources={
            "usable_hbm_bytes": f"{_OOM}: maxtext#4117",
            "link_bytes_per_second": _BOOK,
            "dcn_bytes_per_second": f"{_BOOK}: 25 GB/s a host of 4 chips",
        }
        | _HOSTS,
    ),
    _tpu(
        *("v5e", gib(16), gib(15.75), (819e9, 45e9, 3.125e9), 2, 256),
        flops_per_second=peaks(bfloat16=197, int8=393),
        host_bytes=gib(64),
        host_bytes_per_second=15e9,
        kinds=("TPU v5 lite", "TPU v5e"),
        sources={
            "usable_hbm_bytes": f"{_OOM}: kubernetes-engine-samples#1467",
            "link_bytes_per_second": f"{_NOMINAL} 50 GB/s a link",
            "dcn_bytes_per_second": f"{_DOCS}: 2 cards of 100 Gb/s a host of 8 chips",
        }
        | _HOSTS,
    ),
    _tpu(
        *("v5p", gib(96), gib(95.74), (2.765e12, 90e9, 6.25e9), 3, 8960),
        flops_per_second=peaks(bfloat16=459, int8=918),
        host_bytes=112_000_000_000,
        host_bytes_per_second=15e9,
        kinds=("TPU v5", "TPU v5p"),
        sources={
            "hbm_bytes": f"{_BOOK}; sources differ: the {_DOCS}, give 95 GiB",
            "usable_hbm_bytes": f"{_OOM}: 95.74 GiB; sources differ: a runtime may keep more for its own use",
            "flops_per_second": f"{_DOCS}; int8: {_BOOK}",
        }
        | (_LINKS | _HOSTS),
    ),
    _tpu(
        *("v6e", gib(32), gib(31.25), (1.638e12, 90e9, 12.5e9), 2, 256),
        flops_per_second=peaks(bfloat16=918, int8=1836, float8=918),
        host_bytes=180_000_000_000,
        host_bytes_per_second=32e9,
        kinds=("TPU v6 lite", "TPU v6e"),
        sources={
            "usable_hbm_bytes": f"{_OOM}: tpu-inference#1021",
            "host_bytes": f"{_DOCS}: 720 GB a host of 4 chips; sources differ: 1,536 GiB a host of 8",
        }
        | (_LINKS | _HOSTS),
    ),
    _tpu(
        *("v7x", gib(192), gib(189.5), (7.38e12, 90e9, 12.5e9), 3, 9216),
        flops_per_second=peaks(bfloat16=2307, float8=4614),
        devices_per_chip=2,
        host_bytes=240_000_000_000,
        kinds=("TPU7x", "TPU7", "TPU v7", "TPU v7x"),
        sources={
            "usable_hbm_bytes": f"{_OOM}: 94.75 GiB a device",
            "link_bytes_per_second": "secondary: 1,200 GB/s both ways, of which 90 % are taken as for the others",
        },
    ),
)
