"""Batch normalisation over few samples."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import number_of
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class SmallBatchNorm(Rule):
    """Does batch normalisation take its means over so few samples that they are noise?

    Each copy of the model, and each microbatch, is normalised for itself. The number of samples is the fact
    `batch_norm_samples` of the run.
    """

    least_steps = 0

    least: int = 16
    severe: int = 4

    def evaluate(self, analysis: Analysis) -> Finding:
        samples = number_of(analysis, "batch_norm_samples", 0)
        if not samples:
            return self.not_applicable("the model has no batch normalisation that is known")
        cut = number_of(analysis, "microbatches")
        advice = ["normalise over all copies: `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`"]
        if cut > 1:
            advice.append(
                f'cut the mini-batch into fewer: `"microbatches": {max(1, cut * samples // self.least)}`'
            )
        return self.graded(
            f"batch normalisation takes its means over {samples} samples",
            (-samples, -self.least, -self.severe),
            evidence={"samples": samples, "microbatches": cut},
            advice=advice,
            ranks=analysis.ranks,
        )
