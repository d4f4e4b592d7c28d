"""Real TPU topologies, described and compiled for by libtpu:
`pip install -e ".[aot,test]"`, no TPU needed.

Run it alone, since libtpu reads the environment once:
`JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 pytest tests/house/test_aot.py`.
"""

import importlib.util
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from benchmarks._programs import lowered, planned, steps_program, wire_bytes
from shardfx import MeshSpec, PathRules, plan, testing, topology
from shardfx._cli import demo
from shardfx.auto import search
from shardfx.cost import compile_for, estimate, fit, traffic
from shardfx.errors import MeshError, OutOfMemoryError
from shardfx.interop import tpu


pytestmark = pytest.mark.aot
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(
    not HAS_LIBTPU, reason="libtpu is not installed: pip install 'shardfx[aot]'"
)

# Topology, JAX's name of the kind, bounds, processes.
TOPOLOGIES = [
    ("v4:2x2x2", "TPU v4", (2, 2, 2, 2), 2),
    ("v5e:4x4", "TPU v5 lite", (4, 4, 1, 1), 4),
    ("v5e:16x16", "TPU v5 lite", (16, 16, 1, 1), 64),
    ("v5p:4x4x4", "TPU v5", (4, 4, 4, 1), 16),
    ("v5p:8x8x8", "TPU v5", (8, 8, 8, 1), 128),
    ("v6e:16x16", "TPU v6 lite", (16, 16, 1, 1), 64),
]


