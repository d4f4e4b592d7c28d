"""Sorting and numbering of arrays of small integers, such as device numbers, in time
proportional to their length where possible.
"""

from typing import NamedTuple

import numpy as np


# NumPy sorts 16-bit integers by their digits, others by comparisons.
_SMALL = 2**16
# A table may have this many entries for each element that is looked up in it.
_ENTRIES_PER_ELEMENT = 8


def stable_order(numbers: np.ndarray) -> np.ndarray:
    """The positions of the elements of `numbers`, integers from 0, in ascending order.
    Equal elements stay in their order.
    """
    if numbers.max(initial=0) < _SMALL:
        numbers = numbers.astype(np.uint16)
    return np.argsort(numbers, kind="stable")


class Numbered(NamedTuple):
    """The different values of an array, ascending, and for each element the number of
    its value among them.
    """

    values: np.ndarray
    numbers: np.ndarray


def numbered(keys: np.ndarray) -> Numbered:
    """The different values of `keys`, integers from 0, in ascending order, and for each
    key the number of its value: (2, 5, 7) and (1, 0, 1, 2) for the keys 5, 2, 5, 7.
    """
    # The entries of a table with one entry for each integer up to the largest key.
    entries = int(keys.max(initial=0)) + 1
    if entries > _ENTRIES_PER_ELEMENT * len(keys):
        values, numbers = np.unique(keys, return_inverse=True)
        return Numbered(values, numbers.reshape(-1))
    is_there = np.zeros(entries, bool)
    is_there[keys] = True
    number_of_value = np.cumsum(is_there) - 1
    (values,) = np.nonzero(is_there)
    return Numbered(values, number_of_value[keys])


def firsts(numbers: np.ndarray, count: int) -> np.ndarray:
    """The position of the first element with each of the values 0 to `count - 1`, all of
    which occur.
    """
    positions = np.arange(len(numbers))
    first_positions = np.empty(count, np.int64)
    # Of several assignments to one element, NumPy keeps the last.
    first_positions[numbers[::-1]] = positions[::-1]
    return first_positions


def occurrences(numbers: np.ndarray) -> np.ndarray:
    """For each element, how many elements before it are equal to it."""
    order = stable_order(numbers)
    counts = np.bincount(numbers)
    # Among the sorted elements, the first of each number.
    starts = np.cumsum(counts) - counts
    occurrences_in_order = np.arange(len(numbers)) - starts[numbers[order]]
    occurrence = np.empty(len(numbers), np.int64)
    occurrence[order] = occurrences_in_order
    return occurrence
