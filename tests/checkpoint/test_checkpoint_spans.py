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
    intervals_by_dim = []
    for size in shape:
        cuts = draw(st.lists(st.integers(0, size), max_size=2))
        edges = sorted({0, size, *cuts})
        intervals_by_dim.append(list(itertools.pairwise(edges)))
    all_boxes = list(itertools.product(*intervals_by_dim))
    boxes = st.lists(
        st.sampled_from(all_boxes),
        min_size=1,
        max_size=len(all_boxes),
        unique=True,
    )
    return shape, draw(boxes)


@st.composite
def any_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    intervals = []
    for size in shape:
        edges = st.tuples(st.integers(0, size), st.integers(0, size))
        intervals.append(edges.map(lambda pair: tuple(sorted(pair))))
    box = st.tuples(*intervals)
    return shape, draw(st.lists(box, min_size=1, max_size=4, unique=True))


def overlapping(boxes):
    """Whether some element is in two of the boxes."""
    for box, other in itertools.combinations(boxes, 2):
        has_common = True
        for (start, stop), (other_start, other_stop) in zip(box, other, strict=True):
            has_common &= max(start, other_start) < min(stop, other_stop)
        if has_common:
            return True
    return False


def index_of(box):
    return tuple(slice(*interval) for interval in box)


def check(grid, itemsize, gap_bytes, run_bytes, copy_bytes):
    """Reads the spans as the reader does; the number of bytes read, and of bytes
    needed.
    """
    shape, boxes = grid
    array = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    raw = np.repeat(array.ravel(), itemsize)
    needed = np.zeros(shape, bool)
    for box in boxes:
        needed[index_of(box)] = True
    needed = np.repeat(needed.ravel(), itemsize)
    out = [np.full([stop - start for start, stop in box], -1) for box in boxes]
    total = 0
    limits = {"gap_bytes": gap_bytes, "run_bytes": run_bytes, "copy_bytes": copy_bytes}
    for span in spans(shape, itemsize, boxes, **limits):
        runs = []
        for number in range(span.runs):
            start = span.offset + number * span.step
            runs.append(slice(start, start + span.run_bytes))
        data = np.concatenate([raw[run] for run in runs])
        is_needed = np.concatenate([needed[run] for run in runs])
        gaps = is_needed.tobytes().split(b"\1")
        assert max(map(len, gaps)) < gap_bytes, (
            "a gap is read that is long enough to be skipped"
        )
        assert len(data) == span.nbytes > 0
        assert span.nbytes <= max(run_bytes, copy_bytes, itemsize)
        total += span.nbytes
        position = 0
        for part in span.parts:
            strides = [8 * stride for stride in span.strides]
            values = np.ndarray(
                shape=part.shape,
                dtype=np.int64,
                buffer=data.data,
                offset=8 * part.offset,
                strides=strides,
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
        assert np.array_equal(shard, array[index_of(box)])
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
    _, boxes = grid
    if not overlapping(boxes):
        assert read >= needed
        assert read == needed or gap_bytes > 1