@pytest.fixture(autouse=True, scope="module")
def _optimized():
    """What the TPU's compiler makes of a program is what is tested here."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def places(array):
    values = np.array([topology.coords(device, 1) for device in array.flat])
    return values.reshape(*array.shape, -1)


@needs_libtpu
@pytest.mark.parametrize(("name", "kind", "bounds", "processes"), TOPOLOGIES)
def test_descriptions_are_read(name, kind, bounds, processes):
    devices = tpu.devices_of(f"tpu:{name}")
    assert topology.bounds(devices) == bounds
    assert {device.device_kind for device in devices} == {kind}
    actual = sorted(topology.positions(devices).ravel())
    assert actual == list(range(math.prod(bounds)))
    assert len({device.process_index for device in devices}) == processes
    with pytest.raises(
        MeshError, match="no description of the TPU topology 'v5e:3x7'.*not divisible"
    ):
        tpu.mesh_of("tpu:v5e:3x7", MeshSpec({"data": 21}))


@needs_libtpu
@pytest.mark.parametrize(("name", "kind", "bounds", "processes"), TOPOLOGIES)
@pytest.mark.parametrize("model", [2, 4, 8, 16])
def test_model_neighbours_are_at_distance_one(name, kind, bounds, processes, model):
    devices = tpu.devices_of(name)
    closed = topology.wraps(kind, bounds)
    mesh = MeshSpec({"data": -1, "model": model})
    order = mesh.order(devices)
    ids = {device.id for device in order.devices.flat}
    assert ids == {device.id for device in devices}
    assert order.devices.size == len(devices)
    mean_hops = topology.mean_hops(places(order.devices), 1, bounds, closed)
    assert order.mean_hops is not None
    assert mean_hops == order.mean_hops[1] == 1.0


def collectives(mesh):
    """The algorithms that the TPU's compiler picks for an all-gather, and for a
    reduction, over `model`.
    """
    sharding = NamedSharding(mesh, P("model"))
    wide = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=sharding)
    sharding = NamedSharding(mesh, P("data", "model"))
    rows = jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16, sharding=sharding)
    whole = NamedSharding(mesh, P())
    found = []
    for function, arguments, out in (
        (lambda w: 2 * w, (wide,), whole),
        (jnp.matmul, (rows, wide), whole),
    ):
        jitted = jax.jit(function, out_shardings=out)
        compiled = jitted.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
        text = compiled.as_text() or ""
        found.append(
            sorted(
                re.findall(
                    r'"collective_algorithm_config":\{"emitter":"(\w+)"(?:,"strategy":"(\w+)")?',
                    text,
                )
            )
        )
    return found


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("v5e:4x4", {"data": 2, "model": 8}),
        ("v5p:4x4x4", {"data": 4, "model": 16}),
    ],
)
def test_a_walk_costs_collectives_nothing(name, sizes):
    """Why axes may walk their boxes: the compiler finds the same algorithms as in the
    order row by row.
    """
    devices = tpu.devices_of(name)
    order = MeshSpec(sizes).order(devices)
    rows = mesh_utils.create_device_mesh(
        tuple(sizes.values()), devices, allow_split_physical_axes=True
    )
    assert list(order.devices.flat) != list(rows.flat)
    walked, row_by_row = (
        collectives(Mesh(array, tuple(sizes))) for array in (order.devices, rows)
    )
    print(f"{name} {sizes}: {walked}")
    assert walked == row_by_row
    assert all(walked)


@needs_libtpu
def test_slices_are_ordered_one_by_one():
    axes = {"replica": 2, "data": -1, "model": 4}
    spec = MeshSpec(axes, dcn={"replica": 2})
    mesh = tpu.mesh_of("v5e:4x4", spec)
    expected = {"replica": 2, "data": 4, "model": 4}
    assert dict(mesh.shape) == expected
    for number, piece in enumerate(mesh.devices):
        assert {device.slice_index for device in piece.flat} == {number}


def compiled_steps(shape, src, dst, dtype="bfloat16"):
    fn = steps_program(shape, jnp.dtype(dtype), src, dst)
    return lowered(
        fn=fn, shape=shape, dtype=jnp.dtype(dtype), src=src, dst=dst
    ).compile()


@needs_libtpu
@pytest.mark.parametrize(
    ("source", "target", "fewer"),
    [
        (P(("replica", "data", "model")), P(), False),
        (P("replica", ("data", "model")), P(None, "model"), False),
        (P("replica", "data"), P("data", "replica"), True),
        (P(("replica", "data")), P("data", "replica"), True),
    ],
)
def test_compiled_moves_between_slices_send_as_planned(source, target, fewer):
    axes = {"replica": 2, "data": -1, "model": 4}
    mesh = tpu.mesh_of("v5e:4x4", MeshSpec(axes, dcn={"replica": 2}))
    src = NamedSharding(mesh, source)
    dst = NamedSharding(mesh, target)
    shape = (8192, 8192)
    plan = planned(shape, jnp.dtype("bfloat16"), src, dst)
    text = compiled_steps(shape, src, dst).as_text()
    assert wire_bytes(text, 32) == plan.wire_bytes
    assert wire_bytes(text, 32, slices=2) == plan.dcn_bytes
    compiled = lowered(
        fn=lambda x: x, shape=shape, dtype=jnp.dtype("bfloat16"), src=src, dst=dst
    ).compile()
    program_text = compiled.as_text()
    xla = wire_bytes(
        program_text,
        32,
        slices=2,
    )
    print(f"{source} to {target}: {plan.dcn_bytes:,} bytes cross, by XLA {int(xla):,}")
    assert 0 < plan.dcn_bytes <= xla
    assert (plan.dcn_bytes < xla) == fewer


WIDE = (8192, 8192)
# These take two shards beside pointers of a few bytes and the compiler's scratch for a
# permutation, whatever the size of its pieces.
SCRATCH = 4096 + 32 * 1024
OF_TWO_SHARDS = [
    # XLA's own program takes 16 shards here: the array as a whole.
    ((2, 4, 2), P("b", ("a", "c")), (2, 2, 4), P(None, ("a", "c"))),
    # All-to-alls of 32 and more chips whose factors have another order afterwards, then
    # gathers.
    ((2, 8, 4), P(("a", "c", "b")), (2, 4, 8), P(None, ("b", "c"))),
    ((2, 8, 4), P(("b", "c", "a")), (4, 4, 4), P(None, ("c", "b"))),
    # And back, where they are in order before.
    ((2, 4, 8), P(None, ("b", "c")), (2, 8, 4), P(("a", "c", "b"))),
]
# Arrays on v5p:4x4x4 that move from one mesh to another, or on v5e:4x4 where the meshes
# have 16 devices.
MOVES = [
    # Pieces that fill no tiles: made at once, they take 2.2 to 8 times a shard, as they
    # do by XLA's own program.
    ("bfloat16", (6400, 4800), (64,), P("a"), (2, 2, 2, 8), P("a", ("b", "c", "d"))),
    (
        "bfloat16",
        (8256, 4160),
        (8, 8),
        P(("b", "a")),
        (2, 8, 4),
        P(None, ("c", "a", "b")),
    ),
    (
        "float32",
        (8256, 4160),
        (2, 8, 4),
        P("a", ("c", "b")),
        (2, 8, 4),
        P(("b", "a", "c")),
    ),
    ("bfloat16", (8256, 4160), (2, 8, 4), P(("b", "c", "a")), (4, 4, 4), P("b", "a")),
    (
        "float32",
        (5120, 64, 80),
        (4, 4, 4),
        P(None, ("c", "a", "b")),
        (16, 4),
        P("a", "b"),
    ),
    # Pieces that fill tiles and double at last: made at once, they take 2.5 times a
    # shard: all-to-alls whose parts come in another order, then a gather of twice the
    # piece. In the order of the rows: a permutation first, one in between, two
    # all-to-alls, a slice, and nothing else.
    ("float32", WIDE, (16, 4), P("a", "b"), (4, 2, 8), P(None, ("c", "a"))),
    ("float32", WIDE, (4, 16), P(("b", "a")), (2, 2, 8, 2), P("a", ("c", "b"))),
    (
        "float32",
        WIDE,
        (2, 4, 8),
        P(("c", "b"), "a"),
        (4, 4, 2, 2),
        P(None, ("d", "b", "a")),
    ),
    ("float32", WIDE, (4, 4, 4), P(("a", "c")), (2, 16, 2), P(None, "b")),
    ("float32", WIDE, (4, 16), P(("b", "a")), (4, 4, 2, 2), P(None, ("a", "c", "b"))),
    # The same, where an earlier all-to-all alone has parts in another order.
    (
        "bfloat16",
        WIDE,
        (4, 4, 4),
        P(None, ("b", "a", "c")),
        (2, 8, 4),
        P(None, ("b", "c")),
    ),
    # A gather along both dimensions. Concatenated, the shards took two shards and three
    # times the compiler's scratch.
    ("bfloat16", WIDE, (2, 4, 8), P(None, "b"), (16, 4), P(None, "b")),
    *[("bfloat16", WIDE, *move) for move in OF_TWO_SHARDS],
    *[("float32", WIDE, *move) for move in OF_TWO_SHARDS],
]


@needs_libtpu
@pytest.mark.parametrize(
    ("dtype", "shape", "sizes", "source", "others", "target"), MOVES
)
def test_a_move_takes_at_most_twice_the_larger_shard(
    dtype, shape, sizes, source, others, target
):
    devices = np.array(
        tpu.devices_of("tpu:v5p:4x4x4" if math.prod(sizes) == 64 else "tpu:v5e:4x4")
    )
    cases = ((sizes, source), (others, target))
    src, dst = (
        NamedSharding(Mesh(devices.reshape(size), tuple("abcd"[: len(size)])), spec)
        for size, spec in cases
    )
    compiled = compiled_steps(shape, src, dst, dtype)
    largest = max(math.prod(end.shard_shape(shape)) for end in (src, dst))
    shard = largest * jnp.dtype(dtype).itemsize
    temporary = compiled.memory_analysis().temp_size_in_bytes
    print(
        f"{shape}, {source} to {target}: {temporary - 2 * shard} bytes beside two"
        " shards"
    )
    limit = 2 * shard + SCRATCH * ((sizes, source, others, target) in OF_TWO_SHARDS)
    assert temporary <= limit
    actual = wire_bytes(compiled.as_text(), devices.size)
    expected = planned(shape, jnp.dtype(dtype), src, dst).wire_bytes
    assert actual == expected


@needs_libtpu
def test_a_gather_along_both_dimensions_is_joined_once():
    # As a concatenation along each dimension it takes 2.5 times the array.
    devices = np.array(tpu.devices_of("tpu:v5p:4x4x4"))
    mesh = Mesh(devices.reshape(4, 4, 4), ("a", "b", "c"))
    src = NamedSharding(mesh, P("a", ("b", "c")))
    compiled = compiled_steps((8192, 8192), src, NamedSharding(mesh, P()))
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes <= 2 * 8192 * 8192


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "sizes"), [("v5e:8x8", (4, 16)), ("v5p:4x4x4", (4, 16))]
)
def test_a_permutation_has_a_constant_overhead(name, sizes):
    devices = np.array(tpu.devices_of(f"tpu:{name}"))
    mesh = Mesh(devices.reshape(2, 8, 4), ("a", "b", "c"))
    source_mesh = Mesh(devices.reshape(sizes), ("a", "b"))
    src = NamedSharding(source_mesh, P("b", "a"))
    dst = NamedSharding(mesh, P(None, ("b", "c", "a")))
    beside = []
    for size in (8192, 16384):
        memory = compiled_steps((size, size), src, dst).memory_analysis()
        assert memory is not None
        beside.append(memory.temp_size_in_bytes - 2 * 2 * size * size // 64)
    print(f"{name}: {beside} bytes beside two pieces")
    assert max(beside) <= 32 * 1024


def padded_bytes(struct, layout):
    """What a TPU allocates for a shard: its last dimensions rounded up to the layout's
    tile, then 512 bytes.
    """
    shape = struct.sharding.shard_shape(struct.shape)
    sizes = [shape[dim] for dim in layout.major_to_minor]
    if sizes:
        tile = layout.tiling[0][-len(sizes) :]
    else:
        tile = ()
    for back, unit in enumerate(reversed(tile), start=1):
        sizes[-back] = -(-sizes[-back] // unit) * unit
    return -(-math.prod(sizes) * struct.dtype.itemsize // 512) * 512


@needs_libtpu
@pytest.mark.parametrize(
    ("target", "spec"),
    [
        ("tpu:v5e:4x4", MeshSpec({"data": 2, "fsdp": 4, "tensor": 2})),
        ("tpu:v5p:4x4x4", MeshSpec({"data": 8, "fsdp": 4, "tensor": 2})),
    ],
)
def test_a_train_step_compiles_to_the_planned_bytes(target, spec):
    run = demo.Run(batch_size=64, length=32)
    plans = demo.make_plans(tpu.mesh_of(target, spec), run)
    step = demo.make_step(demo.make_optimizer(run), plans.model)
    arguments = (plans.model.structs, plans.optimizer.structs, plans.batch.structs)
    shardings = (plans.model.shardings, plans.optimizer.shardings, None)
    compiled = (
        jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
        .trace(*arguments)
        .lower(lowering_platforms=("tpu",))
        .compile()
    )
    structs = jax.tree.leaves(arguments)
    bytes_per_device = plans.model.bytes_per_device + plans.optimizer.bytes_per_device
    planned = bytes_per_device + plans.batch.bytes_per_device
    held = [
        math.prod(struct.sharding.shard_shape(struct.shape)) * struct.dtype.itemsize
        for struct in structs
    ]
    assert sum(held) == planned
    formats = jax.tree.leaves(compiled.input_formats[0])
    padded = [
        padded_bytes(struct, form.layout)
        for struct, form in zip(structs, formats, strict=True)
    ]
    analysis = compiled.memory_analysis()
    assert analysis is not None
    actual = analysis.argument_size_in_bytes
    print(
        f"{target}: {planned:,} bytes planned, {sum(padded):,} with tile padding,"
        f" {actual:,} compiled"
    )
    assert actual == sum(padded)
    # Every argument is sharded as planned: XLA did not choose another layout over
    # devices.
    for struct, form in zip(structs, formats, strict=True):
        assert form.sharding.is_equivalent_to(struct.sharding, len(struct.shape))


@needs_libtpu
def test_a_search_is_verified_by_the_compiler_of_the_slice():
    def step(params, x):
        def loss(params):
            hidden = jax.nn.relu(x @ params["up"])
            return jnp.mean((x + hidden @ params["down"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    struct = jax.ShapeDtypeStruct
    params = {
        "up": struct((256, 1024), jnp.float32),
        "down": struct((1024, 256), jnp.float32),
    }
    candidates = search(
        step,
        params,
        struct((4096, 256), jnp.float32),
        devices="tpu:v5e:2x2*2",
        verify="compile",
        closely=1,
    )
    best = candidates[0]
    assert best.by == "compile"
    assert best.wire_bytes > 0
    assert best.memory_bytes
    # 13 billion operations at v5e's peak take 16 us on four chips; the compiler's
    # cycles say somewhat more.
    assert 1e-5 < best.compute_seconds < 1e-3


@needs_libtpu
def test_a_search_has_the_numbers_of_libtpu():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    struct = jax.ShapeDtypeStruct
    w = struct((256, 512), jnp.float32)
    x = struct((4096, 256), jnp.float32)
    args = w, x
    lines: list[str] = []
    slice_ = "tpu:v5e:2x2"
    candidates = search(step, *args, devices=slice_, keep=1, progress=lines.append)
    best = candidates[0]
    assert best.by == "schedule"
    assert "by libtpu's own program" in str(best)
    assert sum(line.startswith("asking libtpu") for line in lines) == 3

    names: dict[str, Any] = {}
    exec(best.code(), names)
    plans = names["plans_of"](step, *args)
    jitted = names["jitted"](step, plans)
    rows = estimate(jitted, *args, compiler=slice_).rows
    assert rows == best.traffic.rows
    assert fit(jitted, *args, chip="v5e").peak_bytes == best.memory_bytes


@needs_libtpu
def test_what_the_compiler_has_no_room_for_says_so():
    """17 GiB on each chip of 16: the error has the compiler's count."""
    struct = jax.ShapeDtypeStruct((2**20, 4352), jnp.float32)
    rules = PathRules([(".*", P())])
    x = plan(
        struct,
        MeshSpec({"data": 16}),
        paths=rules,
    )
    with pytest.raises(
        OutOfMemoryError, match="does not fit a device: its compiler needs"
    ) as raised:
        compile_for(lambda x: jnp.sum(jnp.sin(x), 0), x.structs, target="tpu:v5e:4x4")
    needed = raised.value.needed_bytes
    limit = raised.value.limit_bytes
    assert needed
    assert limit
    assert needed >= 2**20 * 4352 * 4 > limit > 15 * 2**30


