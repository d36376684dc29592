"""Batch normalisation over few samples."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import number_of
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class SmallBatchNorm(Rule):
    """Does batch normalisation take its means over so few samples that they are noise?

    Each replica, and each microbatch, is normalised for itself, but for `SyncBatchNorm` over all copies. The
    number of samples is that of the first mini-batch.
    """

    least_steps = 0

    least: int = 16
    severe: int = 4

    def evaluate(self, analysis: Analysis) -> Finding:
        samples = number_of(analysis, "batch_norm_samples", 0)
        if any("TensorFlow" in facts.versions for facts in analysis.run.facts.values()):
            return self.not_applicable("with TensorFlow the samples of batch normalisation are not recorded")
        if not samples:
            return self.not_applicable("no batch normalisation trained")
        cut = number_of(analysis, "microbatches")
        copies = 1 + max((analysis.facts(rank).rdp_rank for rank in analysis.ranks), default=0)
        advice = ["give each step a larger mini-batch"]
        if copies > 1:
            advice.insert(0, "normalise over all copies: `weft.convert_sync_batchnorm(model)`")
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
