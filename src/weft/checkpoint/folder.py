"""A save appears whole or not at all: written under a temporary name, flushed, renamed, and named last.

    begin     the place is locked, what dead jobs left is removed, the folder to write into is made
    (each rank writes and flushes its own file there)
    commit    index.json, DONE, the folder: flushed; renamed; `newest` replaced; old saves removed
    abandon   the folder is removed; nothing else has been touched

A process that dies anywhere leaves the earlier saves as they were, and at most a folder that the next save removes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.checkpoint.find import saves
from weft.checkpoint.index import Index
from weft.checkpoint.names import DONE, INDEX, LOCK, NEWEST, SAVING, folder_name
from weft.errors import CheckpointError, UsageError
from weft.untrusted import LARGEST, excess

_UNSUPPORTED = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)


class Lock:
    """The right to write checkpoints into a folder, until :meth:`close` or the end of the process."""

    def __init__(self, root: Path) -> None:
        self.exclusive = True
        self._descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                self.exclusive = False
                return
            owner = os.read(self._descriptor, 200).decode(errors="replace").strip() or "unknown"
            self.close()
            raise CheckpointError(
                f"{root} is written by another job ({owner}): end that job, or give this one a path of its own"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.write(
            self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(errors="replace")
        )

    def close(self) -> None:
        os.close(self._descriptor)


class Writer:
    """The one rank that makes a save appear.

    Args:
        root: Where the checkpoints are.
        tag: The save's name.
        keep: How many saves may stay, or None for all.
        reached: Called with the name of each phase right before it begins.
    """

    def __init__(self, root: Path, tag: str, keep: int | None, reached: Callable[[str], None]) -> None:
        self.root = root
        self.tag = tag
        self.keep = keep
        self.reached = reached
        self.number = 0
        self.name = f"{SAVING}{tag}-{secrets.token_hex(8)}"
        self.folder = root / self.name

    def begin(self, locks: dict[Path, Lock]) -> None:
        """Make the folder that ranks write into. ``locks``: the locks of the job; the folder's is added if needed."""
        self.reached("mkdir")
        self.root.mkdir(parents=True, exist_ok=True)
        place = self.root.resolve()
        if place not in locks:
            locks[place] = Lock(self.root)
        if locks[place].exclusive:
            remove_leftovers(self.root)
        last = max(saves(self.root), key=lambda found: found.number, default=None)
        if last is not None and last.number >= LARGEST:
            raise CheckpointError(
                f"{last.folder} has the number {last.number}, after which there is none: remove that folder"
            )
        self.number = 1 if last is None else last.number + 1
        self.folder.mkdir()

    def commit(self, index: Index) -> Path:
        """The folder of the save, which appears with this call."""
        self.reached("index")
        text = index.to_json()
        if too_much := excess(text):
            raise CheckpointError(
                f"the index of this save could not be read back, as {too_much}: save long lists as tensors"
            )
        content = text.encode()
        write_flushed(self.folder / INDEX, content)
        done = {"index_bytes": len(content), "index_sha256": hashlib.sha256(content).hexdigest()}
        write_flushed(self.folder / DONE, json.dumps(done).encode())
        self.reached("folder")
        flush_folder(self.folder)
        self.reached("rename")
        final = self.folder = self._rename()
        self.reached("parent")
        flush_folder(self.root)
        self.reached("newest")
        name_newest(self.root, self.tag)
        self.reached("prune")
        with suppress(OSError):  # the save is complete; what could not be removed is removed after the next
            self._prune()
        return final

    def _rename(self) -> Path:
        for repeat in range(1, 1_000_000):
            final = self.root / folder_name(self.tag, repeat)
            if final.exists() or final.is_symlink():
                continue
            try:
                os.rename(self.folder, final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue
            return final
        raise CheckpointError(f"{self.root} has a million saves of the tag {self.tag}: remove some")

    def _prune(self) -> None:
        """Remove earlier saves of the same tag, and those beyond the number to keep."""
        whole = [found for found in saves(self.root) if found.index is not None]
        old = [found for found in whole if found.tag == self.tag and found.number < self.number]
        rest = [found for found in whole if found not in old]
        if self.keep is not None:
            old += [found for found in rest[self.keep :] if found.number < self.number]
        for found in old:
            self._remove(found.folder)

    def _remove(self, folder: Path) -> None:
        gone = self.root / f"{SAVING}old-{secrets.token_hex(8)}"
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def abandon(self) -> None:
        """Remove what was written so far; also a save that has just appeared but could not be named."""
        if self.folder.name == self.name:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            with suppress(OSError):
                self._remove(self.folder)


def remove_leftovers(root: Path) -> None:
    """Remove the folders of saves that were given up; only the holder of the :class:`Lock` may do that."""
    for stale in root.glob(f"{SAVING}*"):
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            with suppress(OSError):
                stale.unlink()


def write_flushed(path: Path, content: bytes) -> None:
    """Write a new file; its bytes are on the disk when this returns."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def temporary_beside(path: Path) -> Path:
    """A temporary name beside ``path``, for a file that is going to be ``path``; leftovers are known by such names."""
    return path.with_name(f"{SAVING}{path.name}-{secrets.token_hex(8)}")


def replace_flushed(path: Path, content: bytes) -> None:
    """Replace the content of a file, so that readers see the old one or the new one, each whole."""
    temporary = temporary_beside(path)
    try:
        write_flushed(temporary, content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A temporary path beside ``target``, for the block to make a file or folder of; at its end that is ``target``.

    Raises:
        CheckpointError: It could not be written. Nothing of it stays; what ``target`` was before, it still is.
    """
    temporary = target.with_name(
        f".{target.name}-{secrets.token_hex(8)}"
    )  # no job that saves here removes that
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        flush_tree(temporary)
        os.replace(temporary, target)
        flush_folder(target.parent)
    except BaseException as error:  # some libraries raise what is no Exception
        with suppress(OSError):
            shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink(missing_ok=True)
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, UsageError)):
            raise
        raise CheckpointError(f"{target} was not written: {explain(error, target.parent)}") from error


