"""The reads of boxes of an array, against a brute-force read of every byte."""

import itertools

import hypothesis as hyp
import hypothesis.strategies as st
import numpy as np

from shardfx.checkpoint._spans import spans


@st.composite
def grids(draw):
    """A shape, and some of the boxes of a grid over it."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    cuts = [
        sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        for size in shape
    ]
    boxes = list(itertools.product(*[list(itertools.pairwise(cut)) for cut in cuts]))
    return shape, draw(
        st.lists(st.sampled_from(boxes), min_size=1, max_size=len(boxes), unique=True)
    )


@st.composite
def any_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    edges = [
        st.tuples(st.integers(0, size), st.integers(0, size)).map(
            lambda e: tuple(sorted(e))
        )
        for size in shape
    ]
    return shape, draw(st.lists(st.tuples(*edges), min_size=1, max_size=4, unique=True))


def overlapping(boxes):
    """Whether some element is in two of the boxes."""
    edges = [
        list(zip(box, other, strict=True))
        for box, other in itertools.combinations(boxes, 2)
    ]
    return any(all(max(a, c) < min(b, d) for (a, b), (c, d) in pair) for pair in edges)


def check(grid, itemsize, gap_bytes, run_bytes, copy_bytes):
    """Reads the spans as the reader does; the number of bytes read, and of bytes
    needed.
    """
    shape, boxes = grid
    array = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    raw = np.repeat(array.ravel(), itemsize)
    needed = np.zeros(shape, bool)
    for box in boxes:
        needed[tuple(slice(*edge) for edge in box)] = True
    needed = np.repeat(needed.ravel(), itemsize)
    out = [np.full([stop - start for start, stop in box], -1) for box in boxes]
    total = 0
    limits = {"gap_bytes": gap_bytes, "run_bytes": run_bytes, "copy_bytes": copy_bytes}
    for span in spans(shape, itemsize, boxes, **limits):
        runs = [span.offset + number * span.step for number in range(span.runs)]
        data = np.concatenate([raw[start : start + span.run_bytes] for start in runs])
        text = b"".join(
            needed[start : start + span.run_bytes].tobytes() for start in runs
        )
        gaps = text.split(b"\1")
        assert max(map(len, gaps)) < gap_bytes, (
            "a gap is read that is long enough to be skipped"
        )
        assert len(data) == span.nbytes > 0
        assert span.nbytes <= max(run_bytes, copy_bytes, itemsize)
        total = total + span.nbytes
        position = 0
        for part in span.parts:
            strides = [8 * stride for stride in span.strides]
            values = np.ndarray(
                part.shape, np.int64, data.data, 8 * part.offset, strides
            )
            home = out[part.number][part.index]
            assert (home == -1).all(), "a byte of a box is read twice"
            if span.is_direct:
                nbytes = values.size * itemsize
                actual = data[position : position + nbytes : itemsize]
                assert (actual == values.ravel()).all()
                position += nbytes
            home[...] = values
        assert not span.is_direct or position == span.nbytes
    for box, shard in zip(boxes, out, strict=True):
        assert np.array_equal(shard, array[tuple(slice(*edge) for edge in box)])
    return total, int(needed.sum())


LIMITS = st.sampled_from([8, 64, 10_000])


@hyp.settings(max_examples=400, deadline=None)
@hyp.given(
    grids() | any_boxes(),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 4, 16, 1000]),
    LIMITS,
    LIMITS,
)
def test_every_box_gets_its_bytes(grid, itemsize, gap_bytes, run_bytes, copy_bytes):
    read, needed = check(
        grid,
        itemsize=itemsize,
        gap_bytes=gap_bytes,
        run_bytes=run_bytes,
        copy_bytes=copy_bytes,
    )
    if not overlapping(grid[1]):
        assert read >= needed
        assert read == needed or gap_bytes > 1
