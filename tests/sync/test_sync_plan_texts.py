"""Texts of transfer plans that somebody else wrote: what no plan says is an error when
the text is read, and a short text takes a short time and little memory.
"""

import json
import time
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sync_jobs import mesh, planned, sha256

from shardfx import From, TreeMap
from shardfx.errors import PlanFormatError, SyncError
from shardfx.sync import Channel, TransferPlan, plan_transfer, send


def with_body(plan, change):
    """The text of a plan that `change` changed, with a checksum that is right."""
    text = json.loads(plan.to_json())
    body = json.loads(text["plan"])
    change(body)
    again = json.dumps(body, separators=(",", ":"))
    return json.dumps({**text, "plan": again, "checksum": sha256(again)})


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


def in_tiny_ranges(body):
    """An array of 32 MiB whose halves of columns are sent in ranges of 64 bytes."""
    (kind,) = body["kinds"]
    rows = 1 << 20
    half = rows // 2
    for leaf in (*body["sources"], *body["leaves"]):
        leaf[1] = [rows, 8]
    for buffer, low in zip(kind["buffers"], (0, half), strict=True):
        buffer[2] = [[low, low + half], [0, 8]]
    for form in kind["forms"]:
        form[1][0][0] = half
    kind["columns"][4] = [half * (low > 0) for low in kind["columns"][4]]
    kind["pieces"][0][3][0][0] = rows
    body["memory_limit_bytes"] = 64


def test_a_short_text_of_a_plan_makes_no_long_schedule():
    """It took 26 s and 1 GB."""
    tree = {"w": np.zeros((8, 8), np.float32)}
    specs = {"w": P(None, "a")}
    plan = plan_transfer(planned(tree, specs), planned(tree, {"w": P("a")}))
    hostile = TransferPlan.from_json(with_body(plan, in_tiny_ranges))
    assert hostile.leaves[0].shape == (1 << 20, 8)
    whole = {"w": np.zeros((1 << 20, 8), np.float32)}
    arrays = jax.device_put(whole, planned(whole, specs, mesh(0)).shardings)
    channel = mock.create_autospec(Channel)
    begin = time.process_time()
    with pytest.raises(SyncError, match="in more than 262,144 parts of ranges of byt"):
        send(hostile, arrays, channel, 7, sender=0, receiver=0)
    assert time.process_time() - begin < 1


def scaled_plan():
    """A plan whose receiver multiplies elements by scales."""
    values = np.arange(32).reshape(4, 8).astype(np.int8)
    scales = np.ones((2, 2), np.float32)
    tree = {"q": values, "s": scales, "t": scales}
    rules = {
        "v": From("t"),
        "w": From("q").scale("s", block=(2, 4)).cast("float32"),
    }
    tree_map = TreeMap(rules)
    src = planned(tree, {"q": P("a"), "s": P(), "t": P()})
    dst = planned(tree_map.apply(tree), {"v": P(), "w": P("b")})
    return plan_transfer(src, dst, tree_map)


def with_leaf_digest(body):
    body["leaves"][0][3] = "not hexadecimal"


def with_number_beside_a_path(body):
    body["kinds"][1]["forms"][0][0][1] = {}


def with_scales_of_fewer_dimensions(body):
    body["kinds"][1]["pieces"][0][0][2] = ["s", [2]]


def with_source_of_another_leaf(body):
    body["kinds"][0]["forms"][0][0][0] = "s"


@pytest.mark.parametrize(
    "change, text",
    [
        (with_leaf_digest, "the digest 'not hexadecimal'"),
        (with_number_beside_a_path, r"the value \['q', {}"),
        (with_scales_of_fewer_dimensions, "`w` has a piece that does not fit its sh"),
        (with_source_of_another_leaf, "`v` has a piece of no source"),
    ],
)
def test_a_text_that_no_plan_writes_is_refused_when_it_is_read(change, text):
    """Each was a raw error of the sender or the receiver."""
    plan = scaled_plan()
    body = json.loads(json.loads(plan.to_json())["plan"])
    change(body)
    leaf_digests = [leaf[3] for leaf in body["leaves"]]
    digest = sha256("\0".join([body["settings"], *leaf_digests]))
    encoded = json.loads(with_body(plan, change))
    TransferPlan.from_json(plan.to_json())
    with pytest.raises(PlanFormatError, match=text):
        TransferPlan.from_json(json.dumps({**encoded, "digest": digest}))
