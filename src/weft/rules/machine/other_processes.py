"""Processes outside of the job that take its cores."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.hosts import Host, worst
from weft.rules.measures import LOSSES, core_losses, core_time, mean, percent, queue
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class OtherProcesses(Rule):
    """Do processes outside of the job take cores that it needs?

    Four things together tell it: they take at least `others` of all cores' time, more threads want to run than there
    are cores, the ranks are busy for longer than the processor time they got, and for each second of that they lost
    their cores at least `losses` times: work that waits by itself, for a GPU say, does not lose them. What the share
    is, is the measure. It is a warning at most: it explains what Python and messages seem to take, and hides no other
    fault. Each host is judged by itself.
    """

    explains = (
        "CPUBottleneck", "StepOutlier", "PipelineBubble", "TransferExposed", "AllReduceExposed",
        "LoadBalancing",
    )  # fmt: skip

    warn: float = 0.15
    others: float = 0.20
    losses: float = LOSSES
    least_samples: int = 4

    def evaluate(self, analysis: Analysis) -> Finding:
        return worst(self, analysis, lambda host: self._on(host, analysis))

    def _on(self, host: Host, analysis: Analysis) -> Finding:
        """The finding about one host."""
        found = host.samples
        had = [share for rank in host.ranks if (share := core_time(analysis, rank)) is not None]
        if len(found) < self.least_samples or not had:
            return self.abstain(f"{len(found)} measures of the host, and {len(had)} ranks' processor times")
        taken, waiting, lost = mean(each.others for each in found), mean(map(queue, found)), 1 - mean(had)
        evidence = {
            "other processes take": f"{percent(taken)} of all cores",
            "threads that want to run": f"{waiting:.1f} a core",
            "work without its core": percent(lost),
            "cores lost for a second of that": f"{(times := core_losses(analysis, host.ranks)):.0f} times",
        }
        if taken < self.others or waiting <= 1.0 or lost <= self.warn or times < self.losses:
            return self.passed("other processes leave cores for the job", **evidence)
        return self.warning(
            f"processes outside of the job take {percent(taken)} of the cores, and training had none for "
            f"{percent(lost)} of its work",
            evidence=evidence,
            advice=[
                "end them or move them: `top` names them",
                "keep the job on cores of its own (`taskset`)",
            ],
            ranks=host.ranks,
        )
