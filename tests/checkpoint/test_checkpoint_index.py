"""The index of a checkpoint: every layout of safetensors, and damaged and hostile
files.
"""

import json
import os
import re
import struct
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

import shardfx
from shardfx import MeshSpec, PathRules, checkpoint
from shardfx.errors import CheckpointError, UnknownPathError


def raw_file(path, header, buffer=b""):
    """A file with any header: a dict, or bytes."""
    if isinstance(header, bytes):
        data = header
    else:
        data = json.dumps(header).encode()
    size = struct.pack("<Q", len(data))
    path.write_bytes(size + data + buffer)
    return path


def tensor(shape, offsets, dtype: Any = "F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def set_of_files(directory, weight_map=None):
    array = np.ones((2, 2), np.float32)
    save_file({"a": array}, directory / "model-1.safetensors")
    vector = np.ones(3, np.float32)
    save_file({"b": vector}, directory / "model-2.safetensors")
    weight_map = weight_map or {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = directory / "model.safetensors.index.json"
    text = json.dumps({"weight_map": weight_map})
    index.write_text(text)
    return directory


def test_a_file_and_a_set_are_read_by_name_and_by_directory(tmp_path):
    w = np.ones((4, 2), jnp.bfloat16)
    b = np.zeros(3, np.int8)
    arrays = {
        "w": w,
        "model.b": b,
        "s": np.array(1.5),
    }
    file = tmp_path / "model.safetensors"
    save_file(arrays, file, metadata={"format": "pt"})
    path_of_file = tmp_path / "model.safetensors"
    for path in (tmp_path, path_of_file, str(tmp_path)):
        index = checkpoint.read_index(path)
        actual = {}
        for entry in index.entries:
            actual[entry.path] = (entry.shape, entry.dtype)
        expected = {}
        for name, array in arrays.items():
            expected[name] = (array.shape, array.dtype)
        assert actual == expected
        assert index.bytes_total == 16 + 3 + 8
        assert index.metadata == {"format": "pt"}
        assert index.format == "safetensors"
    first_file = tmp_path / "model.safetensors"
    (first_file).unlink()
    set_of_files(tmp_path)
    index_file = tmp_path / "model.safetensors.index.json"
    for path in (tmp_path, index_file):
        index = checkpoint.read_index(path)
        assert list(index) == ["a", "b"]
        assert os.path.basename(index["b"].file) == "model-2.safetensors"
    old_index = tmp_path / "model.safetensors.index.json"
    (old_index).unlink()
    names = list(checkpoint.read_index(tmp_path))
    assert names == ["a", "b"]


def test_structs_are_a_tree_that_a_plan_takes(tmp_path):
    arrays_by_name = {}
    for name in ("a/b", "a/c/d", "e.f"):
        arrays_by_name[name] = np.ones((2, 2), np.float32)
    save_file(
        arrays_by_name,
        tmp_path / "x.safetensors",
    )
    tree = checkpoint.structs(tmp_path)
    array = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    expected = {"a": {"b": array, "c": {"d": array}}, "e.f": array}
    assert tree == expected
    mesh = MeshSpec({"x": 2})
    rules = PathRules.parse(".*->x")
    whole_plan = shardfx.plan(tree, mesh, paths=rules)
    sharding_plan = whole_plan["a/c/d"]
    spec = sharding_plan.spec
    assert spec == jax.P("x")
    header = {"w": tensor([2], [0, 1], "F4")}
    raw_file(tmp_path / "x.safetensors", header, b"\0")
    structs = checkpoint.structs(tmp_path)
    assert structs["w"].dtype == jnp.float4_e2m1fn


def test_an_index_prints_as_a_short_table(tmp_path):
    arrays = {}
    for i in range(100):
        arrays[f"layers.{i}.w"] = np.zeros((8, 4), np.float32)
    array = np.zeros((64, 8), np.float16)
    file = tmp_path / "x.safetensors"
    save_file(arrays | {"embed": array}, file)
    index = checkpoint.read_index(tmp_path)
    expected = [
        "path              arrays  shape         bytes",
        "layers.{0..99}.w     100  f32[8,4]   12.5 KiB",
        "embed                  1  f16[64,8]   1.0 KiB",
        f"101 arrays, 13.5 KiB, in safetensors at {str(tmp_path)!r}",
    ]
    text = str(index)
    assert text.splitlines() == expected
    assert repr(index) == str(index)
    page = index._repr_html_()
    assert "layers.{0..99}.w" in page
    assert len(index) == 101
    assert "embed" in index
    assert "down" not in index
    assert 0 not in index
    with pytest.raises(UnknownPathError, match=r"no array 'zzz'; it has 'layers.0.w'"):
        index["zzz"]
    many = {}
    for i in range(30):
        many[f"a{i}"] = np.zeros(i, np.float32)
    other_file = tmp_path / "x.safetensors"
    save_file(
        many,
        other_file,
    )
    index = checkpoint.read_index(tmp_path)
    lines = str(index).splitlines()
    assert len(lines) == 27
    assert lines[-2] == "... 6 arrays more"
    names = list(index)
    assert "a7" in names


def test_nothing_there(tmp_path):
    absent = tmp_path / "absent"
    with pytest.raises(CheckpointError, match="there is no checkpoint at .*absent"):
        checkpoint.read_index(absent)
    with pytest.raises(
        CheckpointError, match="holds no checkpoint: no .safetensors file"
    ):
        checkpoint.read_index(tmp_path)
    for step in ("step-3", "step-7"):
        (tmp_path / step).mkdir()
    with pytest.raises(
        CheckpointError,
        match="It holds '.*step-3', '.*step-7': if these are steps of a run, name one",
    ):
        checkpoint.read_index(tmp_path)


header_of_one = json.dumps({"a": tensor([1], [0, 4])})
ONE = header_of_one.encode()


def raw(extra=b"", name=b'"a"', before=b""):
    """The header of one array, with something more in its fields, another name, or
    something before it.
    """
    return (
        b"{"
        + before
        + name
        + b': {"dtype":"F32","shape":[1],"data_offsets":[0,4]'
        + extra
        + b"}}"
    )


# Headers, and what is said of them behind four bytes each: None where they are read, ""
# whatever the refusal says.
HEADERS = {
    "plain": (ONE, None),
    "spaces around": (b"  " + ONE + b"\n\t ", None),
    "text after the end": (ONE + b"\0", "is no valid JSON"),
    "not JSON": (b"{nonsense", "is no valid JSON"),
    "not an object": (b"[1]", "is no JSON object"),
    "nested without end": (b"[" * 100_000, "nested too deeply"),
    "a number of a million digits": (
        b'{"a": ' + b"1" * 1_000_000 + b"}",
        "is no valid JSON",
    ),
    "a byte order mark": (b"\xef\xbb\xbf" + ONE, "is no valid JSON"),
    **{
        code: (ONE.decode().encode(code), "is no valid JSON")
        for code in ("utf-16", "utf-16-le", "utf-32")
    },
    **{
        f"the name {name!r}": (raw(name=b'"' + name + b'"'), message)
        for name, message in [
            *[
                (name, None)
                for name in (b"", rb"\ud83d\ude00", rb"\\ud800", rb"a\u0000")
            ],
            *[
                (name, "is no valid JSON: it is not UTF-8")
                for name in (rb"\ud800", rb"\udfff", rb"\ude00\ud83d")
            ],
            *[
                (name, "is no valid JSON")
                for name in (b"\xed\xa0\x80", b"\xff", b"a\x01")
            ],
        ]
    },
    "no metadata": (raw(before=b'"__metadata__":null,'), None),
    **{
        f"the metadata {value!r}": (
            raw(before=b'"__metadata__":' + value + b","),
            "must map strings to strings",
        )
        for value in (b"[]", b"false", b'""', b'{"a":1}')
    },
    "NaN in the metadata": (
        raw(before=b'"__metadata__":{"a":NaN},'),
        "NaN is no number that a double holds",
    ),
    "half of a character in the metadata": (
        raw(before=rb'"__metadata__":{"a":"\ud800"},'),
        "it is not UTF-8",
    ),
    "metadata twice": (
        raw(before=b'"__metadata__":{},"__metadata__":{},'),
        "'__metadata__' occurs twice",
    ),
    **{
        f"the further field {value[:40]!r} of {len(value)} bytes": (
            raw(b',"x":' + value),
            message,
        )
        for value, message in [
            *[
                (value, None)
                for value in (
                    b'{"y":[1,2.5,null,true,"z"]}',
                    b"-0",
                    b"1" * 20,
                    b"1" * 309,
                )
            ],
            (b"[" * 125 + b"]" * 125, None),
            *[(b"[" * n + b"]" * n, "nested ") for n in (126, 5000)],
            (b'{"y":' * 125 + b"1" + b"}" * 125, None),
            (b'{"y":' * 126 + b"1" + b"}" * 126, "nested "),
            *[
                (value, "")
                for value in (b"NaN", b"1e999", b'"\\ud800"', b"-" + b"1" * 401)
            ],
            *[(b"1" * n, "") for n in (401, 5000)],
        ]
    },
    "a field twice": (raw(b',"dtype":"F32"'), "occurs twice"),
    "an entry that is null": (
        {"a": None},
        "must have `dtype`, `shape` and `data_offsets`",
    ),
    "a missing field": ({"a": {"dtype": "F32"}}, "must have `dtype`"),
    "a dtype in small letters": (
        {"a": tensor([1], [0, 4], "f32")},
        "dtype 'f32', which is none of BOOL",
    ),
    "a dtype that is no string": (
        {"a": tensor([1], [0, 4], ["F32"])},
        "which is none of",
    ),
    "a negative size": ({"a": tensor([-1], [0, 4])}, "non-negative integers"),
    "a size of minus zero": (
        b'{"a": {"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}',
        "non-negative|4 follow",
    ),
    "a fraction": ({"a": tensor([1.0], [0, 4])}, "non-negative integers"),
    "a boolean size": ({"a": tensor([True], [0, 4])}, "non-negative integers"),
    "one offset": ({"a": tensor([1], [0])}, "the offsets two"),
    "three offsets": ({"a": tensor([1], [0, 4, 4])}, "the offsets two"),
    "offsets backwards": ({"a": tensor([1], [4, 0])}, "damaged or forged"),
    "an absurd shape": ({"a": tensor([2**62, 2**62], [0, 4])}, "below 2\\*\\*59"),
    "an absurd shape of nothing": ({"a": tensor([2**62, 2**62, 0], [0, 0])}, ""),
    "a size beyond 64 bits": ({"a": tensor([2**70], [0, 4])}, "below 2\\*\\*63"),
    "too few bytes for the shape": ({"a": tensor([2], [0, 4])}, "needs 8 bytes"),
    "an overlap": (
        {"a": tensor([1], [0, 4]), "b": tensor([1], [0, 4])},
        "'b' .* overlaps the one before it",
    ),
    "a hole": (
        {"a": tensor([0], [0, 0]), "b": tensor([1], [4, 8])},
        "'b' .* leaves a hole",
    ),
    "a hole at the start": ({"a": tensor([1], [4, 8])}, "leaves a hole"),
    "beyond the end": ({"a": tensor([2], [0, 8])}, "take 8 bytes, but 4 follow"),
    "bytes that belong to nobody": (
        {"a": tensor([0], [0, 0])},
        "take 0 bytes, but 4 follow",
    ),
}
# Read there and refused here.
STRICTER = {
    "a name twice": (raw()[:-1] + b"," + raw()[1:], "'a' occurs twice"),
    "a further field's name twice": (raw(b',"x":1,"x":2'), "'x' occurs twice"),
    "a list for an entry": ({"a": ["F32", [1], [0, 4]]}, "must have `dtype`"),
    "more dimensions than NumPy has": (
        {"a": tensor([1] * 65, [0, 4])},
        "at most 64 non-negative integers",
    ),
    "an absurd shape behind a zero": (
        {"a": tensor([0, 2**62, 2**62], [0, 0])},
        "below 2\\*\\*59",
    ),
    "an empty array with a size beyond 63 bits": (
        {"a": tensor([1, 0, 2**63], [0, 0])},
        "below 2\\*\\*63",
    ),
}


def is_read_there(header, nbytes):
    try:
        size = struct.pack("<Q", len(header))
        data = size + header + bytes(nbytes)
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return False
    return True


@pytest.mark.parametrize("case", HEADERS | STRICTER)
def test_headers_are_read_as_by_the_library_of_the_format(tmp_path, case):
    headers = HEADERS | STRICTER
    header, message = headers[case]
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    for nbytes in (0, 4):
        file = tmp_path / "x.safetensors"
        path = raw_file(file, header, bytes(nbytes))
        try:
            checkpoint.read_index(path)
            error_text = None
        except CheckpointError as error:
            error_text = str(error)
            assert "x.safetensors" in error_text
            assert len(error_text) < 1000
        if nbytes == 4:
            assert (
                re.search(message, error_text)
                if error_text and message is not None
                else message is None
            )
        is_read = is_read_there(header, nbytes)
        expected = is_read and (case not in STRICTER)
        is_accepted = error_text is None
        assert is_accepted == expected


size_of_one = len(ONE).to_bytes(8, "little")
WHOLE = size_of_one + ONE + bytes(4)


@pytest.mark.parametrize(
    "data",
    [
        *[WHOLE[:length] for length in (0, 3, 7, 8, 20, -1, -4)],
        *[
            claimed.to_bytes(8, "little") + b"{}"
            for claimed in (3, 2**20, 2**40, 2**64 - 1)
        ],
    ],
)
def test_a_truncated_file(tmp_path, data):
    file = tmp_path / "x.safetensors"
    file.write_bytes(data)
    with pytest.raises(
        CheckpointError,
        match="truncated|ends within its header|claims a header of|no valid JSON",
    ):
        checkpoint.read_index(tmp_path)


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "/etc/passwd", "a/../../x", "..", "\0", ""]
)
def test_an_index_that_names_files_elsewhere(tmp_path, name):
    set_of_files(tmp_path, {"a": name})
    with pytest.raises(
        CheckpointError,
        match="not a relative path below the directory; nothing outside it is opened",
    ):
        checkpoint.read_index(tmp_path)


