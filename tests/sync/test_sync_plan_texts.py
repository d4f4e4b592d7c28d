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


# The places of fields in the lists of a plan's JSON: those of sources and leaves, those
# of buffers, those of the forms in which parts are sent, of loops in them, of pieces and
# of values.
LEAF_SHAPE = 1
SOURCE_AXES = 3
LEAF_DIGEST = 3
BUFFER_BOX = 2
FORM_VALUE, FORM_FACTORS, FORM_RANK = range(3)
FACTOR_SIZE = 0
PIECE_VALUE, PIECE_SOURCE, PIECE_TARGET, PIECE_FACTORS = range(4)
VALUE_PATH, VALUE_NUMBER, VALUE_SCALE = range(3)
# The columns of a kind's rows from this one on are positions.
FIRST_POSITION = 4


def body_of(plan):
    """What the checksum of a plan's text is of."""
    text = json.loads(plan.to_json())
    return json.loads(text["plan"])


def with_body(plan, change, **fields):
    """The text of a plan that `change` changed, with a checksum that is right, and with
    other `fields`.
    """
    text = json.loads(plan.to_json())
    body = body_of(plan)
    change(body)
    text["plan"] = json.dumps(body, separators=(",", ":"))
    text["checksum"] = sha256(text["plan"])
    return json.dumps({**text, **fields})


def set_shapes(body, shape):
    for leaf in (*body["sources"], *body["leaves"]):
        leaf[LEAF_SHAPE] = shape


def set_rows(body, rows):
    """Makes the arrays of 8 columns have `rows` rows, half of them in each buffer."""
    set_shapes(body, [rows, 8])
    (kind,) = body["kinds"]
    half = rows // 2
    upper, lower = kind["buffers"]
    upper[BUFFER_BOX] = [[0, half], [0, 8]]
    lower[BUFFER_BOX] = [[half, rows], [0, 8]]


def spread(body, count):
    """Each part writes every second element."""
    set_rows(body, 2 * count)
    (kind,) = body["kinds"]
    first_form = kind["forms"][0]
    # A size, and a dimension and a step in the source and in the target.
    first_form[FORM_FACTORS][0] = [count // 2, 0, 2, 0, 2]


def of_rank(body, rank):
    """Arrays of many dimensions of size 2."""
    set_shapes(body, [2] * rank)
    (source,) = body["sources"]
    source[SOURCE_AXES] = [[]] * rank
    (kind,) = body["kinds"]
    kind["rank"] = rank
    for buffer in kind["buffers"]:
        buffer[BUFFER_BOX] = [[0, 2]] * rank
    factors = [[2, dim, 1, dim, 1] for dim in range(rank)]
    form = kind["forms"][0]
    form[FORM_FACTORS] = factors
    form[FORM_RANK] = rank
    piece = kind["pieces"][0]
    piece[PIECE_SOURCE] = [0] * rank
    piece[PIECE_TARGET] = [0] * rank
    piece[PIECE_FACTORS] = factors
    columns = kind["columns"]
    zeros = [0] * len(columns[0])
    columns[FIRST_POSITION:] = [zeros] * (2 * rank)


def without_memory(body):
    body["memory_limit_bytes"] = -1


def on_a_large_mesh(body):
    body["mesh"] = [["a", 1 << 60]]


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
        (without_memory, "a number that no plan has"),
        (on_a_large_mesh, "a mesh of another number"),
    ],
)
def test_a_short_text_of_a_plan_takes_a_short_time(change, text):
    """It took 5 s, hours, 15 s and for ever."""
    tree = {"w": np.zeros((8, 8), np.float32)}
    src = planned(tree, {"w": P("a")})
    dst = planned(tree, {"w": P("b")})
    plan = plan_transfer(src, dst)
    hostile = with_body(plan, change)
    start_seconds = time.process_time()
    if text is None:
        TransferPlan.from_json(hostile)
    else:
        with pytest.raises(PlanFormatError, match=text):
            TransferPlan.from_json(hostile)
    seconds = time.process_time() - start_seconds
    assert seconds < 3


def in_tiny_ranges(body):
    """An array of 32 MiB whose halves of columns are sent in ranges of 64 bytes."""
    rows = 1 << 20
    half = rows // 2
    set_rows(body, rows)
    (kind,) = body["kinds"]
    for form in kind["forms"]:
        form[FORM_FACTORS][0][FACTOR_SIZE] = half
    first_rows = kind["columns"][FIRST_POSITION]
    kind["columns"][FIRST_POSITION] = [half * (row > 0) for row in first_rows]
    piece = kind["pieces"][0]
    piece[PIECE_FACTORS][0][FACTOR_SIZE] = rows
    body["memory_limit_bytes"] = 64


def test_a_short_text_of_a_plan_makes_no_long_schedule():
    """It took 26 s and 1 GB."""
    tree = {"w": np.zeros((8, 8), np.float32)}
    specs = {"w": P(None, "a")}
    src = planned(tree, specs)
    dst = planned(tree, {"w": P("a")})
    plan = plan_transfer(src, dst)
    hostile = TransferPlan.from_json(with_body(plan, in_tiny_ranges))
    assert hostile.leaves[0].shape == (1 << 20, 8)
    large_tree = {"w": np.zeros((1 << 20, 8), np.float32)}
    large_plan = planned(large_tree, specs, mesh(0))
    arrays = jax.device_put(large_tree, large_plan.shardings)
    channel = mock.create_autospec(Channel)
    start_seconds = time.process_time()
    with pytest.raises(SyncError, match="in more than 262,144 parts of ranges of byt"):
        send(hostile, arrays, channel, 7, sender=0, receiver=0)
    seconds = time.process_time() - start_seconds
    assert seconds < 1


def scaled_plan():
    """A plan whose receiver multiplies elements by scales."""
    values = np.arange(32).reshape(4, 8)
    scales = np.ones((2, 2), np.float32)
    tree = {"q": values.astype(np.int8), "s": scales, "t": scales}
    scaled = From("q").scale("s", block=(2, 4))
    tree_map = TreeMap({"v": From("t"), "w": scaled.cast("float32")})
    mapped_tree = tree_map.apply(tree)
    src = planned(tree, {"q": P("a"), "s": P(), "t": P()})
    dst = planned(mapped_tree, {"v": P(), "w": P("b")})
    return plan_transfer(src, dst, tree_map)


def with_leaf_digest(body):
    leaf = body["leaves"][0]
    leaf[LEAF_DIGEST] = "not hexadecimal"


def with_number_beside_a_path(body):
    _, scaled_kind = body["kinds"]
    form = scaled_kind["forms"][0]
    form[FORM_VALUE][VALUE_NUMBER] = {}


def with_scales_of_fewer_dimensions(body):
    _, scaled_kind = body["kinds"]
    piece = scaled_kind["pieces"][0]
    piece[PIECE_VALUE][VALUE_SCALE] = ["s", [2]]


def with_source_of_another_leaf(body):
    plain_kind, _ = body["kinds"]
    form = plain_kind["forms"][0]
    form[FORM_VALUE][VALUE_PATH] = "s"


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
    TransferPlan.from_json(plan.to_json())
    body = body_of(plan)
    change(body)
    leaf_digests = [leaf[LEAF_DIGEST] for leaf in body["leaves"]]
    digest = sha256("\0".join([body["settings"], *leaf_digests]))
    hostile = with_body(plan, change, digest=digest)
    with pytest.raises(PlanFormatError, match=text):
        TransferPlan.from_json(hostile)
