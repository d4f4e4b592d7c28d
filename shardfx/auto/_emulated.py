"""What CPU devices are like that JAX emulates on one machine."""

from ..chips import Chip


EMULATED = Chip(
    # Slow in all, and a collective is a function call in which threads wait for each other. Times are for comparing.
    name="cpu",
    hbm_bytes=2**34,
    usable_hbm_bytes=2**34,
    hbm_bytes_per_second=2e9,
    flops_per_second=(("bfloat16", 8e9), ("float32", 8e9)),
    link_bytes_per_second=1e9,
    torus_dims=0,
    island_chips=2**20,
    dcn_bytes_per_second=1e9,
    sources=(("*", "an estimate for a machine of two cores"),),
)
