"""GPUs that are rarely busy."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.analysis.series import quantile
from weft.rules.measures import devices, percent
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class LowGPUUtilization(Rule):
    """Are GPUs rarely busy, or busy now and then only?

    Of the last `window` moments of each GPU: a 95th percentile below `threshold_p95` per cent is low; above it, a
    5th percentile below `threshold_p5` shows that it fluctuates. This is the share of time in which any kernel ran,
    also one that waits for another GPU.
    """

    threshold_p95: float = 70.0
    threshold_p5: float = 10.0
    window: int = 500
    patience: int = 10

    def evaluate(self, analysis: Analysis) -> Finding:
        found = devices(analysis)
        if not found:
            return self.not_applicable("no GPU was measured")
        busy = {
            name: [each.busy for each in own if each.busy == each.busy][-self.window :]
            for name, own in found.items()
        }
        known = {name: own for name, own in busy.items() if len(own) >= self.patience}
        if not known:
            return self.abstain(f"each GPU has fewer than {self.patience} measures")
        high = {name: quantile(own, 0.95) for name, own in known.items()}
        low = {name: quantile(own, 0.05) for name, own in known.items()}
        evidence = {name: f"p95 {percent(high[name])}, p5 {percent(low[name])}" for name in known}
        unused = [name for name, own in known.items() if max(own) == 0]
        under = [name for name in known if 100 * high[name] < self.threshold_p95 and name not in unused]
        swings = [
            name for name in known if name not in under + unused and 100 * low[name] < self.threshold_p5
        ]
        parts = [
            f"{', '.join(names)} {word}"
            for names, word in (
                (unused, "never ran"),
                (under, "is rarely busy"),
                (swings, "is busy now and then"),
            )
            if names
        ]
        if not parts:
            return self.passed("the GPUs are busy", **evidence)
        say = self.warning if unused or under else self.info
        return say(
            "; ".join(parts),
            evidence=evidence,
            advice=[
                "see the findings about bubbles, waiting and data; if there is none, take larger mini-batches"
            ],
        )
