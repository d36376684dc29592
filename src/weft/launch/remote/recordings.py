"""Recordings of ranks on a host whose folder is not the launcher's: brought over the connection when the job has ended.

    launcher   fetch
    agent      file (name, size), piece, piece, ...   file, ...   brought

The launcher trusts nothing of that: a name is that of a recording of one of the host's ranks, bytes are as many as were
announced, and no more than there is room for. A file appears when it is whole.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.errors import LaunchError
from weft.launch.remote.wire import Message
from weft.units import format_bytes
from weft.untrusted import shown

PIECE = 1 << 18
MOST_FILES = 1000
LEFT_FREE = 1 << 30
"""So much of the disk is not filled up."""
_NAME = re.compile(r"rank(\d{1,7})([.\-_][A-Za-z0-9.\-_]{0,100})")


def rank_of(name: str) -> int | None:
    """Whose recording a file of that name is, or None if it is no name of a recording.

    >>> rank_of("rank12.steps.jsonl"), rank_of("rank1/../../x"), rank_of("report.html")
    (12, None, None)
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def files_of(folder: Path, ranks: range) -> dict[str, int]:
    """The recordings of ranks that lie in a folder, with when each was written last."""
    found: dict[str, int] = {}
    try:
        entries = [*os.scandir(folder)]
    except OSError:
        return found
    for entry in entries:
        if rank_of(entry.name) in ranks and entry.is_file(follow_symlinks=False):
            found[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
    return found


def lacking(folder: Path, ranks: range, before: Mapping[str, int]) -> bool:
    """True if one of the ranks has left nothing new in a folder; ``before``: what lay there."""
    new = {name for name, time in files_of(folder, ranks).items() if before.get(name) != time}
    return {rank_of(name) for name in new} != {*ranks}


def messages(folder: Path, ranks: range, before: Mapping[str, int]) -> Iterator[Message]:
    """An agent's messages with the new recordings of its ranks."""
    for name, time in sorted(files_of(folder, ranks).items()):
        if before.get(name) == time:
            continue
        try:
            with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                yield {"kind": "file", "name": name, "size": size}, b""
                while size and (piece := file.read(min(size, PIECE))):
                    size -= len(piece)
                    yield {"kind": "piece"}, piece
        except OSError as error:
            yield {"kind": "unread", "text": f"{name}: {error.strerror}"}, b""
    yield {"kind": "brought"}, b""


class Arriving:
    """The recordings of one host, on their way into a folder of the launcher.

    Attributes:
        over: Nothing more is to come.
        files: How many have arrived.
        size: How many bytes they have.
    """

    def __init__(self, folder: Path, ranks: range) -> None:
        self.over, self.files, self.size = False, 0, 0
        self._folder, self._ranks = folder, ranks
        self._file: Any = None
        self._name, self._left = "", 0

    def take(self, values: Mapping[str, Any], data: bytes) -> None:
        """Takes one message of the agent.

        Raises:
            LaunchError: That is no recording of its ranks, or it cannot be written here.
        """
        kind = values.get("kind")
        try:
            if kind == "file":
                self._begin(values.get("name"), values.get("size"))
            elif kind == "piece":
                self._add(data)
            elif kind == "unread":
                raise LaunchError(f"it cannot read {shown(values.get('text'))}")
            elif self._file is not None:
                raise LaunchError(f"{self._name} ended too early")
            else:
                self.over = True
        except OSError as error:
            raise LaunchError(f"{self._folder}: {error.strerror}") from error

    def _begin(self, name: Any, size: Any) -> None:
        if self._file is not None:
            raise LaunchError(f"{self._name} ended too early")
        if type(name) is not str or rank_of(name) not in self._ranks:
            raise LaunchError(f"{shown(name)} is no recording of its ranks")
        if type(size) is not int or size < 0 or self.files >= MOST_FILES:
            raise LaunchError(f"{name} cannot have {shown(size)} bytes, or it has too many files")
        self._folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder).free - LEFT_FREE
        if size > free:
            raise LaunchError(
                f"{name} has {format_bytes(size)}, for which there is no room in {self._folder}: copy it yourself"
            )
        self._name, self._left = name, size
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = open(os.open(self._arriving, flags, 0o644), "wb")  # noqa: SIM115
        self._add(b"")

    @property
    def _arriving(self) -> Path:
        return self._folder / f".{self._name}.{os.getpid()}.arriving"

    def _add(self, data: bytes) -> None:
        if self._file is None or len(data) > self._left:
            raise LaunchError("it sends more than it has announced")
        self._file.write(data)
        self._left -= len(data)
        self.size += len(data)
        if not self._left:
            self._file.close()
            os.replace(self._arriving, self._folder / self._name)
            self._file = None
            self.files += 1

    def close(self) -> None:
        """Remove what has arrived in part."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._arriving.unlink(missing_ok=True)
