"""The output of many ranks on one terminal: whole lines, never mixed, and a progress line that works.

Lines of a rank appear when they are complete. Rank 0 may also show a line that is not (a prompt, or a
progress line that goes back with a carriage return): when another rank has something to say meanwhile,
that line is closed first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO

LINE_LIMIT = 1 << 16
"""A line that grows longer than this is shown in parts."""


class Sink:
    """Where output goes; several ranks share it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._open_by: object = None

    def write(self, writer: object, data: bytes) -> None:
        """Shows data of a writer; another writer's unfinished line is closed before."""
        if self._open_by is not None and self._open_by is not writer:
            self._stream.write(b"\n")
        self._stream.write(data)
        self._stream.flush()
        self._open_by = None if data.endswith(b"\n") else writer

    def identity(self) -> tuple[int, int] | None:
        """The file or terminal behind it: two sinks of the same one must be one."""
        try:
            found = os.fstat(self._stream.fileno())
        except (OSError, ValueError):
            return None
        return found.st_dev, found.st_ino


class Lines:
    """Turns the bytes of one rank into lines of a sink.

    Args:
        emit: Takes what is ready to be shown.
        prefix: Stands before each line.
        live: Show unfinished lines too, and pass carriage returns on.
    """

    def __init__(self, emit: Callable[[bytes], None], prefix: bytes = b"", live: bool = False) -> None:
        self._emit = emit
        self._prefix = prefix
        self._live = live
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Takes bytes as they come, in any portions."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._show(line + b"\n")
        if self._live and b"\r" in self._rest:
            self.flush()
        elif len(self._rest) > LINE_LIMIT:
            self._show(self._rest + b"\n")
            self._rest = b""

    def flush(self) -> None:
        """Shows an unfinished line, if this rank may."""
        if self._live and self._rest:
            self._emit(self._rest)
            self._rest = b""

    def close(self) -> None:
        """Shows what is left."""
        if self._rest:
            self._show(self._rest if self._live else self._rest + b"\n")
            self._rest = b""

    def _show(self, line: bytes) -> None:
        if not self._live:
            shown = line.rstrip(b"\r\n").rpartition(b"\r")[2]
            line = self._prefix + shown + b"\n"
        self._emit(line)
