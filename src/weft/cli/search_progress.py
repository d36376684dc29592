"""A line on the terminal while a search takes long: how far it is, and the best step so far."""

from __future__ import annotations

import sys
import time

SILENT_S = 2.0
"""A search that is shorter shows nothing."""


class SearchProgress:
    """Shows how far a search is, on a terminal only; `close` erases the line.

    Args:
        silent_s: For how long nothing is shown, in seconds.
    """

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self.begin = time.monotonic()
        self.silent_s = silent_s
        self.shown = False

    def __call__(self, done: int, of: int, best_s: float | None) -> None:
        if time.monotonic() - self.begin < self.silent_s or not sys.stderr.isatty():
            return
        best = "" if best_s is None else f", best step so far {best_s * 1e3:.3f} ms"
        print(f"\r\x1b[Ktried {done} of {of}{best}; Ctrl-C takes it", end="", file=sys.stderr, flush=True)
        self.shown = True

    def close(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
