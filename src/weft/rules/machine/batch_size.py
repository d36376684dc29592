"""Mini-batches that leave the machine idle."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.analysis.series import quantile
from weft.rules.measures import devices, mean, percent, samples
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class BatchSize(Rule):
    """Would a larger mini-batch fit, since cores, GPUs and GPU memory are all rarely in use?

    The 95th percentiles of the last `window` moments, in per cent. Frameworks that take all memory at once have no
    answer here.
    """

    cpu_threshold_p95: float = 70.0
    gpu_threshold_p95: float = 70.0
    gpu_memory_threshold_p95: float = 70.0
    window: int = 500
    patience: int = 10

    def evaluate(self, analysis: Analysis) -> Finding:
        found = devices(analysis)
        if not found:
            return self.not_applicable("no GPU was measured")
        hosts = [each for each in samples(analysis) if each.cores][-self.window :]
        own = [
            each for each in (gpus[-self.window :] for gpus in found.values()) if len(each) >= self.patience
        ]
        if len(hosts) < self.patience or not own:
            return self.abstain(f"fewer than {self.patience} measures")
        cpu = quantile([mean(each.cores) for each in hosts], 0.95)
        gpu = max(
            quantile([each.busy for each in gpus if each.busy == each.busy] or [1.0], 0.95) for gpus in own
        )
        held = [
            [each.memory_bytes / each.memory_limit_bytes for each in gpus if each.memory_limit_bytes]
            for gpus in own
        ]
        if not all(held):
            return self.abstain("it is not known how much memory each GPU has")
        memory = max(quantile(shares, 0.95) for shares in held)
        evidence = {"cores": percent(cpu), "GPUs": percent(gpu), "GPU memory": percent(memory)}
        limits = (self.cpu_threshold_p95, self.gpu_threshold_p95, self.gpu_memory_threshold_p95)
        if any(100 * share >= limit for share, limit in zip((cpu, gpu, memory), limits, strict=True)):
            return self.passed("the machine is in use", **evidence)
        return self.warning(
            f"cores, GPUs and GPU memory are in use below {percent(max(cpu, gpu, memory))}",
            evidence=evidence,
            advice=["take a mini-batch twice as large: `DataLoader(..., batch_size=...)`, or fewer GPUs"],
        )
