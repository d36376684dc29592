"""Finding checkpoints in a folder, and what in their files is not as it was saved."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.index import LIMIT_BYTES, Index
from weft.checkpoint.names import DONE, INDEX, NEWEST, check_tag, open_inside, read_text
from weft.checkpoint.shard import check_range
from weft.document import Document
from weft.errors import CheckpointError, FormatError, UsageError
from weft.untrusted import parse_json

log = logging.getLogger("weft")

LEVELS = ("full", "sizes")
_DONE_LIMIT_BYTES = 1000


@dataclass(frozen=True)
class Found:
    """A folder that holds a save. ``index`` is None where ``fault`` says why it cannot be read."""

    folder: Path
    tag: str
    number: int
    index: Index | None
    fault: str = ""


def saves(root: Path) -> list[Found]:
    """The saves in ``root``, the newest first, those that cannot be read last."""
    try:
        folders = [
            entry for entry in root.iterdir() if "_partial" in entry.name and not entry.name.startswith(".")
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed: {error.strerror}: is it a folder that this user may read?") \
            from error  # fmt: skip
    found = [
        look(folder) for folder in folders if folder.is_symlink() or (folder.is_dir() and is_ours(folder))
    ]
    return sorted(found, key=lambda save: (save.number, save.folder.name), reverse=True)


def is_ours(folder: Path) -> bool:
    """True if weft wrote this folder, as opposed to a folder of ``.pt`` files."""
    return any(os.path.exists(folder / name) for name in (INDEX, DONE)) or not any(folder.glob("*.pt"))


def look(folder: Path) -> Found:
    """The save in a folder, by its index; ``DONE`` has the checksum of the index."""
    tag = folder.name.partition("_partial")[0]
    try:
        if folder.is_symlink():
            raise CheckpointError(
                f"{folder} is a link, which checkpoints do not have: put the folder itself there, or pass its place"
            )
        index = read_index(folder)
    except CheckpointError as error:
        return Found(folder, tag, 0, None, str(error))
    return Found(folder, index.tag, index.number, index)


def read_index(folder: Path) -> Index:
    """The index of a save; :class:`CheckpointError` if the save is not complete or the index was altered."""
    try:
        text = read_text(folder, DONE, _DONE_LIMIT_BYTES)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CheckpointError(f"{error}: this save was never completed") from error
        raise
    try:
        done = Document(parse_json(text))
        done.only("index_bytes", "index_sha256")
        size, digest = done["index_bytes"].whole(), done["index_sha256"].text()
    except FormatError as error:
        raise CheckpointError(f"{folder / DONE} is altered: {error}") from error
    text = read_text(folder, INDEX, LIMIT_BYTES)
    content = text.encode()
    if len(content) != size:
        raise CheckpointError(
            f"{folder / INDEX} has {len(content)} bytes, {DONE} says {size}: one is altered"
        )
    if hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(f"{folder / INDEX} is altered: it does not fit the checksum in {DONE}")
    try:
        return Index.parse(text)
    except FormatError as error:
        raise CheckpointError(f"{folder / INDEX} cannot be used: {error}") from error


def faults(folder: Path, index: Index, level: str = "full", share: tuple[int, int] = (0, 1)) -> list[str]:
    """Everything in a save's files that is not as it was saved.

    Args:
        folder: Where the save is.
        index: Its index.
        level: "full" compares all bytes with their checksums, "sizes" only the files' sizes.
        share: (i, n): the i-th of n parts of this work.
    """
    if level not in LEVELS:
        raise UsageError(f"verify is {level!r}: write one of {', '.join(LEVELS)}")
    found, bad = [], set()
    for number, (name, shard) in enumerate(index.shards.items()):
        try:
            descriptor = open_inside(folder, name)
        except CheckpointError as error:
            found.append(str(error))
            bad.add(name)
            continue
        try:
            size = os.fstat(descriptor).st_size
            if size != shard.size:
                word = "truncated" if size < shard.size else "altered"
                found.append(f"{folder / name} is {word}: it has {size} bytes, it should have {shard.size}")
                bad.add(name)
            elif level == "full" and number % share[1] == share[0]:
                if not check_range(descriptor, 0, shard.header_bytes, shard.header_crc32):
                    found.append(f"{folder / name} is altered: its header does not fit its checksum")
        finally:
            os.close(descriptor)
    if level == "full":
        found += _altered(folder, index, bad, share)
    return found


def _altered(folder: Path, index: Index, bad: set[str], share: tuple[int, int]) -> list[str]:
    wrong: dict[str, list[str]] = {}
    mine = sorted(index.tensors.items(), key=lambda item: (item[1].shard, item[1].start))[
        share[0] :: share[1]
    ]
    opened: dict[str, int] = {}
    try:
        for path, entry in mine:
            if entry.shard in bad:
                continue
            if entry.shard not in opened:
                opened[entry.shard] = open_inside(folder, entry.shard)
            if not check_range(opened[entry.shard], entry.start, entry.size, entry.crc32):
                wrong.setdefault(entry.shard, []).append(path)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return [
        f"{folder / shard} is altered: {', '.join(paths[:3])}{' and more' if len(paths) > 3 else ''} "
        f"{'does' if len(paths) == 1 else 'do'} not fit {'its checksum' if len(paths) == 1 else 'their checksums'}"
        for shard, paths in wrong.items()
    ]


def newest_tag(root: Path) -> str | None:
    """The tag that ``newest`` names, if there is such a file."""
    if not (root / NEWEST).exists():
        return None
    try:
        return check_tag(read_text(root, NEWEST, 200).strip())
    except (CheckpointError, UsageError) as error:
        log.warning("%s cannot be used: %s", root / NEWEST, error)
        return None


def in_order(root: Path, tag: str | None) -> list[Found]:
    """The saves to try: those of ``tag``; or, for None, those of the tag in ``newest`` and then all others."""
    found = saves(root)
    if tag is not None:
        return [save for save in found if save.tag == tag]
    first = newest_tag(root)
    if first is not None:
        _check_newest(root, first, found)
    return sorted(found, key=lambda save: save.tag != first)


def _check_newest(root: Path, first: str, found: Sequence[Found]) -> None:
    """Warn if ``newest`` names another save than the last: it has no checksum, and a person may have written it."""
    named = [save for save in found if save.tag == first]
    if not found or found[0].tag == first or any(save.index is None for save in named):
        return
    if named:
        log.warning("%s names %r, although %r was saved later; pass tag=%r to take that",
                    root / NEWEST, first, found[0].tag, found[0].tag)  # fmt: skip
    elif not (root / first).exists():
        log.warning("%s names %r, which is not there: taking the newest save that is", root / NEWEST, first)


def ownership(root: Path) -> str:
    """A warning that other users could have put files into a folder; empty if they could not."""
    status = root.stat()
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return f"everybody may write into {root}: load only checkpoints that you trust (chmod o-w {root})"
    if status.st_uid not in (os.getuid(), 0):
        return f"{root} belongs to another user (id {status.st_uid}): load only checkpoints that you trust"
    return ""
