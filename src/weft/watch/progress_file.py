"""The progress of a job, for another process to read: the step that it has reached, when, and how many there are a
minute.

One small file, written once a second at most, and only when a step has ended.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.watch.heartbeat import Page

NAME = "step.json"
EVERY_S = 1.0
WINDOW_S = 60.0
"""The rate is that of so many seconds, or of the whole job while it is younger."""


class Pace:
    """The step and the rate of a job, to be written about once a second.

    >>> pace = Pace()
    >>> pace.reach(1, 100.0), pace.reach(2, 100.5), pace.reach(4, 102.0)
    ({'step': 1, 'time': 100.0}, None, {'step': 4, 'time': 102.0, 'steps_per_minute': 90.0})
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._written_s = float("-inf")
        self._written = -1

    def reach(self, step: int, now_s: float, last: bool = False) -> dict[str, float] | None:
        """The values to write now; None if they were written a moment ago, or are the same.

        ``now_s``: seconds since 1970. ``last``: no step comes after it, so they are written at once.
        """
        if not self._seen or self._seen[-1][1] != step:
            self._seen.append((now_s, step))
        if step == self._written or (now_s - self._written_s < EVERY_S and not last):
            return None
        while len(self._seen) > 2 and self._seen[1][0] < now_s - WINDOW_S:
            self._seen.popleft()
        (first_s, first), (last_s, _) = self._seen[0], self._seen[-1]
        self._written_s, self._written = now_s, step
        progress: dict[str, float] = {"step": step, "time": round(last_s, 3)}
        if last_s > first_s and step > first:
            progress["steps_per_minute"] = round(60.0 * (step - first) / (last_s - first_s), 2)
        return progress


def step_of(page: Page, rank: int) -> int:
    """The last step that a rank has begun, without those that only evaluate, counted over restarts where the script
    says how; 0 if weft knows nothing of steps."""
    sign = page.sign(rank)
    return page.loop_step(rank) or max(0, (sign.step or 0) - sign.evaluations)


def write(folder: Path, values: Mapping[str, Any], name: str = NAME) -> None:
    """Write a JSON file, whole or not at all. A folder that cannot be written to is left alone."""
    new = folder / f".{name}-{secrets.token_hex(4)}"
    with suppress(OSError):
        new.write_text(json.dumps(values), encoding="utf-8")
        os.replace(new, folder / name)
