"""Files of JSON lines, beside the spans: a header that says whose they are, then a line for each thing.

A line is handed to the system as a whole, so a process that dies leaves at most a part of its last line, which a
reader leaves out. An error of the file (a full disk) ends the file, never the training.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import FormatError, UsageError
from weft.untrusted import parse_json, read_text, shown_path

VERSION = 1
_LOG = logging.getLogger("weft")


class Lines(NamedTuple):
    """A file that was read: its header, its lines in order, and what was wrong with it."""

    header: dict[str, Any]
    lines: list[Any]
    warnings: list[str]


class LineFile:
    """A file that is written line by line; one that is there is replaced.

    Args:
        path: The file.
        kind: What it holds, for whoever reads it.
        header: What else its first line has.

    Raises:
        UsageError: It cannot be written.
    """

    def __init__(self, path: Path, kind: str, header: dict[str, Any]) -> None:
        self._path = path
        try:
            self._file: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise UsageError(
                f"{shown_path(path)} cannot be written: {error.strerror}; record into another folder"
            ) from error
        self.write(json.dumps({"weft": kind, "version": VERSION, **header}))

    def write(self, line: str) -> None:
        """Hand a line to the system, which keeps it whatever happens to this process."""
        if self._file is None:
            return
        try:
            os.write(self._file, f"{line}\n".encode())
        except OSError as error:
            _LOG.warning("%s ends here, it cannot be written: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """Nothing more comes."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


def read_lines(path: Path, kind: str) -> Lines:
    """The lines of a file; those that are cut or no JSON are left out, with a warning.

    Raises:
        FormatError: The file cannot be read, or is of another kind or version.
    """
    text = read_text(path)
    first, _, rest = text.partition("\n")
    header = parse_json(first, f"{shown_path(path)} has no header")
    if not isinstance(header, dict) or header.get("weft") != kind or header.get("version") != VERSION:
        raise FormatError(f"{shown_path(path)} holds no {kind} of version {VERSION}: record again")
    found: list[Any] = []
    warnings = []
    damaged = 0
    for line, whole in _split(rest):
        try:
            found.append(parse_json(line))
        except FormatError:
            if whole:
                damaged += 1
            else:
                warnings.append(
                    f"{shown_path(path)} ends in the middle of a line: the rank died, or the file was cut"
                )
    if damaged:
        warnings.append(f"{shown_path(path)}: {damaged} lines are damaged and left out")
    return Lines(header, found, warnings)


def _split(text: str) -> Iterator[tuple[str, bool]]:
    """The lines, and whether each has its end."""
    *whole, last = text.split("\n")
    for line in whole:
        yield line, True
    if last:
        yield last, False
