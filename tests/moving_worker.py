"""What the processes of a job do to test moves between them; see
`test_reshard_processes.py`.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import multiprocess_worker
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from moves import move_of

from shardfx import From, TreeMap, plan_reshard, reshard


def values(shape, dtype="float32"):
    numbers = np.arange(np.prod(shape)).reshape(shape)
    return (numbers % 100).astype(jnp.dtype(dtype))


def placed(expected, sharding):
    return jax.make_array_from_callback(
        expected.shape, sharding, lambda index: expected[index], dtype=expected.dtype
    )


def right(array, expected, sharding):
    """Whether this process's shards hold what they should."""
    if array.sharding != sharding:
        return False
    if array.shape != expected.shape or array.dtype != expected.dtype:
        return False
    shards = array.addressable_shards
    if {shard.device for shard in shards} != sharding.addressable_devices:
        return False
    for shard in shards:
        if not np.array_equal(np.asarray(shard.data), expected[shard.index]):
            return False
    return True


def meshes():
    devices = np.asarray(jax.devices())
    half = len(devices) // 2
    mesh = Mesh(devices[::-1].reshape(2, half), ("a", "b"))
    return {
        "all": Mesh(devices, ("a",)),
        "grid": Mesh(devices.reshape(2, half), ("a", "b")),
        "turned": mesh,
        "first": Mesh(devices[:half], ("a",)),
        "last": Mesh(devices[half:], ("a",)),
        "first turned": Mesh(devices[:half][::-1], ("a",)),
        "one": Mesh(devices[:1], ("a",)),
        "last one": Mesh(devices[-1:], ("a",)),
        "three": Mesh(devices[[1, half, half + 2]], ("a",)),
    }


CASES = {
    "same devices": ("all", P("a"), "grid", P("b", "a")),
    "same devices, other order": ("grid", P("a"), "turned", P(None, "b")),
    "to a subset": ("all", P("a"), "first", P(None, "a")),
    "back from a subset": ("first", P(None, "a"), "grid", P("b", "a")),
    "disjoint, same layout": ("first", P("a"), "last", P("a")),
    "disjoint, other layout": ("last", P("a"), "first", P(None, "a")),
    "to an odd subset": ("turned", P(("a", "b")), "three", P("a")),
    "to replicas": ("first", P("a"), "all", P()),
    "replicas to a process's": ("all", P(), "last", P("a")),
    "replicas to one device": ("all", P(), "last one", P()),
    "one device to replicas": ("last one", P(), "all", P()),
    "a process's to one device": ("first", P("a"), "one", P()),
    "a process's in another order": ("first", P("a"), "first turned", P("a")),
    "one device to another": ("one", P(), "last one", P()),
    "within processes": ("grid", P("b"), "first", P("a")),
}
OF_TWO_DTYPES = ("same devices", "disjoint, other layout")


def case(name, shape=(24, 48), **options):
    source, ours, target, theirs = CASES[name]
    mesh_by_name = meshes()
    src = NamedSharding(mesh_by_name[source], ours)
    dst = NamedSharding(mesh_by_name[target], theirs)
    other = values(shape) + 1
    # A second shape and dtype needs twice as many programs.
    if name in OF_TWO_DTYPES:
        other = values(shape[::-1], "bfloat16")
    expected = {"w": values(shape), "h": other}
    tree = {path: placed(array, src) for path, array in expected.items()}
    reshard_plan = plan_reshard(tree, dst)
    moved = reshard(tree, dst, **options)
    are_right = [right(moved[path], array, dst) for path, array in expected.items()]
    are_deleted = None
    if options.get("donate"):
        are_deleted = all(array.is_deleted() for array in tree.values())
    return {
        "right": all(are_right),
        "deleted": are_deleted,
        "how": {leaf.how for leaf in reshard_plan.leaves},
        "bytes": (reshard_plan.wire_bytes, reshard_plan.lower_bound_bytes),
    }


