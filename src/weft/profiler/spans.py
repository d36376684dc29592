"""Reads the spans of a recording: what is whole becomes a timeline, what is not a warning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from weft.errors import FormatError
from weft.profiler.clock import Clock
from weft.profiler.format import CONTENTS, HEADER_BYTES, KIND_CODES, MARK, RECORD, Header
from weft.profiler.host.clocks import Offset, common, error_s, offsets
from weft.profiler.recorder import SUFFIX
from weft.timeline import LATEST_S, Span, Timeline
from weft.untrusted import listed, read_limited, regular, shown_path, translated

_NAME = re.compile(rf"rank(\d+){re.escape(SUFFIX)}")
_LIMIT_BYTES = 1 << 28
_KINDS = tuple(KIND_CODES)


@dataclass(frozen=True)
class Recording:
    """The spans of all ranks that a job recorded.

    Attributes:
        timeline: The spans of all ranks on one clock, which begins with the first span.
        warnings: What is missing or damaged, a sentence each.
    """

    timeline: Timeline
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class SpanFile:
    """The file of one rank."""

    header: Header
    spans: list[Span]
    warnings: list[str]


def read_recording(path: Path) -> Recording:
    """Read a folder that ``weft run --record`` wrote, or the file of one rank.

    Ranks that are missing, files that end in the middle of a record and damaged records are left out, with a
    warning each. Raises :class:`FormatError` if nothing can be read.
    """
    files, warnings = read_files(path)
    if not files:
        raise FormatError(f"{path} holds no recording that can be read: {' '.join(warnings)}")
    if path.is_dir():
        warnings += missing_files(path, [file.header for file in files])
    timeline = Timeline(spans_of(files, Clocks(path)))
    if not timeline.spans:
        more = "".join(f"; {warning}" for warning in warnings)
        raise FormatError(f"{path} holds no spans: the job ended before its first step did{more}")
    return Recording(timeline.shifted(-timeline.start_s), tuple(warnings))


def read_files(path: Path) -> tuple[list[SpanFile], list[str]]:
    """The files of spans by rank, and what is wrong with them or with those that cannot be read."""
    files, warnings = [], []
    for name in _names(path):
        try:
            files.append(_read(name))
        except FormatError as error:
            if name == path:
                raise
            warnings.append(f"{error}; this rank is left out")
    files.sort(key=lambda file: file.header.rank)
    return files, warnings + [warning for file in files for warning in file.warnings]


class Clocks:
    """Brings the times of several clocks together, on that of the first file.

    ``folder``: that of the recording, where hosts have written how their clocks compare.
    """

    def __init__(self, folder: Path) -> None:
        self._known = offsets(folder)
        self._walls: dict[bytes, float] = {}

    def later(self, clock: Clock) -> Offset:
        """The offset from the times of a file to those of the first one; files of one clock share one offset."""
        self._walls.setdefault(clock.identity, clock.offset_s)
        return common(self._known, self._walls)[clock.identity]

    @property
    def error_s(self) -> float:
        """The most that two of the clocks may be apart; infinite where nobody knows."""
        return error_s(common(self._known, self._walls).values()) if self._walls else 0.0


def spans_of(files: list[SpanFile], clocks: Clocks) -> list[Span]:
    """The spans of all files on one clock."""
    return [
        span
        for file in files
        for span in clocks.later(Clock(file.header.clock, file.header.offset_s)).moved(file.spans)
    ]


def _names(path: Path) -> list[Path]:
    with translated(f"{shown_path(path)} cannot be read"):
        if not path.exists():
            raise FormatError(f"there is no file or folder {path}: name what weft run --record wrote")
        if not path.is_dir():
            return [path]
        names = sorted(name for name in path.iterdir() if _NAME.fullmatch(name.name))
    if not names:
        raise FormatError(
            f"the folder {path} holds no recording (rank0{SUFFIX} and so on): "
            f"write one with weft run --record {path}"
        )
    return names


def _read(path: Path) -> SpanFile:
    with translated(f"{path} cannot be read"), open(regular(path), "rb") as file:
        content = read_limited(file, _LIMIT_BYTES)
    if len(content) > _LIMIT_BYTES:
        raise FormatError(f"{path} has more than {_LIMIT_BYTES} bytes: record fewer steps")
    header = Header.unpack(content, str(path))
    body = memoryview(content)[HEADER_BYTES:]
    warnings = []
    left = len(body) % RECORD.size
    if left:
        warnings.append(f"{path} ends in the middle of a record: the rank died, or the file was cut")
    spans, damaged = [], []
    for number, record in enumerate(RECORD.iter_unpack(body[: len(body) - left])):
        span = span_of(header.rank, record)
        if span is None:
            damaged.append(number)
        else:
            spans.append(span)
    if damaged:
        warnings.append(
            f"{path}: {len(damaged)} of {len(damaged) + len(spans)} records are damaged and left out, "
            f"the first is number {damaged[0]}"
        )
    return SpanFile(header, spans, warnings)


def span_of(rank: int, record: tuple[float, float, int, int, int, int, int, int, int]) -> Span | None:
    """The span of a record, or nothing if the record cannot be one."""
    start_s, end_s, step, microbatch, stage, peer, kind, what, mark = record
    whole = mark == MARK and kind < len(_KINDS) and what < len(CONTENTS)
    if not whole or not -LATEST_S <= start_s <= end_s <= LATEST_S:
        return None
    return Span(
        rank,
        _KINDS[kind],
        microbatch,
        start_s,
        end_s,
        stage,
        _label(_KINDS[kind], peer, CONTENTS[what]),
        step,
        peer,
    )


def _label(kind: str, peer: int, what: str) -> str:
    if peer < 0:
        return what
    where = f"{'to' if kind == 'send' else 'from' if kind == 'recv' else 'for'} rank {peer}"
    return f"{what} {where}" if what else where


def missing_files(folder: Path, headers: list[Header]) -> list[str]:
    """Ranks without a file, and files of another job."""
    warnings = []
    sizes = {header.ranks for header in headers}
    if len(sizes) > 1:
        warnings.append(
            f"{folder} holds files of jobs with {' and '.join(map(str, sorted(sizes)))} ranks: "
            "they do not belong together; record into an empty folder"
        )
    here = {header.rank for header in headers}
    missing = listed(rank for rank in range(max(sizes)) if rank not in here)
    if missing:
        warnings.append(f"{folder} has no readable file of rank {missing}")
    return warnings
