"""Whether XLA's compiler for GPUs compiles for a GPU that is not there:
`python -m benchmarks.described_gpu`, with `jax-cuda12-plugin` and `jax-cuda12-pjrt`.

It prints the collectives and the memory analysis of a gradient on eight described
H100s. JAX registers the plugin for itself, so this loads it from its file, and JAX's own
platform is the CPU.
"""

import importlib.util
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxlib import _jax, xla_client  # pyright: ignore[reportAttributeAccessIssue]


# XLA's `GpuTargetConfigProto`.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def devices(count: int) -> list[Any]:
    """GPUs of one host that are not there."""
    plugin = importlib.util.find_spec("jax_plugins.xla_cuda12")
    assert plugin is not None
    assert plugin.origin is not None
    library = Path(plugin.origin).with_name("xla_cuda_plugin.so")
    xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    xla_client.initialize_pjrt_plugin("cuda")
    # Slices, hosts and GPUs.
    options = {"target_config": H100, "topology": f"1x1x{count}"}
    topology = _jax.get_default_c_api_topology("cuda", "", options)
    return list(topology._make_compile_only_devices())


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    mesh = Mesh(np.array(devices(8)), ("data",))
    rows = NamedSharding(mesh, P("data"))
    array = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=rows)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        elements = jnp.tanh(x @ w).astype(jnp.float32)
        return jnp.sum(elements)

    began = time.perf_counter()
    jitted = jax.jit(jax.grad(loss), out_shardings=rows)
    lowered = jitted.trace(array, array).lower(lowering_platforms=("cuda",))
    compiled = lowered.compile()
    print(f"{time.perf_counter() - began:.1f} s; {compiled.memory_analysis()}")
    for line in (compiled.as_text() or "").splitlines():
        if "-start(" in line:
            print(line.strip()[:160])


if __name__ == "__main__":
    main()
