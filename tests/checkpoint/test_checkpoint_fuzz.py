"""Headers that nobody wrote by hand: mutations of real ones, and any bytes."""

import json

import fuzz_headers
import hypothesis as hyp
import hypothesis.strategies as st
import pytest
import safetensors


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz").resolve()


def test_the_seeds_are_accepted(directory):
    refused = [seed[0] for seed in fuzz_headers.seeds() if not fuzz_headers.consume(seed, directory)]
    # The index of a set names a file that is not there.
    assert refused == [2]


@hyp.settings(max_examples=300, deadline=None)
@hyp.given(data=st.binary(max_size=200))
def test_any_bytes(directory, data):
    fuzz_headers.consume(data, directory)


@hyp.settings(max_examples=300, deadline=None)
@hyp.given(data=st.data())
def test_real_files_with_some_bytes_changed(directory, data):
    seed = bytearray(data.draw(st.sampled_from(fuzz_headers.seeds())))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(1, len(seed) - 1))
        seed[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
        hyp.assume(len(seed) > 1)
    fuzz_headers.consume(bytes(seed), directory)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@hyp.settings(max_examples=300, deadline=None)
@hyp.given(kind=st.integers(1, 5), data=st.data())
def test_real_files_with_other_values(directory, kind, data):
    [seed, *_] = [seed for seed in fuzz_headers.seeds() if seed[0] == kind]
    content = json.loads(seed[9 : 9 + int.from_bytes(seed[1:9], "little")] if kind == 1 else seed[1:])
    node, key = content, data.draw(st.sampled_from(sorted(content)))
    while isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
        node = node[key]
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    node[key] = data.draw(JSON)
    text = json.dumps(content).encode()
    if kind == 1:
        text = len(text).to_bytes(8, "little") + text + bytes(32)
    fuzz_headers.consume(bytes([kind]) + text, directory)


DTYPES = st.sampled_from(["F32", "BF16", "U8", "I64", "F8_E4M3", "BOOL", "F33"])
SIZES = st.lists(st.integers(-1, 4), max_size=3)


@hyp.settings(max_examples=500, deadline=None)
@hyp.given(st.lists(st.tuples(DTYPES, SIZES, st.integers(-2, 2), st.integers(-2, 2)), max_size=4), st.integers(-2, 2))
def test_what_is_accepted_is_what_the_format_s_own_library_accepts(rows, extra):
    width = {"F32": 4, "BF16": 2, "I64": 8}
    header, reached = {}, 0
    for number, (dtype, shape, early, late) in enumerate(rows):
        nbytes = width.get(dtype, 1)
        for size in shape:
            nbytes *= size
        # Mostly right, sometimes off by a little at either end.
        begin, end = reached + early // 2, reached + nbytes + late // 2
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        reached = end
    buffer_bytes = max(0, reached + extra // 2)
    text = json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text + bytes(buffer_bytes)
    try:
        safetensors.deserialize(file)
        accepted = True
    except safetensors.SafetensorError:
        accepted = False
    assert fuzz_headers.consume_header(text + buffer_bytes.to_bytes(2, "little")) == accepted
