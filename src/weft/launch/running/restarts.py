"""The decision whether and when a failed job is started again, and the last report of all its attempts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.units import format_seconds

FIRST_S, LONGEST_S = 1.0, 60.0
SAME = 3
"""So many failures in a row that are the same one end the job."""
WRONG_USE = 2
"""The exit code of a command that was called wrongly."""


@dataclass(frozen=True)
class Failed:
    """The failure of an attempt.

    Attributes:
        headline: Who is to blame, for what.
        said: The exception; empty for a process that ended without a word.
        step: The step that the rank to blame was in, counted over restarts if the script uses ``weft.checkpoints``;
            0 before the first, None if weft knows nothing of steps.
        saves: How many checkpoints had appeared in this attempt.
        code: The exit code that it deserves.
    """

    headline: str
    said: str
    step: int | None
    saves: int
    code: int


@dataclass(frozen=True)
class Attempt:
    """One start of the job: how long it ran, and how it failed, if it did."""

    seconds: float
    failed: Failed | None


def backoff_s(restart: int) -> float:
    """Seconds to wait before a restart, after so many failures in a row.

    >>> [backoff_s(restart) for restart in (1, 2, 3, 7, 5000)]
    [1.0, 2.0, 4.0, 60.0, 60.0]
    """
    return min(LONGEST_S, FIRST_S * 2.0 ** min(restart - 1, 10))


def in_a_row(failures: Sequence[Failed]) -> int:
    """The number of last failures that came one after the other with no save between: a save is progress."""
    row = 0
    for failed in reversed(failures):
        row += 1
        if failed.saves:
            break
    return row


def is_same(before: Failed, now: Failed) -> bool:
    """True if a failure is the one before, come back with nothing gained between."""
    if now.saves or now.step != before.step:
        return False
    return now.step is not None or (now.said == before.said and bool(now.said))


def reason_to_stop(failures: Sequence[Failed], restarts: int) -> str:
    """Why a job is not started again after these failures; empty if it is.

    ``restarts``: how often it may be.
    """
    last = failures[-1]
    if last.code == WRONG_USE and not last.step:
        return "exit code 2 before the first step means wrong use, which a restart cannot mend"
    row = failures[-SAME:]
    if len(row) == SAME and all(is_same(before, now) for before, now in zip(row, row[1:], strict=False)):
        where = f"step {last.step}" if last.step else "before the first step"
        return f"no progress in {SAME} attempts, which all failed {'in ' if last.step else ''}{where}"
    if len(failures) > restarts:
        return f"all {restarts} restarts are used up (--max-restarts {restarts})"
    return ""


def told(attempts: Sequence[Attempt], restarts: int, end: str) -> str:
    """The report of a job that was started again, as lines. ``end``: why it is over, or how."""
    lines = [f"weft: {len(attempts) - 1} of {restarts} restarts; {end}"]
    for number, attempt in enumerate(attempts):
        failed = attempt.failed
        where = f" step {failed.step}," if failed is not None and failed.step else ""
        how = "ended" if failed is None else failed.headline
        lines.append(f"  attempt {number}:{where} after {format_seconds(attempt.seconds)}: {how}")
    return "\n".join(lines)