def flush_tree(path: Path) -> None:
    """Flush a file, or a folder and the files in it."""
    if not path.is_dir():
        flush_file(path)
        return
    for each in path.iterdir():
        flush_tree(each)
    flush_folder(path)


def name_newest(root: Path, tag: str) -> None:
    """Let ``newest`` say this tag."""
    replace_flushed(root / NEWEST, f"{tag}\n".encode())


def flush_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(path: Path) -> None:
    """Flush a folder; the names of new files in it are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain(error: BaseException, root: Path) -> str:
    """Why something could not be written, and what to do."""
    error = _first_cause(error)
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if (code := re.search(r"\(os error (\d+)\)", text)) and number is None:  # of a library in Rust
        number = int(code[1])
    if number in (errno.ENOSPC, errno.EDQUOT) or "StorageFull" in text:
        free = ""
        with suppress(OSError):
            free = f" ({shutil.disk_usage(_existing(root)).free / 2**20:.0f} MiB are free)"
        return f"the disk of {root} is full{free}: free some space, or keep fewer checkpoints"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{text}: let this user (id {os.geteuid()}) write there, or save to another path"
    if number in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        return f"{text}: something of another kind is in its place: remove that, or save to another path"
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def _first_cause(error: BaseException) -> BaseException:
    """The system's error behind one of another library, or the error itself if there is none."""
    before: BaseException | None = error
    while before is not None and not isinstance(before, (OSError, CheckpointError)):
        failures = getattr(
            before, "failures", None
        )  # of torch.distributed.checkpoint: by rank, with a traceback
        errors = [each[0] for each in failures.values()] if isinstance(failures, dict) else []
        before = errors[0] if errors else before.__cause__ or before.__context__
    return before or error


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
