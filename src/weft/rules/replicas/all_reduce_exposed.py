"""Waiting for the sums of gradients over replicas."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import number_of, percent, share
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class AllReduceExposed(Rule):
    """Do ranks wait for the sums of gradients over the replicas?

    The measure is the share of a step, the mean over ranks. Sums that go on beside work do not count.
    """

    explains = ("LowGPUUtilization",)

    warn: float = 0.05
    severe: float = 0.15

    def evaluate(self, analysis: Analysis) -> Finding:
        copies = 1 + max((analysis.facts(rank).rdp_rank for rank in analysis.ranks), default=0)
        exposed = share(analysis, lambda parts: parts.reduce)
        if copies < 2 and not exposed:
            return self.not_applicable("there is one replica")
        hosts = {analysis.facts(rank).host for rank in analysis.ranks}
        advice = [] if analysis.setting("compression") else ['send fewer bytes: `"compression": "int8"`']
        if len(hosts) > 1:
            advice.append('add up on each host first: `"all_reduce": "hierarchical"`')
        cut = number_of(analysis, "microbatches")
        advice.append(f'take larger mini-batches, cut into more: `"microbatches": {2 * cut}`')
        return self.graded(
            f"ranks wait for sums of gradients for {percent(exposed)} of a step",
            (exposed, self.warn, self.severe),
            evidence={"exposed": percent(exposed), "replicas": copies, "hosts": len(hosts)},
            advice=advice,
            gain=analysis.what_if.gain("no reduce"),
            ranks=analysis.ranks,
        )
