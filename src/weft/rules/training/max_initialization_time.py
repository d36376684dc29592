"""A start that takes long."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import percent
from weft.rules.rule import Finding, Rule
from weft.units import format_seconds


@dataclass(frozen=True)
class MaxInitializationTime(Rule):
    """Does it take long until the first step begins?

    From the begin of the process to that of the first step, above `threshold` minutes. A large share of the run
    (`share`) is worth knowing.
    """

    least_steps = 0

    threshold: float = 20.0
    share: float = 0.20

    def evaluate(self, analysis: Analysis) -> Finding:
        found = {}
        for rank in analysis.ranks:
            facts, steps = analysis.facts(rank), analysis.run.steps.get(rank, ())
            if steps and facts.joined_s > facts.start_s:
                found[rank] = steps[0].start_s - facts.start_s
        if not found:
            return self.abstain("it is not known when the processes began")
        rank = max(found, key=lambda each: found[each])
        facts, last = analysis.facts(rank), analysis.run.steps[rank][-1]
        whole = last.start_s + last.step_s - facts.start_s
        share = found[rank] / whole if whole > 0 else 0.0
        text = f"the first step of rank {rank} began after {format_seconds(found[rank])}, {percent(share)} of the run"
        evidence = {
            "until weft.init had ended": format_seconds(facts.joined_s - facts.start_s),
            "until the first step": format_seconds(found[rank]),
            "share of the run": percent(share),
        }
        advice = ["keep what is loaded or built at the start in a cache, and read data as it is needed"]
        if found[rank] > 60 * self.threshold:
            return self.warning(text, evidence=evidence, advice=advice, ranks=[rank])
        if share > self.share:
            return self.info(text, evidence=evidence, ranks=[rank])
        return self.passed(text, **evidence)
