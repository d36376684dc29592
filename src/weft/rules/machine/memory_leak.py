"""Memory that grows from step to step."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.analysis.series import trend
from weft.rules.rule import Finding, Rule
from weft.units import format_bytes


@dataclass(frozen=True)
class MemoryLeak(Rule):
    """Does a rank take more memory with every step?

    The slope is the median over all pairs of steps (Theil, Sen). It must be above `least_bytes` a step in each half
    of the run, since memory grows at the begin of every run, and have made `least_growth` of the first value. It is
    critical if the limit is reached within as many steps again as there were, times `soon`.
    """

    least_steps = 0
    loses_run = True
    explains = ("GPUMemoryIncrease", "MemoryHeadroom")

    least_bytes: int = 64 << 10
    least_growth: float = 0.05
    soon: float = 50.0
    patience: int = 20

    def evaluate(self, analysis: Analysis) -> Finding:
        series = {rank: [each.memory_bytes for each in analysis.steps(rank)] for rank in analysis.ranks}
        series = {rank: own for rank, own in series.items() if len(own) >= self.patience and all(own)}
        if not series:
            return self.abstain(f"fewer than {self.patience} steps with their memory")
        growing = {rank: rate for rank, own in series.items() if (rate := self._rate(own))}
        if not growing:
            return self.passed("the memory stays as it is")
        worst = max(growing, key=lambda rank: growing[rank])
        rate, own, limit = growing[worst], series[worst], analysis.facts(worst).limit_bytes
        evidence = {
            "grows by": f"{format_bytes(rate)} a step",
            "from": format_bytes(own[0]),
            "to": format_bytes(own[-1]),
        }
        text = f"rank {worst} takes {format_bytes(rate)} more with every step"
        left = (limit - own[-1]) / rate if limit else float("inf")
        if limit:
            evidence["full after"] = f"{max(0.0, left):.0f} more steps"
            text += f", and has no memory left in {max(0.0, left):.0f} steps"
        say = self.critical if left < self.soon * len(own) else self.warning
        return say(
            text,
            evidence=evidence,
            advice=[
                "keep numbers instead of tensors: `total += loss.item()`, `history.append(loss.detach().cpu())`",
                "look at lists, caches and hooks that grow with each step",
            ],
            ranks=sorted(growing),
        )

    def _rate(self, own: list[int]) -> float:
        """Bytes that a step adds; 0 if the memory does not grow in both halves."""
        middle = len(own) // 2
        rates = trend(own[:middle]).slope, trend(own[middle:]).slope
        enough = own[-1] - own[0] > self.least_growth * own[0]
        return trend(own).slope if min(rates) > self.least_bytes and enough else 0.0
