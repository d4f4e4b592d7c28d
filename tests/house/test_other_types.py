"""Values of other types than functions take: errors of the package, which name them."""

import collections.abc
from typing import Any

import jax
import numpy as np
import pytest

from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    auto,
    checkpoint,
    correct,
    cost,
    fsdp,
    match,
    plan,
    sync,
)
from shardfx.errors import LeafTypeError, MeshError, RuleError, SpecError


MESH = MeshSpec({"data": 4, "tensor": 2})
SHAPES = {"w": jax.ShapeDtypeStruct((8,), "float32")}
# Type checkers would refuse these.
NUMBER: Any = 3
NOTHING: Any = None
TEXT: Any = "ab"
NO_DEVICES: Any = MESH


def test_a_mesh_without_devices_is_no_list_of_devices():
    assert not isinstance(MESH, collections.abc.Iterable)
    with pytest.raises(MeshError, match=r"a sequence of devices, not MeshSpec; write"):
        MESH.build(NO_DEVICES)
    with pytest.raises(TypeError, match="`spec.axis_names` for the names"):
        list(NO_DEVICES)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: fsdp(NUMBER), RuleError, r"`fsdp\(\(3,\)\)` needs the name"),
        (lambda: match({}, NOTHING), RuleError, "`rules` must be of type PathRules"),
        (lambda: PathRules(NUMBER), RuleError, "`rules` must be of type Iterable"),
        (lambda: AxisRules(NUMBER), RuleError, "`rules` must be of type Iterable"),
        (
            lambda: AxisRules([], units=NUMBER),
            RuleError,
            "`units` must be of type Iterable",
        ),
        (
            lambda: PathRules([], mesh_axes=NUMBER),
            RuleError,
            "`mesh_axes` must be of type Iterable",
        ),
        (lambda: correct(jax.P(), TEXT, MESH), SpecError, "a size for each dimension"),
        (lambda: auto.plan(SHAPES, [1]), MeshError, r"`devices=\[1\]` is neither"),
        (
            lambda: auto.plan(SHAPES, 8, batch_dim=NOTHING),
            RuleError,
            "`batch_dim=None` is no number",
        ),
        (lambda: cost.seconds(NUMBER, "v5e"), LeafTypeError, "must be of type Traffic"),
    ],
)
def test_a_value_of_another_type_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("processes", [2.0, "2", True, np.float32(2), [2]])
def test_processes_of_a_load_are_a_whole_number(processes, tmp_path):
    weights = {"w": np.ones((8,), np.float32)}
    checkpoint.save(tmp_path / "c", weights)
    index = checkpoint.read_index(tmp_path / "c")
    planned = plan(weights, MESH, paths=PathRules.parse("w->data"))
    message = r"`processes` must be a whole number, not .*; give 1 or more, such as `pr"
    with pytest.raises(LeafTypeError, match=message):
        checkpoint.plan_reads(index, planned, processes=processes)


@pytest.mark.parametrize("number", [1.0, True, "1", np.bool_(True), [1]])
def test_numbers_of_a_transfer_are_whole_numbers(number):
    planned = plan(SHAPES, MESH, paths=PathRules.parse("w->data"))
    with pytest.raises(
        MeshError, match=r"`receiver` is .* of `dst` are \{0..1\}; give"
    ):
        sync.plan_transfer(planned, planned, processes=(2, 2), receiver=number)
    for processes in (number, [*[0] * 7, number], np.array(1.0)):
        with pytest.raises(MeshError, match="`processes` is .* for 8 devices; give a"):
            sync.plan_transfer(planned, planned, processes=(1, processes))
    with pytest.raises(MeshError, match="`memory_limit_bytes` is .*; give a number of"):
        sync.plan_transfer(planned, planned, memory_limit_bytes=number)


def test_the_form_is_that_of_the_function_that_was_called():
    for function, form in (
        (checkpoint.structs, r"structs\(path\)"),
        (checkpoint.read_index, r"read_index\(path\)"),
    ):
        with pytest.raises(LeafTypeError, match=f"Write `{form}`"):
            function(NUMBER)
