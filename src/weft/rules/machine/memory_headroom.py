"""Memory that is nearly full."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import number_of, percent
from weft.rules.rule import Finding, Rule
from weft.units import format_bytes


@dataclass(frozen=True)
class MemoryHeadroom(Rule):
    """Is a rank close to the most memory that it may have?

    The measure is the largest peak of all steps, by the rank's limit.
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
