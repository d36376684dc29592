"""Too few or too many processes that load data."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from weft.analysis.analysis import Analysis
from weft.rules.data.waiting import data_wait
from weft.rules.hosts import Host, worst
from weft.rules.measures import percent
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class Dataloader(Rule):
    """Are there too few or too many processes that load data, for the cores that there are?

    Processes that the ranks started, in per cent of the host's cores. Few of them count only where training waits for
    data for `least_wait` of a step. Each host is judged by itself.
    """

    min_threshold: float = 70.0
    max_threshold: float = 200.0
    least_wait: float = 0.10
    least_samples: int = 4

    def evaluate(self, analysis: Analysis) -> Finding:
        return worst(self, analysis, lambda host: self._on(host, analysis))

    def _on(self, host: Host, analysis: Analysis) -> Finding:
        """The finding about one host."""
        found = [sample for sample in host.samples if sample.cores]
        if len(found) < self.least_samples:
            return self.abstain(f"{len(found)} measures of the host, it needs {self.least_samples}")
        loaders, cores = median(sample.loaders for sample in found), len(found[-1].cores)
        wait, _, rank = data_wait(analysis, host.ranks)
        evidence = {"loaders": round(loaders), "cores": cores, "waiting for data": percent(wait)}
        advice = [f"`DataLoader(..., num_workers={max(1, cores // len(host.ranks))})`"]
        if 100 * loaders > self.max_threshold * cores:
            return self.warning(
                f"{loaders:.0f} processes load data on {cores} cores", evidence=evidence, advice=advice,
                ranks=host.ranks,
            )  # fmt: skip
        if 100 * loaders < self.min_threshold * cores and wait > self.least_wait:
            return self.warning(
                f"training waits for data, and {loaders:.0f} processes load it on {cores} cores",
                evidence=evidence, advice=advice, ranks=[rank],
            )  # fmt: skip
        return self.passed("the loaders fit the cores", **evidence)
