"""GPU memory that grows."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from weft.analysis.analysis import Analysis
from weft.analysis.series import trend
from weft.rules.measures import devices
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class GPUMemoryIncrease(Rule):
    """Does the memory in use on a GPU grow while the job trains?

    The median of the last `window` moments by that of the first ones, in per cent points of the GPU's memory, if the
    second half still grows.
    """

    increase: float = 5.0
    window: int = 10
    patience: int = 40

    def evaluate(self, analysis: Analysis) -> Finding:
        found = devices(analysis)
        if not found:
            return self.not_applicable("no GPU was measured")
        used = {
            name: [
                100 * each.memory_bytes / each.memory_limit_bytes for each in own if each.memory_limit_bytes
            ]
            for name, own in found.items()
        }
        known = {name: own for name, own in used.items() if len(own) >= max(self.patience, 2 * self.window)}
        if not known:
            return self.abstain(f"each GPU has fewer than {self.patience} measures")
        grown = {
            name: median(own[-self.window :]) - median(own[: self.window]) for name, own in known.items()
        }
        worst = max(grown, key=lambda name: grown[name])
        later = known[worst][len(known[worst]) // 2 :]
        evidence = {name: f"{points:+.1f} points" for name, points in grown.items()}
        if grown[worst] <= self.increase or trend(later).slope <= 0:
            return self.passed("the memory in use stays as it is", **evidence)
        return self.warning(
            f"the memory of {worst} grew by {grown[worst]:.1f} per cent points and still grows",
            evidence=evidence,
            advice=["keep no tensors of a step beyond it: `total += loss.item()` instead of `total += loss`"],
        )
