"""Copies between views of different memory orders give the same result as NumPy's
assignment, in blocks if needed.
"""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardfx._ground import copying


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize(
    "shape", [(513, 1024), (1024, 1408), (40, 3, 2048), (7,), (), (0, 4)]
)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_copy_is_an_assignment(shape, dtype, data):
    order = data.draw(st.permutations(range(len(shape))))
    source = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    array = np.ascontiguousarray(source.transpose(order)).reshape(
        [shape[dim] for dim in order]
    )
    target = np.zeros_like(array)
    copying.copy(target, source.transpose(order))
    np.testing.assert_array_equal(target, array)


def test_repeated_rows_are_copied_in_blocks_too():
    source = np.random.default_rng(0).integers(0, 200, (1024, 2048)).astype(np.uint16)
    repeated = np.broadcast_to(source.T[None], (2, 2048, 1024))
    target = np.zeros(repeated.shape, np.uint16)
    assert copying.block_dim(target.shape, target.strides, repeated.strides) == 2
    copying.copy(target, repeated)
    np.testing.assert_array_equal(target, repeated)


@pytest.mark.parametrize(
    "shape,there,block,expected",
    [
        # Rows of 2048 bytes: 2048 lines in 32 sets.
        (
            (1024, 2048),
            (4096, 2),
            (2, 2048),
            1,
        ),
        # Rows of 2816 bytes spread over all sets.
        (
            (1408, 1024),
            (2048, 2),
            (2, 2816),
            None,
        ),
        ((1024, 2048), (4096, 2), (4096, 2), None),  # not turned
        # Rows of one element, repeated.
        (
            (1024, 2048),
            (4096, 2),
            (2, 0),
            None,
        ),
        # Blocks too small to be worth a call each.
        (
            (16, 2048),
            (4096, 2),
            (2, 2048),
            None,
        ),
        # Lines that are read only in part anyway.
        (
            (8, 4096),
            (8192, 2),
            (2, 2048),
            None,
        ),
        ((64, 64), (128, 2), (2, 128), None),  # small
    ],
)
def test_copies_go_in_blocks_where_lines_would_not_stay(shape, there, block, expected):
    assert copying.block_dim(shape, there, block) == expected
