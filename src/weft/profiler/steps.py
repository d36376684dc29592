"""The times of each step, a line each: `rank<N>.steps.jsonl`, kept for every step, also where spans are not.

The line of a step is written when the next one begins, because the optimizer, and what the script logs, come after it.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from weft.analysis.run import Step
from weft.errors import FormatError
from weft.profiler.clock import Clock
from weft.profiler.lines import LineFile, read_lines
from weft.timeline import KINDS, LATEST_S, WORK
from weft.untrusted import LARGEST, MOST_RANKS, shown_path

SUFFIX = ".steps.jsonl"
FIELDS = tuple(each.name for each in fields(Step))
END = '"end"'
"""The last line of a rank that came to its end."""
_VALUES = FIELDS.index("values")
"""Lines of earlier versions end there."""
_WHOLE = [FIELDS.index(name) for name in ("step", "preempted", "samples", "memory_bytes")]


def steps_path(folder: Path, rank: int) -> Path:
    """The file of a rank in the folder of a recording."""
    return folder / f"rank{rank}{SUFFIX}"


class Spent(NamedTuple):
    """The use of this process so far: processor time, and how often its threads lost their cores."""

    cpu_s: float = 0.0
    preempted: int = 0


NOTHING = Spent()


@dataclass
class Book:
    """The step that runs, and what lies behind it up to the next one.

    Attributes:
        file: Takes the lines.
        cpu_s: Processor time of whatever runs the step.
        taken: How long each kind of span took, since the step before began.
    """

    file: LineFile
    cpu_s: Callable[[], float] = time.thread_time
    taken: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    def __post_init__(self) -> None:
        self._now: dict[str, Any] | None = None
        self._before = self._ended = NOTHING

    @classmethod
    def open(cls, folder: Path, rank: int, ranks: int, clock: Clock) -> Book:
        """Begin the file of a rank; one that is there is replaced."""
        header = {"rank": rank, "ranks": ranks, **clock.to_record(), "fields": FIELDS}
        return cls(LineFile(steps_path(folder, rank), "steps", header))

    def spent(self) -> Spent:
        """Up to now."""
        return Spent(self.cpu_s(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)

    def begin(self, step: int, start_s: float, evaluates: bool, spent: Spent = NOTHING) -> None:
        """A step begins: the line of the one before is complete. ``spent``: as it began."""
        self._write(max(0.0, spent.cpu_s - self._ended.cpu_s))
        taken = self.taken
        self._now = {
            "step": step,
            "start_s": start_s,
            "evaluates": evaluates,
            "data_s": taken["data"],
            "values": {},
        }
        for kind in KINDS:
            taken[kind] = 0.0
        self._before = spent

    def end(self, end_s: float, samples: int, memory_bytes: int, spent: Spent = NOTHING) -> None:
        """The step's function has come to its end. ``spent``: as it ended."""
        now, before = self._now, self._before
        if now is None:
            return
        self._ended = spent
        now |= {
            "step_s": end_s - now["start_s"], "cpu_s": max(0.0, spent.cpu_s - before.cpu_s),
            "preempted": max(0, spent.preempted - before.preempted), "samples": samples, "memory_bytes": memory_bytes,
        }  # fmt: skip

    def note(self, values: Mapping[str, Any]) -> None:
        """Values of the step that ran last; what is no number is left out."""
        if self._now is not None:
            self._now["values"] |= {
                name: float(value) for name, value in values.items() if isinstance(value, (bool, int, float))
            }

    def close(self, ended: bool = True) -> None:
        """Write the last line. ``ended``: the job has come to its end."""
        self._write()
        if ended:
            self.file.write(END)
        self.file.close()

    def _write(self, between_cpu_s: float = 0.0) -> None:
        now, self._now = self._now, None
        if now is None or "step_s" not in now:
            return
        taken = self.taken
        self.file.write(
            line_of(
                Step(
                    optimizer_s=taken["optimizer"], work_s=sum(taken[kind] for kind in WORK), wait_s=taken["wait"],
                    checkpoint_s=taken["checkpoint"], collector_s=taken["collector"], between_cpu_s=between_cpu_s,
                    **now,
                )
            )
        )  # fmt: skip


def line_of(step: Step) -> str:
    """A step as one line of JSON: its fields in order, times to a tenth of a microsecond."""
    values = {
        name: float(f"{value:.7g}") if math.isfinite(value) else str(value)
        for name, value in step.values.items()
    }
    return json.dumps(
        [
            step.step, round(step.start_s, 7), round(step.step_s, 7), round(step.data_s, 7), round(step.optimizer_s, 7),
            round(step.work_s, 7), round(step.wait_s, 7), round(step.cpu_s, 7), step.preempted, step.samples,
            step.memory_bytes, int(step.evaluates), values, round(step.checkpoint_s, 7), round(step.collector_s, 7),
            round(step.between_cpu_s, 7),
        ],
        separators=(",", ":"),
    )  # fmt: skip


class StepsFile(NamedTuple):
    """A file that was read. ``ended``: the rank came to its end; ``warnings``: what is wrong with the file."""

    rank: int
    clock: Clock
    steps: list[Step]
    ended: bool
    warnings: list[str]


def read_steps(path: Path) -> StepsFile:
    """The steps of a rank, by number.

    Raises:
        FormatError: Nothing can be read.
    """
    header, lines, warnings = read_lines(path, "steps")
    rank = header.get("rank")
    if type(rank) is not int or not 0 <= rank < MOST_RANKS:
        raise FormatError(f"{shown_path(path)} does not say of which rank it is: record again")
    ended = bool(lines) and lines[-1] == "end"
    found = [step_of(line) for line in (lines[:-1] if ended else lines)]
    steps = {step.step: step for step in found if step is not None}
    if None in found:
        warnings.append(f"{shown_path(path)}: {found.count(None)} lines are no steps and left out")
    return StepsFile(
        rank, Clock.from_record(header, path), [steps[number] for number in sorted(steps)], ended, warnings
    )


def step_of(line: Any) -> Step | None:
    """The step in a line; nothing if it cannot be one."""
    if not isinstance(line, list) or len(line) not in (_VALUES + 1, len(FIELDS)):
        return None
    numbers, values, later = line[:_VALUES], line[_VALUES], line[_VALUES + 1 :]
    if not all(type(number) in (int, float) and abs(number) <= LARGEST for number in (*numbers, *later)):
        return None
    if not isinstance(values, dict) or not all(
        type(numbers[at]) is int and numbers[at] >= 0 for at in _WHOLE
    ):
        return None
    if not abs(numbers[1]) <= LATEST_S or not all(0 <= each <= LATEST_S for each in (*numbers[2:8], *later)):
        return None
    kept = {name: number for name, value in values.items() if (number := _value(value)) is not None}
    given: dict[str, Any] = dict(zip(FIELDS, (*numbers, kept, *later), strict=False))
    return Step(**given | {"evaluates": bool(given["evaluates"])})


def _value(value: Any) -> float | None:
    """A logged value; not finite ones are written as text."""
    if value in ("nan", "inf", "-inf") or (type(value) in (int, float) and abs(value) < float("inf")):
        return float(value)
    return None