def limited(name, **options):
    """Under the least limit that works, as the error about a smaller one says it. The
    arrays are small, as each part of a few bytes is a message of its own.
    """
    options["shape"] = (8, 16)
    text, _ = multiprocess_worker.raised(case, name, memory_limit_bytes=10, **options)
    _, _, after = text.rpartition("`memory_limit_bytes=")
    least, _, _ = after.partition("`")
    result = case(name, memory_limit_bytes=int(least), **options)
    return result | {"error": text}


def owned_by_one_process():
    """Moves after which a process holds nothing, or held nothing before: of replicas,
    labels, memory kinds and keys.
    """
    mesh_by_name = meshes()
    expected = values((24, 48))
    first = NamedSharding(mesh_by_name["first"], P("a"))
    whole = NamedSharding(mesh_by_name["one"], P())
    device = jax.devices()[0]
    on_device = SingleDeviceSharding(device)
    on_host = SingleDeviceSharding(device, memory_kind="pinned_host")
    turned = NamedSharding(mesh_by_name["first turned"], P("a"))
    right_by_case = {}
    moves = [
        ("label", expected, whole, on_device),
        ("empty", values((0, 8)), first, turned),
    ]
    # JAX 0.9 cannot end a jitted CPU program in host memory.
    if jax.__version_info__ >= (0, 10):
        in_host_memory = first.with_memory_kind("pinned_host")
        moves += [
            ("memory", expected, first, in_host_memory),
            ("label and memory", expected, whole, on_host),
        ]
    for name, array, src, dst in moves:
        moved = reshard(placed(array, src), dst)
        right_by_case[name] = right(moved, array, dst)
    everywhere = NamedSharding(mesh_by_name["all"], P())

    def eight_keys():
        return jax.random.split(jax.random.key(3), 8)

    keys = jax.jit(eight_keys, out_shardings=everywhere)()
    moved = reshard(keys, whole)
    expected_data = np.asarray(jax.random.key_data(eight_keys()))
    shards = moved.addressable_shards
    has_all_keys = len(shards) == len(whole.addressable_devices)
    for shard in shards:
        data = jax.random.key_data(shard.data)
        has_all_keys &= np.array_equal(data, expected_data)
    right_by_case["keys"] = has_all_keys
    return right_by_case


def moves():
    result: dict[str, object] = {name: case(name) for name in CASES}
    result["owned by one"] = owned_by_one_process()
    result["donated replicas"] = case("replicas to one device", donate=True)
    result["donated"] = case("disjoint, other layout", donate=True)
    result["limited"] = limited("disjoint, same layout")
    result["steps limited"] = limited("same devices", donate=True)
    mesh_by_name = meshes()
    rows = NamedSharding(mesh_by_name["first"], P("a"))
    # More than are in flight at a time.
    arrays = {str(number): values((24, 8)) + number for number in range(40)}
    many = {path: placed(array, rows) for path, array in arrays.items()}
    dst = NamedSharding(mesh_by_name["last"], P(None, "a"))
    moved = reshard(many, dst)
    are_right = [right(moved[path], array, dst) for path, array in arrays.items()]
    result["many"] = all(are_right)
    move = move_of((24, 48), jnp.dtype("float32"), rows, dst)
    result["way"] = None
    if move.assembly is not None:
        result["way"] = move.assembly.method
    odd_array = placed(values((8, 8)), NamedSharding(mesh_by_name["all"], P("a")))
    odd = many | {"odd": odd_array}
    three = NamedSharding(mesh_by_name["three"], P("a"))
    result["error"], _ = multiprocess_worker.raised(reshard, odd, three)
    lost = [device for device in jax.devices() if device.process_index == 0]
    result["lost"], _ = multiprocess_worker.raised(reshard, many["0"], dst, lost=lost)
    return result | {"maps": through_maps(), "matrices": multiprocess_worker.matrices()}


MAP = TreeMap(
    {
        "l.{i}.qkv": From.concat(
            [
                From("q").at("i").T,
                From("k").at("i").T.repeat(2, unit=4),
                From("v").at("i").T.repeat(2, unit=4),
            ],
            shards=4,
        ),
        "scaled": From("w").scale("s", block=(8, 8)).cast("bfloat16").T,
        "ones": From.concat([From.constant(1.5, (8,), "float32"), From("b")]),
        "const": From.constant(3, (16,), "int32"),
        "empty": From("e").T,
        "b": "b",
        "keys": From("keys").split(0, 2, -1).T,
    }
)


