"""Reads traces of `torch.profiler` (Chrome's format, one file a rank) as a run, with what they hold of it.

    ProfilerStep#N                             a step
    0F3, PP:0F3, Forward 3, Backward 3         work on a microbatch: ranges of torch.distributed.pipelining, or own ones
    other operators, autograd's functions      forward and backward work of no microbatch
    kernels of a GPU                           the work of the range that started them, instead of operators
    Optimizer.step, enumerate(DataLoader)      optimizer, waiting for data
    gloo:..., nccl:..., kernels of NCCL        messages and sums; what of them no work hides is waiting

Traces do not say which two ends belong together. With two ranks the other one is at the other end; with more the peer
of a message is known if the trace has it (`Src Rank`, `Dst Rank`), else not.
"""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft import untrusted
from weft.analysis.run import Facts, Run, Step
from weft.errors import FormatError
from weft.profiler.foreign_traces.spans import Event, spans_of
from weft.timeline import LATEST_S, MESSAGES, Span, Timeline
from weft.untrusted import MOST_RANKS, cut, listed, shown_path, translated

SUFFIXES = (".json", ".json.gz")
_MOST_FILES = 4096
_NUMBER = re.compile(r"rank[-_]?(\d{1,7})", re.IGNORECASE)


@dataclass
class _Trace:
    """One file, read."""

    path: Path
    rank: int | None
    ranks: int
    host: str
    pid: int
    base_ns: int
    events: list[Event]
    damaged: int = 0


class _Parsed(NamedTuple):
    events: list[Event]
    damaged: int


def is_traces(path: Path) -> bool:
    """True if a folder holds traces and no recording of weft."""
    recorded = any(any(path.glob(f"rank*{suffix}")) for suffix in (".spans", ".facts.json", ".steps.jsonl"))
    return path.is_dir() and not recorded and bool(_names(path))


def read_traces(path: Path) -> Run:
    """Read a folder of traces, one or more for each rank, or a single one; `.json` or `.json.gz`.

    Times are on the clock of the traces, which is the hosts' wall clock, from the first span on. Files that cannot be
    read are left out, with a warning each.

    Raises:
        FormatError: There is none that can be read, or none holds any work.
    """
    traces, warnings = [], []
    for name in _names(path) if path.is_dir() else [path]:
        try:
            traces.append(_read(name))
        except FormatError as error:
            warnings.append(f"{error}; this file is left out")
    if not traces:
        reason = " ".join(warnings) or f"write one file a rank that ends in {' or '.join(SUFFIXES)}"
        raise FormatError(f"{shown_path(path)} holds no trace that can be read: {reason}")
    ranks = _number(traces)
    warnings += [
        f"{each.path}: {each.damaged} events are damaged and left out" for each in traces if each.damaged
    ]
    missing = listed(
        rank for rank in range(min(ranks, MOST_RANKS)) if rank not in {each.rank for each in traces}
    )
    if missing:
        warnings.append(f"{shown_path(path)} has no trace of rank {missing}")
    return _run(path, traces, ranks, warnings)


def _names(path: Path) -> list[Path]:
    with translated(f"{shown_path(path)} cannot be read"):
        found = sorted(name for name in path.iterdir() if name.name.endswith(SUFFIXES) and name.is_file())
    return found[:_MOST_FILES]


def _read(path: Path) -> _Trace:
    with translated(f"{shown_path(path)} cannot be read"), open(untrusted.regular(path), "rb") as file:
        with gzip.open(file) if path.name.endswith(".gz") else file as opened:
            content = untrusted.read_limited(opened, untrusted.TEXT_LIMIT_BYTES)  # type: ignore[arg-type]
        if len(content) > untrusted.TEXT_LIMIT_BYTES:
            raise ValueError(f"it has more than {untrusted.TEXT_LIMIT_BYTES} bytes: trace fewer steps")
        found = untrusted.parse_json(content.decode("utf-8"), f"{shown_path(path)} is not JSON")
        record = {"traceEvents": found} if isinstance(found, list) else found
        if not isinstance(record, dict) or not isinstance(record.get("traceEvents"), list):
            raise ValueError('it is no trace: it has no "traceEvents"')
    base = record.get("baseTimeNanoseconds", 0)
    base_ns = base if isinstance(base, int) and abs(base) < 1 << 63 else 0
    parsed = _events(record["traceEvents"])
    if not parsed.events:
        raise FormatError(f"{shown_path(path)} is a trace without any event that took time")
    distributed = record.get("distributedInfo")
    rank, ranks = (_known(distributed, name) for name in ("rank", "world_size"))
    if rank is None and (match := _NUMBER.search(path.name)):
        rank = int(match[1])
    named = record.get("host_name")
    host = cut(named, 80) if isinstance(named, str) else ""
    return _Trace(path, rank, ranks or 0, host, parsed.events[0].process, base_ns, *parsed)


