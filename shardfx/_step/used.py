"""The operations of a step on which its results depend."""

import dataclasses
from collections.abc import Mapping, Sequence

from .factors import Operation


def used_operations(
    operations: list[Operation],
    results: Sequence[int],
    free_operands: Mapping[int, Sequence[int]],
) -> list[Operation]:
    """The operations on which the step's results depend, also inside loops. Compilers
    remove all other operations. `free_operands` has the operands of each free value
    that no operation of `operations` computes.
    """
    live: set[int] = set()
    are_used = [False] * len(operations)

    def mark_live(values: Sequence[int]) -> None:
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if value not in live:
                live.add(value)
                waiting += free_operands.get(value, ())

    mark_live(results)
    count_before = -1
    while count_before != len(live):
        count_before = len(live)
        for number in range(len(operations) - 1, -1, -1):
            operation = operations[number]
            outs = operation.outs
            if operation.name == "return":
                # The next iteration of a loop reads this iteration's results instead of
                # the initial values.
                outs = (*outs, operation.ins[1])
            if not are_used[number] and not live.isdisjoint(outs):
                are_used[number] = True
                mark_live(operation.ins)
    used: list[Operation] = []
    for operation, is_used in zip(operations, are_used, strict=True):
        live_ins = tuple(filter(live.__contains__, operation.ins))
        if is_used or (operation.name == "use" and live_ins):
            used.append(dataclasses.replace(operation, ins=live_ins))
    return used
