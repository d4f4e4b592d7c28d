"""The known faults in other forms, and their counts."""

import jax
import pytest

from benchmarks.faults import _forms, _report
from benchmarks.faults._forms import Program


def program(fault: str, form: str) -> Program:
    return Program(fault=fault, kind="wrong", title="forward", form=form)


def test_every_fault_is_asked_in_every_form():
    programs = _forms.programs()
    faults = {program.fault for program in programs}
    forms = {program.form for program in programs}
    assert len(faults) == 12 and len(forms) == 5
    for fault in faults:
        of_fault = [program for program in programs if program.fault == fault]
        assert {program.form for program in of_fault} == forms
        assert {program.kind for program in of_fault} == {"wrong", "mended"}
    assert len(set(programs)) == len(programs)


def test_a_larger_residual_stack_is_refuted_at_its_block():
    line = _forms.outcome(program("residual_order", "larger"))
    assert line["numbers"] == "wrong" and line["verdict"] == "refuted", line
    assert line["functions"] == ["block"] and line["is_right_line"], line


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="XLA of JAX 0.9 computes this program rightly",
)
def test_shards_of_another_size_are_wrong_numbers():
    line = _forms.outcome(Program("strided_slices", "wrong", "gradient", form="larger"))
    assert line["numbers"] == "wrong" and line["verdict"] == "refuted", line
    assert "broadcast input array" in line["message"], line


def test_a_wrong_result_is_refuted_at_the_line_that_makes_it():
    # The partitioner's own exchange returns the result, and comes from no line.
    line = _forms.outcome(Program("pool_gradient", "wrong", "gradient", form="larger"))
    assert line["numbers"] == "wrong" and line["verdict"] == "refuted", line
    assert line["is_right_line"] and line["functions"] != [""], line


def test_the_counts_of_forms_say_numbers_and_verdict():
    refuted = {"numbers": "wrong", "verdict": "refuted", "is_right_line": True}
    lines = {
        program("residual_order", "mapped"): refuted,
        program("residual_order", "scanned"): refuted | {"is_right_line": False},
        program("conv_groups", "mapped"): {"numbers": "right", "verdict": "proved"},
        program("shift_set", "mapped"): {
            "numbers": "wrong",
            "verdict": "not judged",
            "checked": "wrong",
        },
        program("shift_set", "scanned"): {"outcome": "timeout"},
    }
    document = _forms.document(lines, {"jax": "0.0"})
    assert document["forms"] == {
        "residual stacks": {"wrong, refuted": 1, "wrong, refuted elsewhere": 1},
        "convolutions": {"right, proved": 1},
        "other faults": {"timeout": 1, "wrong, found by check_step": 1},
    }
    assert _forms.mistakes(document) == []
    assert len(document["lines"]) == len(lines)
    section = _report.section({"faults-forms": document})
    assert "- Residual stacks in other forms: wrong, refuted: 1;" in section


def test_a_proved_fault_and_an_accused_program_are_mistakes():
    lines = {
        program("shift_set", "mapped"): {"numbers": "wrong", "verdict": "proved"},
        program("conv_groups", "mapped"): {
            "numbers": "right",
            "verdict": "refuted",
            "is_right_line": True,
        },
    }
    mistakes = _forms.mistakes(_forms.document(lines, {}))
    assert mistakes == ["other faults: wrong, proved", "convolutions: right, refuted"]