def test_links_are_followed_inside_the_directory_alone(tmp_path):
    outside = tmp_path / "outside"
    directory = tmp_path / "model"
    outside.mkdir()
    directory.mkdir()
    blob = outside / "blob"
    save_file({"a": np.ones(1)}, blob)
    link = outside / "model.safetensors"
    (link).symlink_to("blob")
    index_of_outside = checkpoint.read_index(outside)
    assert index_of_outside["a"].shape == (1,)
    link_outside = directory / "model.safetensors"
    (link_outside).symlink_to("../outside/blob")
    with pytest.raises(
        CheckpointError,
        match=r"symbolic link that leaves the directory.*root='.*/outside'",
    ):
        checkpoint.read_index(directory)
    # Whoever names the file, or the place that links may lead to, has decided.
    with_root = checkpoint.read_index(directory, root=outside)
    by_file = checkpoint.read_index(directory / "model.safetensors")
    for index in (
        with_root,
        by_file,
    ):
        assert index["a"].shape == (1,)
    linked = directory / "linked"
    (linked).symlink_to("../outside")
    first_link = directory / "model.safetensors"
    (first_link).unlink()
    encoded = json.dumps({"weight_map": {"a": "linked/blob"}})
    index_file = directory / "model.safetensors.index.json"
    (index_file).write_text(encoded)
    with pytest.raises(CheckpointError, match="symbolic link that leaves"):
        checkpoint.read_index(directory)


