"""The answers of the process in which a compiler runs."""

import pytest

from shardfx._step.partitioner import partitioned
from shardfx._step.process import Worker
from shardfx.errors import ProgramError


ANSWERS = ["{}", "[]", '{"sizes": 3, "error": ""}', '{"sizes": [9], "error": ""}', ""]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_broken_answer_ends_the_process(answer, tmp_path):
    program = tmp_path / "answers.py"
    program.write_text(f"import sys\nsys.stdin.buffer.readline()\nprint({answer!r})\n")
    worker = Worker([str(program)])
    texts, error = worker.ask(b"", {})
    assert texts == []
    assert error.startswith("the process that asks the compiler ended (")
    assert not worker.is_alive


def test_an_answer_is_texts_and_an_error(tmp_path):
    program = tmp_path / "answers.py"
    answer = '{"sizes": [2, 1], "error": "no"}\nabc'
    program.write_text(
        "import sys\nsys.stdin.buffer.readline()\n"
        f"sys.stdout.write({answer!r})\nsys.stdout.flush()\nsys.stdin.read()\n"
    )
    worker = Worker([str(program)])
    assert worker.ask(b"", {}) == ([b"ab", b"c"], "no")
    assert worker.is_alive
    worker.end()


def test_the_folder_of_a_process_that_is_gone_is_removed(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    program = tmp_path / "ends.py"
    program.write_text("")
    worker = Worker([str(program)], str(folder))
    worker._process.wait()

    # A request of this size waits in the buffer of the pipe.
    texts, error = worker.ask(b"module", {})
    assert texts == []
    assert "BrokenPipeError" in error
    assert not worker.is_alive
    assert not folder.exists()


def test_a_module_that_xla_cannot_read_is_refused():
    with pytest.raises(ProgramError, match="XLA cannot partition this step for 2 dev"):
        partitioned(b"", devices=2)
