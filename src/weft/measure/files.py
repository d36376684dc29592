"""The files of a data set, as a loader finds them, and whether the system has them in memory."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from weft.errors import UsageError
from weft.untrusted import shown_path

MOST_FILES = 100_000
"""So many files are looked at; a larger data set is measured by them."""
PAGE = 4096


class Held(NamedTuple):
    """A file of a data set: its path and how many bytes it has."""

    path: str
    size: int


def files_of(folder: Path, most: int = MOST_FILES) -> list[Held]:
    """The regular files in a folder, below it too, or the one file that is given; empty ones are left out.

    Raises:
        UsageError: Nothing is there, or nothing that has content.
    """
    if folder.is_file():
        found = [held] if (held := _held(str(folder))) else []
    elif folder.is_dir():
        found = []
        for held in _walk(str(folder)):
            found.append(held)
            if len(found) == most:
                break
    else:
        raise UsageError(f"{shown_path(folder)} is no folder and no file: name where the data are")
    if not found:
        raise UsageError(
            f"{shown_path(folder)} has no files that can be read: name where the data are, or let --write 1GB make a "
            "file there for the time of the measurement"
        )
    return found


def _walk(folder: str) -> Iterator[Held]:
    """Links to folders are not followed: they may lead in circles."""
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        elif held := _held(entry.path):
                            yield held
        except OSError:
            continue  # a loader could not read it either


def _held(path: str) -> Held | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or not found.st_size or not os.access(path, os.R_OK):
        return None
    return Held(path, found.st_size)


def open_file(path: str) -> int:
    """A descriptor to read from. What became a pipe meanwhile does not hold the reader up."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))


def forget(files: list[Held]) -> None:
    """Ask the system to drop these files from its memory; others keep theirs. No rights are needed for it."""
    for held in files:
        with suppress(OSError):
            descriptor = open_file(held.path)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def share_in_memory(files: list[Held], looks: int = 200, seed: int = 0) -> float | None:
    """The share of the files' bytes that the system has in its memory, from 0 to 1, by single pages at random.

    None where the system or the file system cannot say (`RWF_NOWAIT` of Linux).
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    chosen = random.Random(seed)
    sizes = [held.size for held in files]
    found = asked = 0
    for held in chosen.choices(files, weights=sizes, k=looks):
        there = _in_memory(held, chosen.randrange(held.size) // PAGE * PAGE)
        asked += there is not None
        found += bool(there)
    return found / asked if asked else None


def _in_memory(held: Held, offset: int) -> bool | None:
    try:
        descriptor = open_file(held.path)
    except OSError:
        return None
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
        return True
    except OSError as error:
        return False if error.errno == errno.EAGAIN else None
    finally:
        os.close(descriptor)


@contextmanager
def own_file(folder: Path, size: int) -> Iterator[list[Held]]:
    """A file of its own in `folder`, gone at the end; its content cannot be compressed.

    Raises:
        UsageError: It cannot be written, or would leave the file system with less than a tenth of its room.
    """
    try:
        room = os.statvfs(folder)
        if size > room.f_bavail * room.f_frsize * 0.9:
            raise UsageError(
                f"{shown_path(folder)} has room for {room.f_bavail * room.f_frsize / 1e9:.3g} GB: write less"
            )
        descriptor = os.open(
            path := str(folder / f".weft-storage-{os.getpid()}"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
        )
    except OSError as error:
        raise UsageError(
            f"nothing can be written into {shown_path(folder)}: {error.strerror}; measure the files there, without "
            "--write, or name another folder"
        ) from error
    try:
        with open(descriptor, "wb", buffering=0) as file:
            block = os.urandom(1 << 22)
            for start in range(0, size, len(block)):
                file.write(block[: size - start])
            os.fsync(file.fileno())
        yield [Held(path, size)]
    except OSError as error:
        raise UsageError(f"{shown_path(path)} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            os.unlink(path)