@pytest.mark.skipif(HAS_LIBTPU, reason="libtpu is installed")
def test_without_libtpu_it_is_said_how_to_get_it():
    with pytest.raises(MeshError, match=r"'v5e:4x4'.*pip install \"shardfx\[aot\]\""):
        tpu.devices_of("tpu:v5e:4x4")


def small_step(count):
    """A gradient over scanned layers, and its arguments, on `count` chips."""
    mesh = AbstractMesh((2, count // 2), ("data", "fsdp"))

    def struct(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def loss(blocks, x):
        def layer(x, block):
            return x + jnp.tanh(x @ block[0]) @ block[1], None

        return jnp.mean(jax.lax.scan(layer, x, blocks)[0].astype(jnp.float32) ** 2)

    def step(blocks, x):
        gradients = jax.grad(loss)(blocks, x)
        return jax.tree.map(lambda w, g: w - 0.01 * g, blocks, gradients)

    up = struct((4, 128, 256), None, "fsdp")
    down = struct((4, 256, 128), None, "fsdp")
    x = struct((64, 128), "data")
    return jax.jit(step, donate_argnums=0), ((up, down), x)


@needs_libtpu
@pytest.mark.parametrize(
    ("target", "count"), [("tpu:v5e:2x2", 4), ("tpu:v5p:2x2x2", 8)]
)
def test_libtpu_answers_what_it_compiles(target, count):
    step, args = small_step(count)
    program = compile_for(step, *args, target=target)
    sent = estimate(step, *args, compiler=target)
    assert sent.rows == traffic(program).rows
    assert sent.wire_bytes > 0
    asked = fit(step, *args, chip=target)
    compiled = fit(program, chip=target)
    assert asked.basis == compiled.basis == "compiled"
    assert asked.fits
    assert asked.peak_bytes == compiled.peak_bytes
    assert asked.on_chip_bytes == compiled.on_chip_bytes > 0
    actual = asked.bytes_of("parameters") + asked.bytes_of("batch")
    assert actual == compiled.bytes_of("arguments")
    expected = fit(step, *args, chip=target, compiled=program).peak_bytes
    assert asked.peak_bytes == expected


@needs_libtpu
def test_a_step_that_does_not_fit_has_an_answer():
    """A donated cache that goes through a scan and comes out of it exists twice."""
    mesh = AbstractMesh((16,), ("data",))

    def struct(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def decode(cache, token):
        def layer(carry, rows):
            return carry, jax.lax.dynamic_update_slice(rows, token, (0, 3, 0))

        _, updated = jax.lax.scan(layer, 0.0, cache)
        return updated

    step = jax.jit(decode, donate_argnums=0)
    args = (struct((32, 8192, 1024, 128), None, "data"), struct((8192, 1, 128), "data"))
    asked = fit(step, *args, chip="v5e")
    assert not asked.fits
    assert "exceeds available HBM (15.75G)" in str(asked)
    assert asked.largest[0].what == "cache"
    assert asked.largest[0].bytes == 2**33
    assert asked.largest[1].group == "activations"
    assert asked.largest[1].bytes == 2**33
    with pytest.raises(OutOfMemoryError, match="needs 16.25G of 15.75G") as raised:
        compile_for(step, *args, target="tpu:v5e:4x4")
    assert raised.value.needed_bytes == asked.peak_bytes


@needs_libtpu
def test_libtpus_own_partitioned_program_is_proved():
    axes = {"data": 2, "fsdp": 2, "tensor": 2}
    mesh = MeshSpec(axes).abstract()

    def struct(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def loss(weights, x):
        for into, out in weights:
            x = x + jax.nn.gelu(x @ into) @ out
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(weights, x):
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    pair = (
        struct((1024, 2048), "fsdp", "tensor"),
        struct((2048, 1024), "tensor", "fsdp"),
    )
    x = struct((64, 1024), ("data", "fsdp"))
    verdict = testing.verify(step, [pair, pair], x, compiler="tpu:v5e:2x4")
    assert verdict.outcome == "proved", verdict
    assert verdict.program == "libtpu's partitioned program for v5e:2x4"