def mapped_tree():
    shapes = {
        "q": (2, 16, 32),
        "k": (2, 16, 8),
        "v": (2, 16, 8),
        "w": (16, 24),
        "s": (2, 3),
        "b": (8,),
        "e": (0, 8),
    }
    return {path: values(shape) for path, shape in shapes.items()}


MAPPED = {
    "same devices": ("grid", "turned"),
    "disjoint": ("first", "last"),
    "odd": ("turned", "three"),
    "from one to another": ("one", "last one"),
    "within one": ("last one", "last one"),
}


def mapped_ends(name):
    """A tree where its name says, what NumPy makes of it, and structs of where that
    shall be.
    """
    mesh_by_name = meshes()
    source_name, target_name = MAPPED[name]
    source = mesh_by_name[source_name]
    target_mesh = mesh_by_name[target_name]
    arrays = mapped_tree()
    tree = {}
    for path, array in arrays.items():
        tree[path] = placed(array, spread(source, array.shape))
    keys = jax.random.split(jax.random.key(5), 8)
    # As a computation gives them: on the devices of the source alone.
    key_data = np.asarray(jax.random.key_data(keys))
    data = placed(key_data, NamedSharding(source, P()))
    tree["keys"] = jax.random.wrap_key_data(data)
    rules = {path: rule for path, rule in MAP.steps[0].rules if path != "keys"}
    map_without_keys = TreeMap(rules)
    whole = map_without_keys.apply(arrays)
    target = {}
    for path, array in whole.items():
        sharding = spread(target_mesh, array.shape, last=True)
        struct = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        target[path] = struct
    replicated = NamedSharding(target_mesh, P())
    target["keys"] = jax.ShapeDtypeStruct((4, 2), keys.dtype, sharding=replicated)
    key_data = np.asarray(jax.random.key_data(keys)).reshape(2, 4, 2)
    whole["keys"] = key_data.transpose(1, 0, 2)
    return tree, target, whole


def spread(mesh, shape, last=False):
    """Over all axes along one dimension that divides."""
    dims = []
    for dim, size in enumerate(shape):
        if size > 0 and size % mesh.size == 0:
            dims.append(dim)
    if last:
        dims.reverse()
    entries: list[Any] = [None] * len(shape)
    if dims:
        entries[dims[0]] = tuple(mesh.axis_names)
    return NamedSharding(mesh, P(*entries))


def mapped(name, **options):
    tree, target, whole = mapped_ends(name)
    moved = reshard(tree, target, map=MAP, **options)
    wrong = []
    for path, expected in whole.items():
        array = moved[path]
        if path == "keys":
            sharding = target[path].sharding
            is_right = array.sharding.is_equivalent_to(sharding, array.ndim)
            for shard in array.addressable_shards:
                data = jax.random.key_data(shard.data)
                is_right &= np.array_equal(data, expected)
        else:
            is_right = right(array, expected, target[path].sharding)
        if not is_right:
            wrong.append(path)
    are_deleted = all(array.is_deleted() for array in tree.values())
    return {"wrong": wrong, "deleted": are_deleted}


def through_maps():
    result: dict[str, object] = {}
    for name in MAPPED:
        result[name] = mapped(name, donate=name == "disjoint")
    shape = (16, 24)
    rows = spread(meshes()["grid"], shape)
    tree = {"w": placed(values(shape), rows)}
    structs = {"x": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)}
    factor = 1.0
    if jax.process_index() == 1:
        factor = 2.0
    times = TreeMap({"x": From("w").times(factor)})
    result["other map"], _ = multiprocess_worker.raised(
        reshard, tree, structs, map=times
    )
    result["error"], _ = multiprocess_worker.raised(
        mapped, "odd", memory_limit_bytes=10
    )
    # Pieces as they are fit into this.
    result["limited"] = mapped("odd", memory_limit_bytes=1 << 20)
    return result


multiprocess_worker.TASKS["moves"] = moves

if __name__ == "__main__":
    multiprocess_worker.main(*sys.argv[1:])
