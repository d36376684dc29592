"""Where the time of a step went."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from weft.analysis.analysis import Analysis
from weft.analysis.parts import Parts
from weft.rules.measures import percent, share
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class OverallFrameworkMetrics(Rule):
    """Into what does the time of a step go?

    The share of each part of a usual step, the mean over ranks; parts below `least` are left out. It never warns.
    """

    least: float = 0.02

    def evaluate(self, analysis: Analysis) -> Finding:
        shares = {name: share(analysis, attrgetter(name)) for name in Parts._fields}
        largest = max(shares, key=lambda name: shares[name])
        return self.info(
            f"of a step {percent(shares[largest])} is {largest.replace('_', ' ')}",
            evidence={
                name.replace("_", " "): percent(value)
                for name, value in shares.items()
                if value >= self.least
            },
        )
