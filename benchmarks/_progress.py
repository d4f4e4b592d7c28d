"""A progress bar on a terminal, one line per case elsewhere."""

import sys
import time


class Progress:
    """Says which case runs and what each took; on standard error, so that tables can be
    piped.
    """

    def __init__(self, suite: str, total: int):
        self._suite = suite
        self._total = total
        self._done = 0
        self._name = ""
        self._began = time.perf_counter()

    def begin(self, name: str) -> None:
        self._name = name
        self._began = time.perf_counter()
        if sys.stderr.isatty():
            filled = 24 * self._done // max(self._total, 1)
            bar = "#" * filled + "-" * (24 - filled)
            print(
                f"\r\033[K[{bar}] {self._done}/{self._total} {self._suite}: {name}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def end(self, trouble: str) -> None:
        self._done += 1
        seconds = time.perf_counter() - self._began
        if sys.stderr.isatty():
            clear = "\r\033[K"
        else:
            clear = ""
        note = f": {trouble}" if trouble else ""
        counted = f"[{self._done}/{self._total}]"
        print(
            f"{clear}{counted} {self._suite}: {self._name} ({seconds:.1f} s){note}",
            file=sys.stderr,
            flush=True,
        )
