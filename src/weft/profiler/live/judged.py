"""What the rules say of a run: asked now and then while it goes on, and of a job that has ended."""

from __future__ import annotations

import difflib
import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from weft.analysis.analysis import Analysis
from weft.analysis.run import Run
from weft.errors import UsageError
from weft.foreign import listed, shown_text
from weft.rules.rule import FOUND, Finding, Rule, Status, judge

JUDGE_S = 5.0
ANY = "any"
"""Stands for all rules where rules are named."""
_WORST_FIRST = tuple(reversed(FOUND))


class Judged:
    """What the rules found last.

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
        self._rules, self._every_s, self._clock = all_rules() if rules is None else rules, every_s, clock
        self._next = float("-inf")
        self._found: list[Finding] = []

    def of(self, run: Run) -> list[Finding]:
        """The findings on the last steps, the worst first."""
        if self._clock() >= self._next and run.timeline.spans:
            found = [each for each in judge(self._rules, Analysis(run)) if each.status in FOUND]
            self._found = sorted(
                found, key=lambda each: (bool(each.explained_by), _WORST_FIRST.index(each.status), each.rule)
            )
            self._next = self._clock() + self._every_s
        return self._found


def all_rules() -> Sequence[Rule]:
    """Those that weft has."""
    with suppress(ImportError):
        found: Sequence[Rule] = importlib.import_module("weft.rules.table").RULES
        return found
    return ()


def check_names(names: Sequence[str], rules: Sequence[Rule]) -> None:
    """Refuse names that no rule has.

    Raises:
        UsageError: There is such a name.
    """
    known = {name for rule in rules for name in (rule.name, *rule.aliases)} | {ANY}
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            remedy = (
                f"did you mean {close[0]}?" if close else f"name one of {listed(sorted(known), len(known))}"
            )
            raise UsageError(f"there is no rule {shown_text(name)}: {remedy}")


def failing(findings: Sequence[Finding], names: Sequence[str], rules: Sequence[Rule]) -> list[Finding]:
    """The findings from a warning on of the rules that are named, by their name or an older one; `any` means all."""
    wanted = {rule.name for rule in rules if ANY in names or {rule.name, *rule.aliases} & set(names)}
    return [
        each for each in findings if each.rule in wanted and each.status in (Status.WARNING, Status.CRITICAL)
    ]
