"""Texts of transfer plans that somebody else wrote: what no plan says is an error when
the text is read, and a short text takes a short time and little memory.
"""

import json
import time

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sync_jobs import planned

from shardfx._reshard.sync import codec
from shardfx.errors import PlanFormatError
from shardfx.sync import TransferPlan, plan_transfer


def with_body(plan, change):
    """The text of a plan that `change` changed, with a checksum that is right."""
    text = json.loads(plan.to_json())
    body = json.loads(text["plan"])
    change(body)
    again = json.dumps(body, separators=(",", ":"))
    return json.dumps({**text, "plan": again, "checksum": codec._checksum(again)})


def spread(body, count):
    """Each part writes every second element."""
    (kind,) = body["kinds"]
    rows = 2 * count
    for leaf in (*body["sources"], *body["leaves"]):
        leaf[1] = [rows, 8]
    for buffer, low in zip(kind["buffers"], (0, count), strict=True):
        buffer[2] = [[low, low + count], [0, 8]]
    kind["forms"][0][1][0] = [count // 2, 0, 2, 0, 2]


def of_rank(body, rank):
    """Arrays of many dimensions of size 2."""
    (kind,) = body["kinds"]
    for leaf in (*body["sources"], *body["leaves"]):
        leaf[1] = [2] * rank
    body["sources"][0][3] = [[]] * rank
    for buffer in kind["buffers"]:
        buffer[2] = [[0, 2]] * rank
    factors = [[2, dim, 1, dim, 1] for dim in range(rank)]
    kind["rank"] = rank
    kind["forms"][0][1:3] = [factors, rank]
    kind["pieces"][0][1:] = [[0] * rank, [0] * rank, factors]
    rows = len(kind["columns"][0])
    kind["columns"][4:] = [[0] * rows for _ in range(2 * rank)]


def in_tiny_rows(body):
    """A large array that is sent byte by byte."""
    spread(body, 1 << 40)
    body["memory_limit_bytes"] = 1


@pytest.mark.parametrize(
    "change, text",
    [
        (in_tiny_rows, "rows of bytes for a process, since `memory_limit_bytes` is 1"),
        (lambda body: spread(body, 1 << 18), "are not each written once"),
        (lambda body: spread(body, 1 << 36), "whose boxes have 274,877,906,944 more"),
        (lambda body: of_rank(body, 18), None),
        (lambda body: of_rank(body, 40), "more corners"),
        (lambda body: of_rank(body, 200), "rows of bytes for a process"),
        (lambda body: body.update(memory_limit_bytes=-1), "a number that no plan has"),
        (lambda body: body.update(mesh=[["a", 1 << 60]]), "a mesh of another number"),
    ],
)
def test_a_short_text_of_a_plan_takes_a_short_time(change, text):
    """It took 5 s, hours, 15 s and for ever."""
    array = np.zeros((8, 8), np.float32)
    tree = {"w": array}
    plan = plan_transfer(planned(tree, {"w": P("a")}), planned(tree, {"w": P("b")}))
    hostile = with_body(plan, change)
    begin = time.process_time()
    if text is None:
        TransferPlan.from_json(hostile)
    else:
        with pytest.raises(PlanFormatError, match=text):
            TransferPlan.from_json(hostile)
    assert time.process_time() - begin < 3
