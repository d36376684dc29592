"""Names that may become files: nothing that an index or a tag says may lead out of its folder."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from weft.errors import CheckpointError, UsageError
from weft.untrusted import read_limited, shown, translated

NEWEST = "newest"
LOCK = ".lock"
SAVING = ".saving-"
INDEX = "index.json"
DONE = "DONE"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def check_tag(tag: object) -> str:
    """The tag, if it can be part of a file's name.

    >>> check_tag("../up")
    Traceback (most recent call last):
    weft.errors.UsageError: the tag is '../up': write 1 to 100 letters, digits, "_", "." or "-", no "." or "-" first
    """
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == NEWEST:
        wrong = (
            "that name is taken"
            if tag == NEWEST
            else 'write 1 to 100 letters, digits, "_", "." or "-", no "." or "-" first'
        )
        raise UsageError(f"the tag is {shown(tag)}: {wrong}")
    return tag


def check_path(path: object, name: str = "path") -> Path:
    """The path, if the system can have such a one. ``name``: what the caller calls it.

    >>> check_path(3, "target")
    Traceback (most recent call last):
    weft.errors.UsageError: target is 3: pass a path, as text or a pathlib.Path
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise UsageError(f"{name} is {shown(path)}: pass a path, as text or a pathlib.Path")
    try:
        fits = bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise UsageError(f"{name} is {shown(text)}: no file can have that name")
    return Path(text)


def is_safe(name: object) -> bool:
    """True if a name stays inside its folder.

    >>> [is_safe(name) for name in ("rank-0000.safetensors", "../x", "/etc/passwd", "..", "a/b")]
    [True, False, False, False, False]
    """
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and name not in (".", "..")


def check_folder(folder: Path, root: Path, start: str) -> Path:
    """The folder, if it is one of this save's: another process named it, and a rank is going to write there.

    >>> check_folder(Path("/etc"), Path("saves"), ".saving-a-")
    Traceback (most recent call last):
    weft.errors.CheckpointError: a save's leader named the folder '/etc', which is not saves/.saving-a-...
    """
    name = folder.name
    if folder.parent != root or not is_safe(name) or not name.startswith(start) or folder.is_symlink():
        raise CheckpointError(
            f"a save's leader named the folder {str(folder)!r}, which is not {root / start}..."
        )
    return folder


def folder_name(tag: str, repeat: int = 1) -> str:
    """The folder of the ``repeat``-th save of a tag.

    >>> folder_name("step10"), folder_name("step10", 2)
    ('step10_partial', 'step10_partial-2')
    """
    return f"{tag}_partial" if repeat == 1 else f"{tag}_partial-{repeat}"


def shard_name(rank: int) -> str:
    return f"rank-{rank:04d}.safetensors"


def open_inside(folder: Path, name: str) -> int:
    """A descriptor of the regular file ``name`` in ``folder``; no link is followed."""
    if not is_safe(name):
        raise CheckpointError(
            f"{folder}: {shown(name)} is no name of a file in this folder: do not use this checkpoint"
        )
    path = folder / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path} {_reason(error)}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is no regular file: do not use this checkpoint")
    return descriptor


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "is missing"
    if error.errno == errno.ELOOP:
        return "is a link, which checkpoints do not have: do not use this checkpoint"
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"cannot be read by this user (id {os.geteuid()}): give it the right to read, or run as its owner"
        )
    return f"cannot be read: {error.strerror}"


def read_text(folder: Path, name: str, limit_bytes: int) -> str:
    """The text of a small file in ``folder``."""
    descriptor = open_inside(folder, name)
    with translated(f"{folder / name} is altered", CheckpointError):
        with os.fdopen(descriptor, "rb") as file:
            content = read_limited(file, limit_bytes)
        if len(content) > limit_bytes:
            raise CheckpointError(
                f"{folder / name} has more than {limit_bytes} bytes: it is no file of a checkpoint"
            )
        return content.decode()
