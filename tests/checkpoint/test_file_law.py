"""The law of files: each array and number of a checkpoint reaches a leaf, is left out by
name or by `unread="allow"`, or is an error. For every reader, and for random trees.

More examples: `python -m pytest tests/checkpoint/test_file_law.py
--hypothesis-profile=many`.
"""

import itertools
from typing import Any, NamedTuple

import hypothesis as hyp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _stores import eformer, orbax, zarr
from jax.sharding import NamedSharding, PartitionSpec as P
from safetensors.numpy import save_file

import shardfx
from shardfx import TreeMap, checkpoint
from shardfx.errors import CheckpointError, MapError


PATHS = ("a", "b", "m/a", "m/b", "m/c", "n/0")
# What a path of the file holds: an array, or a Python number.
ARRAYS = (
    np.arange(8, dtype=np.float32),
    np.arange(8, dtype=np.int32),
    np.ones((2, 4), np.float32),
    np.zeros((0, 4), np.float32),
    np.float32(0.1),
    np.int32(7),
    np.int64(-5),
    np.uint8(200),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.array([3], np.int32),
    np.array(1.5, jnp.bfloat16),
)
NUMBERS = (0, 5, -3, 2**60, True, False, 0.5, 1e300, 2j)
FOREIGN = ("safetensors", "set", "zarr", "ocdbt", "eformer", "orbax")
OWN = ("file", "directory", "manager")


class Absent:
    """No leaf of the target."""


class LeftOut(NamedTuple):
    """An array that `plan.select` leaves out."""

    array: Any


def activation(x):
    return x


def same_kind(value):
    return st.just(value)


@st.composite
def cases(draw):
    """A file by path, the target by path, and how it is loaded."""
    form = draw(st.sampled_from((*OWN, *FOREIGN)))
    what = st.sampled_from(ARRAYS)
    if form in OWN or form == "orbax":
        what = st.one_of(what, st.sampled_from(NUMBERS))
    paths = draw(st.lists(st.sampled_from(PATHS), unique=True, max_size=4))
    file = {path: draw(what) for path in paths}
    if form == "orbax":
        # It writes neither of these.
        hyp.assume(all(np.size(value) for value in file.values()))
        hyp.assume(complex not in map(type, file.values()))
    if form in OWN:
        # `save` refuses 64 bits that JAX does not hold.
        file = {path: as_saved(value) for path, value in file.items()}
    target = {}
    for path in PATHS:
        choices = [st.just(Absent), st.just(activation), st.sampled_from(NUMBERS)]
        choices.append(st.sampled_from(ARRAYS).map(as_planned))
        if path in file:
            choices += [st.just(file[path]).map(as_planned)] * 4
            choices.append(st.just(LeftOut(np.ones(8, np.float32))))
        target[path] = draw(st.one_of(choices))
    # Each tree has one array that fits.
    file["w"] = target["w"] = np.arange(16, dtype=np.float32)
    drops = draw(st.lists(st.sampled_from(sorted(file)), unique=True, max_size=2))
    how = draw(st.sampled_from(("plan", "live", "structs")))
    by_map = draw(st.sampled_from((None, None, tuple(set(drops) - {"w"}))))
    return form, file, target, how, by_map, draw(st.sampled_from(("raise", "allow")))


def as_saved(value):
    if getattr(value, "dtype", None) == np.int64:
        return np.int32(-5)
    return value


