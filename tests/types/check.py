"""Runs basedpyright over the whole tree and mypy over the type tests, and both over a
copy of the tests in which every asserted type is wrong.

`python tests/types/check.py` fails unless both find an error at every `assert_type` of
the copy, at exactly the lines of `mistakes.py` that say "refused", and nowhere else.
`python tests/types/check.py mypy` runs one of them. A checker reads the package and JAX
once for all files, which takes longer than the files themselves.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path


HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SIGNATURES = HERE / "signatures.py"
USES = HERE / "uses.py"
MISTAKES = HERE / "mistakes.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The folders that basedpyright looks at, as a plain `basedpyright` does.
FOLDERS: list[str] = PROJECT["tool"]["basedpyright"]["include"]
CHECKERS = {
    "basedpyright": ["--pythonpath", sys.executable, *FOLDERS],
    "mypy": [
        "--python-executable",
        sys.executable,
        "--follow-imports=silent",
        "--strict",
        # What it keeps has the paths of copies that are gone.
        f"--cache-dir={os.devnull}",
        str(SIGNATURES),
        str(USES),
    ],
}
# A line such as `tests/types/uses.py:12: error: ...`; basedpyright adds the column.
ERROR = re.compile(r"^ *(?P<file>\S+?):(?P<line>\d+):.*?\berror:", re.M)


def errors_of(checker: str, copies: list[Path]) -> tuple[dict[Path, set[int]], str]:
    """The lines of each file on which one run of the checker finds an error, and what
    it printed. `copies` are files beside those of the tree.
    """
    program = Path(sys.executable).parent / checker
    command = [str(program), *CHECKERS[checker], *map(str, copies)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = done.stdout
    # Other codes are those of a checker that could not run.
    assert done.returncode in (0, 1), (said, done.stderr)
    errors: dict[Path, set[int]] = {}
    for match in ERROR.finditer(said):
        file = (ROOT / match["file"]).resolve()
        errors.setdefault(file, set()).add(int(match["line"]))
    return errors, said


def with_wrong_types(source: str) -> tuple[str, set[int]]:
    """The source with another type in each `assert_type`, and the lines of these."""
    lines = source.splitlines(keepends=True)
    asserted = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "assert_type"
        ):
            kind = node.args[1]
            assert (
                kind.end_col_offset is not None
                and kind.lineno == kind.end_lineno == node.lineno
            )
            line = lines[kind.lineno - 1]
            lines[kind.lineno - 1] = (
                line[: kind.col_offset] + "memoryview" + line[kind.end_col_offset :]
            )
            asserted.add(kind.lineno)
    return "".join(lines), asserted


def lines_refused(source: str) -> set[int]:
    """The lines of a source that say "refused"."""
    refused = set()
    for number, line in enumerate(source.splitlines(), 1):
        if "# refused" in line:
            refused.add(number)
    return refused


def is_as_expected(checker: str, expected: Mapping[Path, set[int]]) -> bool:
    """Whether the checker finds errors on the lines of each file in `expected`, and on
    no others. Prints where it does not.
    """
    errors, said = errors_of(checker, list(expected))
    all_are_expected = True
    for file in sorted({*errors, *expected}):
        found = errors.get(file, set())
        wanted = expected.get(file, set())
        if found != wanted:
            all_are_expected = False
            print(
                f"{checker}, {file}: missing {sorted(wanted - found)}, too many"
                f" {sorted(found - wanted)}"
            )
    count = sum(map(len, errors.values()))
    verdict = "as expected" if all_are_expected else f"NOT as expected:\n{said}"
    print(f"{checker}: errors on {count} lines, {verdict}")
    return all_are_expected


def main(checkers: list[str]) -> int:
    wrong, asserted = with_wrong_types(SIGNATURES.read_text())
    mistakes = MISTAKES.read_text()
    # Outside of the tree, since lint reads that meanwhile.
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory).resolve()
        copy = folder / "wrong.py"
        copy_of_mistakes = folder / MISTAKES.name
        copy.write_text(wrong)
        # The file itself is left out of what basedpyright looks at.
        copy_of_mistakes.write_text(mistakes)
        expected = {copy: asserted, copy_of_mistakes: lines_refused(mistakes)}
        results = [is_as_expected(checker, expected) for checker in checkers]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(CHECKERS)))
