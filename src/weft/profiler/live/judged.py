"""The findings of the rules about a run, asked now and then while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from weft.analysis.analysis import Analysis
from weft.analysis.run import Run
from weft.rules.rule import FOUND, Finding, Rule, judge
from weft.rules.table import RULES
from weft.rules.verdict import verdict

JUDGE_S = 5.0


class Judged:
    """The latest findings of the rules.

    Args:
        rules: Those to ask; all that weft has if not given.
        every_s: Seconds after which they are asked again.
        clock: Seconds, from any start.
    """

    def __init__(
        self,
        rules: Sequence[Rule] | None = None,
        every_s: float = JUDGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules, self._every_s, self._clock = RULES if rules is None else rules, every_s, clock
        self._next = float("-inf")
        self._found: list[Finding] = []

    def of(self, run: Run) -> list[Finding]:
        """The findings on the last steps: causes in the order of the verdict, then their consequences."""
        if self._clock() >= self._next and run.timeline.spans:
            told = verdict(judge(self._rules, Analysis(run)), self._rules).findings
            found = [each for each in told if each.status in FOUND]
            self._found = sorted(found, key=lambda each: bool(each.explained_by))
            self._next = self._clock() + self._every_s
        return self._found
