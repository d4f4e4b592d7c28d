"""Every fault that was reported is right now, or a clear error.

`python -m tests.house.test_reported` prints the table.
"""

import pathlib
import sys
import tempfile

import jax
import pytest


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    jax.config.update("jax_num_cpu_devices", 8)

from tests.house import reported, reported_files, reported_steps


REPORTS = [*reported_files.REPORTS, *reported_steps.REPORTS]
TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name)
def test_a_reported_fault_is_gone(report, tmp_path):
    # The libraries of the reports promote dtypes as JAX does by default.
    with jax.numpy_dtype_promotion("standard"):
        report.tries(tmp_path)


def test_each_report_has_its_test():
    rows = [(report.source, report.test) for report in REPORTS]
    for source, test in [*rows, *reported_steps.ELSEWHERE.items()]:
        if test.startswith("docs/"):
            continue
        file, _, name = test.partition("::")
        text = (TESTS / file).read_text()
        assert f"def {name}" in text, (source, test)


def main() -> None:
    """Tries each report, and prints its answer and the test that holds it."""
    for report in REPORTS:
        reported.errors_seen.clear()
        with tempfile.TemporaryDirectory() as folder:
            try:
                report.tries(pathlib.Path(folder))
                answer = "clear error" if reported.errors_seen else "right"
            except Exception as error:
                answer = f"NOT: {type(error).__name__}: {error}"[:300]
        print(f"| {report.source} | {report.name} | {answer} | {report.test} |")
    for source, test in reported_steps.ELSEWHERE.items():
        print(f"| {source} | by its test | | {test} |")


if __name__ == "__main__":
    main()