def _known(record: object, name: str) -> int | None:
    """A small whole number of an object."""
    value = record.get(name) if isinstance(record, dict) else None
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_RANKS
    return value if whole else None


def _events(records: list[Any]) -> _Parsed:
    """The events that took time, by their begin; times in seconds."""
    events, damaged = [], 0
    for record in records:
        if not isinstance(record, dict):
            damaged += 1
            continue
        if record.get("ph") != "X" or record.get("cat") == "Trace":
            continue
        name, category = record.get("name"), record.get("cat")
        at, took = (_microseconds(record.get(key)) for key in ("ts", "dur"))
        if not isinstance(name, str) or at is None or took is None or took < 0:
            damaged += 1
            continue
        known = record.get("args")
        process, thread = (
            value if isinstance(value := record.get(key), int) else -1 for key in ("pid", "tid")
        )
        events.append(
            Event(
                name, category if isinstance(category, str) else "", at / 1e6, (at + took) / 1e6, process, thread,
                known if isinstance(known, dict) else {},
            )
        )  # fmt: skip
    return _Parsed(sorted(events, key=lambda event: (event.start_s, -event.end_s)), damaged)


def _microseconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LATEST_S * 1e6:
        return None
    return float(value)


def _number(traces: list[_Trace]) -> int:
    """Give a rank to those that do not say theirs; how many ranks there are."""
    free = (rank for rank in range(MOST_RANKS) if rank not in {each.rank for each in traces})
    given: dict[tuple[str, int], int] = {}
    for trace in traces:
        if trace.rank is None:
            who = trace.host, trace.pid
            trace.rank = given[who] if who in given else given.setdefault(who, next(free))
    return max(max(trace.ranks, (trace.rank or 0) + 1) for trace in traces)


@dataclass
class _Rank:
    spans: list[Span] = field(default_factory=list)
    facts: Facts | None = None


def _run(path: Path, traces: list[_Trace], ranks: int, warnings: list[str]) -> Run:
    base_ns = min(trace.base_ns for trace in traces)
    found: dict[int, _Rank] = defaultdict(_Rank)
    for trace in traces:
        rank = trace.rank or 0
        moved = (trace.base_ns - base_ns) / 1e9
        events = [each.later(moved) for each in trace.events] if moved else trace.events
        found[rank].spans += spans_of(events, rank, ranks)
        found[rank].facts = _facts(trace, rank, ranks, found[rank].spans)
    timeline = Timeline(span for each in found.values() for span in each.spans)
    if not timeline.spans:
        raise FormatError(f"{shown_path(path)} holds traces without steps and without any work")
    start_s = timeline.start_s
    timeline = timeline.shifted(-start_s)
    hosts = {trace.host for trace in traces}
    if len(hosts) > 1:
        warnings.append("the traces are of several hosts, and how far their clocks are apart is not known")
    return Run(
        path.resolve().name, timeline, {rank: each.facts for rank, each in found.items() if each.facts is not None},
        {rank: _steps(timeline.of_rank(rank)) for rank in timeline.ranks},
        clock_error_s=float("inf") if len(hosts) > 1 else 0.0, warnings=tuple(warnings),
    )  # fmt: skip


def _facts(trace: _Trace, rank: int, ranks: int, spans: Iterable[Span]) -> Facts:
    """The facts of a rank. Ranks that send messages count as a pipeline, others as replicas."""
    pipeline = any(span.kind in MESSAGES for span in spans)
    device = "cuda" if any(each.category == "kernel" for each in trace.events) else "cpu"
    place = (rank, 0) if pipeline else (0, rank)
    return Facts(rank, ranks, trace.host, trace.pid, *place, device=device)


def _steps(spans: Iterable[Span]) -> tuple[Step, ...]:
    """The times of each step of a rank."""
    taken: Mapping[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    steps: list[Span] = []
    for span in spans:
        if span.kind == "step":
            steps.append(span)
        else:
            taken[span.step]["work" if span.kind in "FBIW" else span.kind] += span.duration_s
    return tuple(
        Step(
            step.step, step.start_s, step.duration_s, taken[step.step]["data"], taken[step.step]["optimizer"],
            taken[step.step]["work"], taken[step.step]["wait"],
        )
        for step in steps
    )  # fmt: skip
