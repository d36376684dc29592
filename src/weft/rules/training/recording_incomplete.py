"""A recording that lacks something."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.rule import Finding, Rule
from weft.untrusted import listed


@dataclass(frozen=True)
class RecordingIncomplete(Rule):
    """Does the recording lack a rank, or is a file of it damaged?

    A rank that is missing at the end of a job is critical: what it did, and who waited for it, is not known.
    """

    least_steps = 0
    loses_run = True

    def evaluate(self, analysis: Analysis) -> Finding:
        told = max((facts.ranks for facts in analysis.run.facts.values()), default=0)
        missing = sorted(
            set(range(told)) - set(analysis.timeline.ranks) if len(analysis.timeline.ranks) else ()
        )
        faults = list(analysis.run.warnings)
        if missing:
            faults.insert(0, f"nothing is recorded of rank {listed(missing)}, of {told} ranks")
        if not faults:
            return self.passed("all ranks are there, and their files are whole")
        say = self.critical if missing and analysis.run.complete else self.warning
        return say(
            faults[0],
            evidence={"missing ranks": len(missing), "ranks": told}
            | {f"fault {number}": text for number, text in enumerate(faults[:20], 1)},
            advice=[
                "copy the folders of all hosts together before the report: `weft report`",
                "look in that rank's output for the reason why it ended",
            ],
            ranks=missing,
        )