def test_a_link_put_there_after_the_check_is_not_followed(tmp_path):
    directory = tmp_path / "model"
    outside = tmp_path / "outside"
    for folder in (directory, outside, directory / "sub"):
        folder.mkdir()
    array = np.ones((2, 2), np.float32)
    for folder in (directory / "sub", outside):
        save_file({"a": array}, folder / "w.safetensors")
    encoded = json.dumps({"weight_map": {"a": "sub/w.safetensors"}})
    (directory / "model.safetensors.index.json").write_text(encoded)
    # The names are checked when the index is read, and the files opened at the load.
    index = checkpoint.read_index(directory)
    (directory / "sub").rename(directory / "moved")
    (directory / "sub").symlink_to(outside)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        checkpoint.load(index, {"a": jnp.asarray(array)})


def test_a_file_that_is_no_file_does_not_hang(tmp_path):
    for make, remove in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir)):
        file = tmp_path / "a.safetensors"
        make(file)
        with pytest.raises(CheckpointError, match="is no regular file"):
            checkpoint.read_index(tmp_path)
        remove(tmp_path / "a.safetensors")


def test_an_index_that_is_wrong_about_its_files(tmp_path):
    set_of_files(tmp_path, {"a": "model-2.safetensors"})
    with pytest.raises(
        CheckpointError, match="says that tensor 'a' is in 'model-2.safetensors'"
    ):
        checkpoint.read_index(tmp_path)
    second_file = tmp_path / "model-2.safetensors"
    (second_file).unlink()
    with pytest.raises(CheckpointError, match=r"model-2.safetensors' is missing"):
        checkpoint.read_index(tmp_path)
    for content in ("[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}'):
        index_file = tmp_path / "model.safetensors.index.json"
        index_file.write_text(content)
        with pytest.raises(CheckpointError, match="has no `weight_map`"):
            checkpoint.read_index(tmp_path)
    large_index = tmp_path / "model.safetensors.index.json"
    os.truncate(large_index, 2**33)
    with pytest.raises(
        CheckpointError, match="more than the 100000000 allowed for an index"
    ):
        checkpoint.read_index(tmp_path)


def test_two_sets_and_two_owners_are_ambiguous(tmp_path):
    set_of_files(tmp_path)
    other_index = tmp_path / "other.safetensors.index.json"
    (other_index).write_text("{}")
    with pytest.raises(CheckpointError, match="several safetensors sets"):
        checkpoint.read_index(tmp_path)
    whole_file = tmp_path / "model.safetensors"
    save_file({"whole": np.ones(3)}, whole_file)
    assert list(checkpoint.read_index(tmp_path)) == ["whole"]
    whole_file.unlink()
    for name in tmp_path.glob("*.json"):
        name.unlink()
    third_file = tmp_path / "model-3.safetensors"
    save_file({"b": np.ones(3)}, third_file)
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'b' is in '.*model-2.safetensors' and in '.*model-3",
    ):
        checkpoint.read_index(tmp_path)


