"""What holds for every rule: abstaining, and errors that show."""

from __future__ import annotations

from dataclasses import dataclass

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.rules.rule import Finding, Rule, Status, judge


@dataclass(frozen=True)
class Broken(Rule):
    """Raises."""

    def evaluate(self, analysis: Analysis) -> Finding:
        return self.passed(str(1 // 0))


@dataclass(frozen=True)
class Slow(Rule):
    """A step takes too long."""

    most_s: float = 10.0

    def evaluate(self, analysis: Analysis) -> Finding:
        if analysis.step_s <= self.most_s:
            return self.passed()
        return self.critical(f"a step takes {analysis.step_s:.0f} s", gain=0.5, ranks=[0])


def test_a_rule_that_raises_is_an_error_and_the_others_go_on():
    broken, slow = judge([Broken(), Slow()], Analysis(Recorded().run()))
    assert broken.status is Status.ERROR and broken.text.startswith("ZeroDivisionError: ")
    assert slow == Finding("Slow", Status.CRITICAL, "a step takes 33 s", {}, (), 0.5, (0,))


def test_a_rule_abstains_with_few_steps():
    (found,) = judge([Slow()], Analysis(Recorded(steps=3).run()))
    assert found.status is Status.NOT_ENOUGH_DATA


def test_parameters_and_question():
    assert (Slow().parameters, Slow().question) == ({"most_s": 10.0}, "A step takes too long.")
