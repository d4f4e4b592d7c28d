"""The table of what `verify` judges, by families of models."""

from benchmarks.faults._coverage import Row, judged_step, rows, table
from benchmarks.faults._families import subjects


FAMILIES = (
    *("decoder", "MoE", "ViT", "ResNet", "U-Net", "DiT", "SSM", "GNN", "LoRA"),
    "KV cache",
)


def line(outcome, judged, **others):
    sizes = {"operations": 100, "bytes": 1000, "judged_bytes": 10 * judged}
    return {
        "family": "ViT",
        "outcome": outcome,
        "judged": judged,
        **sizes,
        **others,
    }


def test_each_family_has_steps():
    assert tuple(dict.fromkeys(subject.family for subject in subjects())) == FAMILIES


def test_a_refuted_step_is_accused_where_its_numbers_are_right():
    lines = [
        line("proved", 100),
        line("refuted", 90, numbers_right=False),
        line("refuted", 80, numbers_right=True),
        line("not judged", 10),
    ]
    row = Row(
        family="ViT",
        programs=4,
        proved=1,
        refuted=1,
        accused=1,
        operations=400,
        judged_operations=280,
        bytes=4000,
        judged_bytes=2800,
    )
    assert rows(lines) == [row, row._replace(family="all")]
    assert table(lines)[2] == "| ViT | 4 | 1 | 1 | 1 | 70.0% of 400 | 70.0% |"


def test_a_step_of_the_bank_is_judged_with_its_gradients():
    steps = {(subject.name, subject.layout): subject for subject in subjects()}
    judged_line = judged_step(steps["cache_window", "length"])
    assert judged_line["outcome"] == "proved"
    assert judged_line["operations"] == judged_line["judged"] > 50
