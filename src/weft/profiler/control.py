"""A file in the folder of a recording that changes what is recorded while the job runs.

{"record_steps": "1000-1010"}    in control.json: from the next step on, on every rank that sees the folder
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from weft.document import Document
from weft.errors import ConfigError, FormatError
from weft.profiler.detail import Detail, parse_detail
from weft.untrusted import parse_json, read_text

NAME = "control.json"
EVERY_S = 1.0
LIMIT_BYTES = 1 << 16
_LOG = logging.getLogger("weft")


class Control:
    """Looks at the file, at most once in `EVERY_S`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._looked_s = float("-inf")
        self._seen = self._stamp()

    def look(self, now_s: float) -> Detail | None:
        """The file's request, if it has changed; a file that means nothing is told and left alone."""
        if now_s - self._looked_s < EVERY_S:
            return None
        self._looked_s = now_s
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp
        if stamp is None:
            return None
        try:
            document = Document(parse_json(read_text(self._path, LIMIT_BYTES), "it is not JSON"))
            document.only("record_steps")
            detail = parse_detail(document["record_steps"].text())
        except (ConfigError, FormatError) as error:
            _LOG.warning('%s is left alone: %s. Write {"record_steps": "100-200"}, say', self._path, error)
            return None
        _LOG.info("the recording goes on with the steps: %s", document["record_steps"].text())
        return detail

    def _stamp(self) -> tuple[int, int] | None:
        """A value that changes when somebody writes the file; None without one."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size
