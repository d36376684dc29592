"""Waiting for what ranks with parts of the same weights exchange."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import number_of, percent, share
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class TensorParallelExposed(Rule):
    """Do ranks that hold parts of the same weights wait for each other's results?

    The measure is the share of a step in which they all-reduce or all-gather tensors, the mean over ranks.
    """

    explains = ("LowGPUUtilization",)

    warn: float = 0.2
    severe: float = 0.35

    def evaluate(self, analysis: Analysis) -> Finding:
        exposed = share(analysis, lambda parts: parts.tensor)
        degree = number_of(analysis, "tensor_parallel_degree")
        if degree < 2 and not exposed:
            return self.not_applicable("no weights are cut over ranks")
        hosts = _hosts_of_one_team(analysis)
        advice = []
        if hosts > 1:
            advice.append(
                'keep ranks with parts of the same weights on one host: `"placement_strategy": "cluster"`, a '
                '`"tensor_parallel_degree"` of at most the ranks of a host, and `"partitions"` between hosts'
            )
        if degree > 2:
            advice.append(f'cut over fewer ranks: `"tensor_parallel_degree": {degree // 2}`')
        advice += [
            'where the model fits a device, train copies of it instead: `"tensor_parallel_degree": 1`',
            "send half as much: `torch.autocast(..., dtype=torch.bfloat16)` in the step",
        ]
        return self.graded(
            f"ranks with parts of the same weights exchange results for {percent(exposed)} of a step",
            (exposed, self.warn, self.severe),
            evidence={"exposed": percent(exposed), "ranks of a team": degree, "hosts of a team": hosts},
            advice=advice,
            gain=exposed,
            ranks=analysis.ranks,
        )


def _hosts_of_one_team(analysis: Analysis) -> int:
    """On how many hosts the ranks are that have one partition of one copy: parts of the same weights."""
    teams: dict[tuple[int, int], set[str]] = defaultdict(set)
    for rank in analysis.ranks:
        facts = analysis.facts(rank)
        teams[facts.rdp_rank, facts.pp_rank].add(facts.host)
    return max(map(len, teams.values()), default=0)