def as_planned(value):
    """The value as a target may have it: JAX has no 64 bits here."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value, jax.dtypes.canonicalize_dtype(value.dtype))
    return value


def nested(leaves):
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, name = path.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = leaf
    return tree


def written(form, directory, file):
    """Writes a file by its own library, and returns its path."""
    arrays = {
        path: np.asarray(value)
        for path, value in file.items()
        if isinstance(value, np.ndarray | np.generic)
    }
    path = directory / "c"
    match form:
        case "file":
            path = directory / "c.safetensors"
            checkpoint.save(path, nested(file))
        case "directory":
            checkpoint.save(path, nested(file), file_bytes=64)
        case "manager":
            with checkpoint.Manager(path) as manager:
                manager.save(3, nested(file))
            path = path / "step-3"
        case "safetensors":
            path = directory / "c.safetensors"
            save_file(arrays, path)
        case "set":
            path.mkdir()
            for number, (name, array) in enumerate(arrays.items()):
                save_file({name: array}, path / f"part-{number}.safetensors")
        case "orbax":
            # Orbax writes Python numbers, but not NumPy's.
            orbax(path, nested({**file, **arrays}))
        case _:
            path.mkdir()
            driver = "zarr3" if form == "zarr" else "zarr"
            for name, array in arrays.items():
                zarr(
                    path,
                    name,
                    array,
                    chunks=[max(size, 1) for size in array.shape],
                    driver=driver,
                    ocdbt=form == "ocdbt",
                )
            if form == "eformer":
                eformer(path, arrays=[{"path": name} for name in arrays])
    return path


class Wrong(Exception):
    """The load must raise."""


def expected(form, file, target, how, by_map, unread):
    """What each path of the target must hold. Raises `Wrong` for an error."""
    leaves = {}
    is_own = form in OWN
    for path, value in file.items():
        leaf = target.get(path, Absent)
        # A map knows nothing of `select`.
        if isinstance(leaf, LeftOut) and by_map is None and how == "plan":
            continue
        if leaf is Absent or leaf is activation or isinstance(leaf, LeftOut):
            # A drop says what no rule uses.
            if unread != "allow" and path not in (by_map or ()):
                raise Wrong(path)
        elif isinstance(leaf, np.ndarray | np.generic):
            leaves[path] = as_array(form, value, leaf)
        else:
            leaves[path] = as_number(form, value, leaf, how)
    for path, leaf in target.items():
        if path in leaves or leaf is Absent or isinstance(leaf, LeftOut):
            continue
        if isinstance(leaf, np.ndarray | np.generic):
            raise Wrong(path)
        if leaf is activation:
            leaves[path] = None if how == "plan" else activation
        elif is_own and by_map is None:
            raise Wrong(path)
        else:
            leaves[path] = None if how == "plan" else leaf
    return leaves


def as_array(form, value, leaf):
    if not isinstance(value, np.ndarray | np.generic):
        if form in OWN:
            raise Wrong
        # Orbax writes a number as an array.
        value = np.asarray(value)
    value = np.asarray(value)
    if value.shape != leaf.shape or value.dtype != leaf.dtype:
        raise Wrong
    return value


def as_number(form, value, leaf, how):
    is_array = isinstance(value, np.ndarray | np.generic)
    if not is_array and form in OWN:
        return value
    value = np.asarray(value)
    if value.shape != ():
        raise Wrong
    if value.dtype == jnp.bfloat16:
        value = value.astype(np.float32)
    number = value.item()
    if how == "plan" or type(number) is type(leaf):
        return number
    is_wider = {float: (int,), complex: (int, float)}.get(type(leaf), ())
    if type(number) not in is_wider or type(leaf)(number) != number:
        raise Wrong
    return type(leaf)(number)


def target_tree(target, how, mesh):
    """The second argument of `load`."""
    leaves: dict[str, Any] = {}
    left_out = []
    for path, leaf in target.items():
        if leaf is Absent or (isinstance(leaf, LeftOut) and how != "plan"):
            continue
        if isinstance(leaf, LeftOut):
            left_out.append(path)
            leaf = leaf.array
        leaves[path] = leaf
    sharding = NamedSharding(mesh, P())
    if how == "plan":
        plan = shardfx.plan(nested(leaves), mesh, unmatched="replicate")
        if left_out:
            names = "|".join(f"^{path}$" for path in leaves if path not in left_out)
            plan = plan.select(names)
        return plan
    for path, leaf in leaves.items():
        if not isinstance(leaf, np.ndarray | np.generic):
            continue
        struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        is_struct = how == "structs"
        if is_struct:
            leaves[path] = struct
        else:
            leaves[path] = jax.device_put(leaf, sharding)
    return nested(leaves)


EXAMPLES = hyp.settings.get_current_profile_name() == "many"


@hyp.settings(max_examples=400 if EXAMPLES else 40, deadline=None)
@hyp.given(cases())
def test_nothing_of_a_file_is_swallowed(tmp_path_factory, mesh, case):
    form, file, target, how, by_map, unread = case
    path = written(form, tmp_path_factory.mktemp("law"), file)
    tree = target_tree(target, how, mesh)
    if by_map is None:
        map = None
    else:
        map = TreeMap({"{p*}": "{p*}"}, drop=by_map)
    try:
        expected_tree = nested(expected(*case))
    except Wrong:
        with pytest.raises((CheckpointError, MapError)):
            checkpoint.load(path, tree, map, unread=unread)
        return
    loaded = checkpoint.load(path, tree, map, unread=unread)
    pairs = itertools.zip_longest(by_path(expected_tree), by_path(loaded))
    for (where, leaf), (also, other) in pairs:
        assert where == also
        if isinstance(leaf, np.ndarray):
            assert isinstance(other, jax.Array)
            assert other.dtype == leaf.dtype
            assert np.asarray(other).tobytes() == leaf.tobytes()
        else:
            assert type(other) is type(leaf), where
            assert other is leaf or other == leaf, where


def by_path(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
    rows = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    return [row for row in rows if row[1] is not None]