@pytest.mark.parametrize(
    "names", [["a", "a/b"], ["a/b", "a"], ["a/b/c", "a"], ["x", "a/b/c", "a/b"]]
)
def test_a_path_is_a_leaf_or_a_branch(tmp_path, names):
    arrays_by_name = {}
    for name in names:
        arrays_by_name[name] = np.ones(1)
    file = tmp_path / "x.safetensors"
    save_file(arrays_by_name, file)
    index = checkpoint.read_index(tmp_path)
    with pytest.raises(CheckpointError, match="a tree cannot hold both"):
        checkpoint.structs(index)


def test_reading_headers_reads_no_weights(tmp_path, monkeypatch):
    array = np.ones(2**20, np.float32)
    save_file({"w": array}, tmp_path / "x.safetensors")
    read = []
    pread = os.pread

    def counted(fd, count, offset):
        return (read.append(count), pread(fd, count, offset))[1]

    monkeypatch.setattr(
        os,
        "pread",
        counted,
    )
    index = checkpoint.read_index(tmp_path)
    checkpoint.structs(index)
    total = sum(read)
    assert total < 1000


def test_the_page_lists_every_format():
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    section = page.partition("## Other formats")[2]
    listed = re.findall(r'^\| .+ \| "(\w+)" \| .+ \|$', section, re.MULTILINE)
    assert sorted(listed) == sorted(
        get_args(checkpoint.Index.__annotations__["format"])
    )
