"""Reads all that a job has recorded, from any of its files that are there: none of them is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from weft.analysis.run import Facts, Run, Sample, Step
from weft.errors import FormatError
from weft.profiler import facts as facts_file
from weft.profiler import samples as samples_file
from weft.profiler import steps as steps_file
from weft.profiler.format import Header
from weft.profiler.host.clocks import Offset
from weft.profiler.host.script_lines import read_script_lines
from weft.profiler.recorder import SCRIPT, SUFFIX
from weft.profiler.spans import Clocks, Recording, missing_files, read_files, read_recording, spans_of
from weft.profiler.steps import StepsFile
from weft.timeline import Timeline
from weft.untrusted import listed, regular, shown_path, translated
from weft.watch import failed

T = TypeVar("T")


def read_run(path: Path) -> Run:
    """The run that was recorded in a folder, on one clock that begins with the first thing that is known.

    What is missing, cut or damaged is left out, with a warning each.

    Raises:
        FormatError: The folder holds nothing that can be read.
    """
    warnings: list[str] = []
    clocks = Clocks(path)
    names = _files(path)
    files, damaged = read_files(path) if any(name.endswith(SUFFIX) for name in names) else ([], [])
    warnings += damaged
    spans = spans_of(files, clocks)
    facts = _facts(path, names, clocks, warnings)
    books = list(_each(path, names, steps_file.SUFFIX, steps_file.read_steps, warnings))
    hosts = list(_each(path, names, samples_file.SUFFIX, samples_file.read_samples, warnings))
    if not (files or facts or books):
        reasons = warnings or [f"there is none of rank*{SUFFIX} and so on"]
        raise FormatError(f"{shown_path(path)} holds no recording that can be read: {'; '.join(reasons)}")
    warnings += [warning for book in books for warning in book.warnings]
    warnings += [warning for host in hosts for warning in host.warnings]
    headers = [file.header for file in files]
    warnings += missing_files(path, headers) if files else []
    try:
        failure = failed.read(path)
    except FormatError as error:
        failure = None
        warnings.append(f"{error}; this file is left out")
    ranks = max(_ranks(facts.values(), headers, books))
    known = {*facts, *(file.header.rank for file in files), *(book.rank for book in books)}
    if missing := listed(rank for rank in range(ranks) if rank not in known):
        warnings.append(f"{shown_path(path)} says nothing of rank {missing}")
    script = dict(_each(path, names, SCRIPT, read_script_lines, warnings))
    run = Run(
        path.resolve().name, Timeline(spans), facts,
        {book.rank: _later_steps(book.steps, clocks.later(book.clock)) for book in books},
        {host.name: _later_samples(host.samples, clocks.later(host.clock)) for host in hosts},
        clock_error_s=clocks.error_s, complete=sum(book.ended for book in books) == ranks,
        warnings=tuple(dict.fromkeys(warnings)), failed=failure, script=script,
    )  # fmt: skip
    return _from_zero(run)


def _files(path: Path) -> list[str]:
    with translated(f"{shown_path(path)} cannot be read"):
        if not path.is_dir():
            raise FormatError(f"there is no folder {shown_path(path)}: name what weft run --report wrote")
        return sorted(each.name for each in path.iterdir())


def _each(
    path: Path, names: list[str], suffix: str, read: Callable[[Path], T], warnings: list[str]
) -> Iterator[T]:
    """The content of each file with a suffix; those that cannot be read are warnings."""
    for name in names:
        if not name.endswith(suffix):
            continue
        try:
            with translated(f"{shown_path(path / name)} cannot be read"):
                regular(path / name)
            yield read(path / name)
        except FormatError as error:
            warnings.append(f"{error}; this file is left out")


def _facts(path: Path, names: list[str], clocks: Clocks, warnings: list[str]) -> dict[int, Facts]:
    found = {}
    for facts, clock in _each(path, names, facts_file.SUFFIX, facts_file.read_facts, warnings):
        found[facts.rank] = _later_facts(facts, clocks.later(clock))
    return found


def _ranks(facts: Iterable[Facts], headers: Iterable[Header], books: Iterable[StepsFile]) -> Iterator[int]:
    """The number of ranks of the job, as each file says."""
    yield from (each.ranks for each in facts)
    yield from (header.ranks for header in headers)
    yield from (book.rank + 1 for book in books)


def _later_facts(facts: Facts, later: Offset) -> Facts:
    return replace(facts, start_s=later.at(facts.start_s), joined_s=later.at(facts.joined_s))


def _later_steps(steps: Iterable[Step], later: Offset) -> tuple[Step, ...]:
    return tuple(replace(step, start_s=later.at(step.start_s)) for step in steps)


def _later_samples(samples: Iterable[Sample], later: Offset) -> tuple[Sample, ...]:
    return tuple(replace(sample, at_s=later.at(sample.at_s)) for sample in samples)


def _from_zero(run: Run) -> Run:
    """The run on a clock that begins with its first span, or step if it has no spans."""
    firsts = [steps[0].start_s for steps in run.steps.values() if steps]
    if run.timeline.spans:
        firsts.append(run.timeline.start_s)
    later = Offset(-min(firsts, default=0.0))
    return replace(
        run,
        timeline=run.timeline.shifted(later.offset_s),
        facts={rank: _later_facts(each, later) for rank, each in run.facts.items()},
        steps={rank: _later_steps(each, later) for rank, each in run.steps.items()},
        samples={host: _later_samples(each, later) for host, each in run.samples.items()},
    )


__all__ = ["Recording", "read_recording", "read_run"]
