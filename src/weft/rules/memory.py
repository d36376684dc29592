"""Rules about memory that is nearly full, or that grows."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from weft.analysis.analysis import Analysis
from weft.analysis.series import trend
from weft.rules.measures import devices, number_of, percent
from weft.rules.rule import Finding, Rule
from weft.units import format_bytes


@dataclass(frozen=True)
class MemoryHeadroom(Rule):
    """Is a rank close to the most memory that it may have?

    The largest peak of all steps, by the rank's limit.
    """

    least_steps = 0
    loses_run = True

    warn: float = 0.90
    severe: float = 0.97

    def evaluate(self, analysis: Analysis) -> Finding:
        peaks = {
            rank: max((step.memory_bytes for step in analysis.run.steps.get(rank, ())), default=0)
            for rank in analysis.ranks
            if analysis.facts(rank).limit_bytes > 0
        }
        peaks = {rank: peak for rank, peak in peaks.items() if peak}
        if not peaks:
            return self.abstain("either no rank's limit or no step's memory is known")
        shares = {rank: peak / analysis.facts(rank).limit_bytes for rank, peak in peaks.items()}
        worst = max(shares, key=lambda rank: shares[rank])
        advice = [
            "compute activations anew: `weft.set_activation_checkpointing(model.layers)`",
            'balance memory instead of time: `"optimize": "memory"`',
        ]
        if (active := number_of(analysis, "active_microbatches", 0)) > 1:
            advice.append(f'hold fewer microbatches at once: `"active_microbatches": {active - 1}`')
        return self.graded(
            f"rank {worst} took {format_bytes(peaks[worst])}, {percent(shares[worst])} of what it may have",
            (shares[worst], self.warn, self.severe),
            evidence={
                f"rank {rank}": f"{format_bytes(peaks[rank])}, {percent(shares[rank])}" for rank in peaks
            },
            advice=advice,
            ranks=[rank for rank, share in shares.items() if share > self.warn],
        )


@dataclass(frozen=True)
class MemoryLeak(Rule):
    """Does a rank take more memory with every step?

    The slope is the median over all pairs of steps (Theil, Sen). It must be above `least_bytes` a step in each half of
    the run, and have made `least_growth` of the first value. It is critical if the limit is reached within `soon` times
    as many steps as there were.
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
