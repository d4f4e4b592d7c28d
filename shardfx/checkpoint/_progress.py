"""One line on a terminal that says how far a load or save is."""

import sys
import time


class Progress:
    """One line on a terminal that says how much has been done."""

    def __init__(self, verb: str, total_bytes: int, show: bool | None):
        self._verb, self._total_bytes, self._done_bytes = verb, total_bytes, 0
        self._show = sys.stderr.isatty() if show is None else show
        self._begin = self._shown = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Counts `nbytes` more, and rewrites the line ten times a second."""
        self._done_bytes += nbytes
        now = time.monotonic()
        if self._show and now - self._shown > 0.1:
            self._shown = now
            self._write(now)

    def end(self) -> None:
        """Leaves the finished line standing."""
        if self._show:
            self._write(time.monotonic())
            sys.stderr.write("\n")

    def _write(self, now: float) -> None:
        rate = self._done_bytes / max(now - self._begin, 1e-9) / 1e9
        filled = 24 * self._done_bytes // max(self._total_bytes, 1)
        sys.stderr.write(
            f"\r{self._verb} [{'#' * filled:<24}] {self._done_bytes / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB, "
            f"{rate:.2f} GB/s"
        )
        sys.stderr.flush()
