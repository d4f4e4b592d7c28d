"""Runs basedpyright and mypy over the type tests, and over a copy in which every
asserted type is wrong.

`python tests/types/check.py` fails unless both find nothing in `signatures.py` and
`uses.py`, an error at every `assert_type` of the copy, and an error at exactly the
lines of `mistakes.py` that say "refused".
"""

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path


HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SIGNATURES, USES, MISTAKES = (
    HERE / name for name in ("signatures.py", "uses.py", "mistakes.py")
)
CHECKERS = {
    "basedpyright": ["basedpyright", "--pythonpath", sys.executable],
    "mypy": [
        "mypy",
        "--python-executable",
        sys.executable,
        "--follow-imports=silent",
        "--strict",
    ],
}


def lines_with_errors(checker: str, files: list[Path]) -> list[set[int]]:
    """The lines of each file that one run of the checker finds an error on."""
    name, *options = CHECKERS[checker]
    command = [str(Path(sys.executable).parent / name), *options, *map(str, files)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    line_numbers = [
        re.findall(rf"{re.escape(file.name)}:(\d+):.*error", said) for file in files
    ]
    return [set(map(int, lines)) for lines in line_numbers]


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


def main() -> int:
    wrong, asserted = with_wrong_types(SIGNATURES.read_text())
    refused = {
        number
        for number, line in enumerate(MISTAKES.read_text().splitlines(), 1)
        if "# refused" in line
    }
    failed = False
    with (
        tempfile.TemporaryDirectory() as directory
    ):  # outside, since lint reads the tree meanwhile
        copy = Path(directory) / "wrong.py"
        mistakes = Path(directory) / MISTAKES.name
        copy.write_text(wrong)
        # The file itself is left out of what basedpyright looks at.
        mistakes.write_text(MISTAKES.read_text())
        files = {
            SIGNATURES: set(),
            USES: set(),
            copy: asserted,
            mistakes: refused,
        }
        for checker in CHECKERS:
            for (file, expected), error_lines in zip(
                files.items(), lines_with_errors(checker, [*files]), strict=True
            ):
                as_expected = error_lines == expected
                failed = failed or not as_expected
                verdict = "as expected" if as_expected else "NOT as expected"
                print(
                    f"{checker}, {file.name}: errors on {len(error_lines)} lines, {verdict}"
                )
                if not as_expected:
                    print(
                        f"  missing: {sorted(expected - error_lines)}, too many:"
                        f" {sorted(error_lines - expected)}"
                    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
