"""Real text without a download: the source files of the Python standard library, as bytes."""

import pathlib
import sysconfig

import numpy as np
from jaxtyping import Int, UInt8


def stdlib_text(max_bytes: int = 8 << 20) -> UInt8[np.ndarray, " bytes"]:
    """The standard library's own source files in order of their paths, as one array of bytes.

    **Arguments:**

    - `max_bytes`: where to stop.

    **Returns:**

    The bytes; the same on every run of one Python installation.

    **Raises:**

    `FileNotFoundError` if this Python was installed without its source files.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    pieces, total = [], 0
    for path in [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))]:
        if path.parent.name in ("test", "tests", "site-packages", "dist-packages"):
            continue
        pieces.append(np.frombuffer(path.read_bytes(), np.uint8))
        total += pieces[-1].size
        if total >= max_bytes:
            break
    if not pieces:
        raise FileNotFoundError(
            f"no `*.py` files in {root}: this Python was installed without the sources of its standard library; "
            "install them (on Debian and Ubuntu: the package `libpython3-stdlib`)."
        )
    return np.concatenate(pieces)[:max_bytes]


def batch(
    text: UInt8[np.ndarray, " bytes"], step: int, *, size: int, length: int, seed: int
) -> Int[np.ndarray, "size length"]:
    """`size` windows of `length` bytes of `text`, at random places that depend on `seed` and `step` alone."""
    starts = np.random.default_rng((seed, step)).integers(0, text.size - length, size=size)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)
