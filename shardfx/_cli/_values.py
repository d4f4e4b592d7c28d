"""Values as a command line writes them: whole numbers, and keyword arguments."""

import ast
from typing import Any

from ._usage import UsageError


def literals(text: str, flag: str) -> dict[str, Any]:
    """Reads `depth=4, name="x"`: keyword arguments whose values are Python literals.

    **Arguments:**

    - `text`: as between the brackets of a call.
    - `flag`: where it was given, for messages.

    **Returns:**

    The values by name.

    **Raises:**

    `UsageError` that says which part is none.
    """
    form = f"--{flag} {text!r:.200} is not of the form NAME=VALUE, ..., as in --{flag} 'depth=4, name=\"small\"'"
    try:
        call = ast.parse(f"call({text}\n)", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(form) from error
    # Text with a bracket of its own could close the call: then this is another expression than the one written.
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise UsageError(form)
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in found:
            raise UsageError(form)
        try:
            found[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError) as error:
            name, value = keyword.arg, keyword.value
            what = "no literal (a number, a string in quotes, a bool, None, or a tuple of them)"
            hint = f"; write a string as {name}={value.id!r}" if isinstance(value, ast.Name) else ""
            raise UsageError(f"--{flag}: {name}={ast.unparse(value):.60} is {what}{hint}") from error
    return found


def whole_number(text: str) -> int | None:
    """The number that `text` writes in at most 18 digits, or `None`: Python converts no text of thousands."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None
