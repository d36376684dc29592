"""A job that failed."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class JobFailed(Rule):
    """Did the job fail?

    The launcher's sentence, with the rank that failed first.
    """

    least_steps = 0
    loses_run = True
    explains = ("RecordingIncomplete",)

    def evaluate(self, analysis: Analysis) -> Finding:
        failed = analysis.run.failed
        if failed is None:
            return self.passed("no rank failed")
        done = max((len(steps) for steps in analysis.run.steps.values()), default=0)
        return self.critical(
            f"the job failed: {failed.headline}",
            evidence={"step": failed.step, "recorded steps": done},
            advice=["mend that first; all else here is about the steps before"],
            ranks=[failed.rank],
            steps=[failed.step] if failed.step else [],
        )
