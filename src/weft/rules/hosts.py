"""Hosts one by one: the mean over many would hide the one that is overloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from weft.analysis.analysis import Analysis
from weft.analysis.run import Sample
from weft.rules.measures import while_training
from weft.rules.rule import Finding, Rule, Status


class Host(NamedTuple):
    """A host with its measures while the job trained, by time, and the ranks that it runs."""

    name: str
    samples: list[Sample]
    ranks: tuple[int, ...]


WORST_FIRST = (
    Status.CRITICAL, Status.WARNING, Status.INFO, Status.PASS, Status.NOT_ENOUGH_DATA, Status.NOT_APPLICABLE,
)  # fmt: skip


def hosts(analysis: Analysis) -> list[Host]:
    """Those that were measured and run ranks; a single one runs all, whatever they are called."""
    measured = while_training(analysis)
    found = [
        Host(name, own, tuple(rank for rank in analysis.ranks if analysis.facts(rank).host == name))
        for name, own in measured.items()
    ]
    if len(found) == 1:
        found = [found[0]._replace(ranks=analysis.ranks)]
    return [host for host in found if host.ranks]


def worst(rule: Rule, analysis: Analysis, judge: Callable[[Host], Finding]) -> Finding:
    """The finding of a rule on the host with the worst one; of several that with the largest gain, which is named."""
    every = hosts(analysis)
    found = [(judge(host), host) for host in every]
    if not found:
        return rule.abstain("no host was measured")
    finding, host = min(found, key=lambda each: (WORST_FIRST.index(each[0].status), -(each[0].gain or 0.0)))
    named = len(every) > 1 and finding.text
    return replace(finding, text=f"{finding.text}, on {host.name}") if named else finding
