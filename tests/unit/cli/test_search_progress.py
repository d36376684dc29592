"""The line of a long search: on terminals only, after a while, and erased."""

from __future__ import annotations

import io
import sys

from weft.cli.search_progress import SearchProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch, stream: io.StringIO, silent_s: float) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    progress = SearchProgress(silent_s)
    progress(3, 12, 0.5)
    progress.close()
    return stream.getvalue()


def test_a_long_search_is_shown_and_erased(monkeypatch):
    assert (
        shown(monkeypatch, Terminal(), 0.0)
        == "\r\x1b[Ktried 3 of 12, best step so far 500.000 ms; Ctrl-C takes it\r\x1b[K"
    )


def test_short_searches_and_files_see_nothing(monkeypatch):
    assert shown(monkeypatch, Terminal(), 3600.0) == ""
    assert shown(monkeypatch, io.StringIO(), 0.0) == ""
