"""Rules about processors and GPUs: do they work, and for this job?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.analysis.run import Sample
from weft.analysis.series import quantile
from weft.rules.measures import (
    LOSSES,
    Host,
    core_losses,
    core_time,
    devices,
    mean,
    percent,
    queue,
    samples,
    share,
    while_training,
    worst,
)
from weft.rules.rule import Finding, Rule
from weft.units import format_bytes


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


@dataclass(frozen=True)
class CPUBottleneck(Rule):
    """Does the host's own time, Python and the script, keep the devices waiting?

    Two measures: the share of a step that is the host's own (`host_warn`, `host_severe`); and, with GPUs, the moments
    in per cent (`threshold`) in which the busiest core is above `cpu_threshold` while the GPUs' mean is below
    `gpu_threshold` per cent, on the host with most of them.
    """

    explains = ("LowGPUUtilization",)

    threshold: float = 50.0
    cpu_threshold: float = 90.0
    gpu_threshold: float = 10.0
    patience: int = 10
    host_warn: float = 0.10
    host_severe: float = 0.20

    def evaluate(self, analysis: Analysis) -> Finding:
        host = share(analysis, lambda parts: parts.host)
        measured = [
            [each for each in own if each.devices and each.cores] for own in while_training(analysis).values()
        ]
        stuck = max(
            (mean(map(self._stuck, own)) for own in measured if len(own) >= self.patience), default=0.0
        )
        evidence = {"host": f"{percent(host)} of a step"}
        text = f"Python and the script take {percent(host)} of a step"
        if 100 * stuck > self.threshold:
            evidence["moments with a full core and idle GPUs"] = percent(stuck)
            text += f", and in {percent(stuck)} of all moments a core is full while GPUs are idle"
        return self.graded(
            text,
            (host, self.host_warn, self.host_severe),
            (100 * stuck, self.threshold, 100.0),
            evidence=evidence,
            advice=[
                "take out of the loop what waits for numbers each step: `.item()`, `print`, metrics",
                "make each call larger: fewer microbatches, or `torch.compile`",
            ],
            gain=analysis.what_if.gain("no host gaps"),
            ranks=analysis.ranks,
        )

    def _stuck(self, sample: Sample) -> bool:
        idle = 100 * mean(gpu.busy for gpu in sample.devices) < self.gpu_threshold
        return idle and 100 * max(sample.cores) > self.cpu_threshold


@dataclass(frozen=True)
class LowGPUUtilization(Rule):
    """Are GPUs rarely busy, or busy now and then only?

    Of the last `window` moments of each GPU: a 95th percentile below `threshold_p95` per cent is low; above it, a 5th
    percentile below `threshold_p5` shows that it fluctuates. A kernel that waits for another GPU counts as busy.
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


@dataclass(frozen=True)
class OtherProcesses(Rule):
    """Do processes outside of the job take cores that it needs?

    Their share of all cores' time, where it is at least `others`, more threads want to run than there are cores, the
    ranks are busy for longer than the processor time they got, and for each second of that they lost their cores at
    least `losses` times. It is a warning at most, and hides no other fault.
    """

    explains = (
        "CPUBottleneck", "StepOutlier", "PipelineBubble", "TransferExposed", "AllReduceExposed",
        "LoadBalancing",
    )  # fmt: skip

    warn: float = 0.15
    others: float = 0.20
    losses: float = LOSSES
    least_samples: int = 4

    def evaluate(self, analysis: Analysis) -> Finding:
        return worst(self, analysis, lambda host: self._on(host, analysis))

    def _on(self, host: Host, analysis: Analysis) -> Finding:
        """The finding about one host."""
        found = host.samples
        had = [share for rank in host.ranks if (share := core_time(analysis, rank)) is not None]
        if len(found) < self.least_samples or not had:
            return self.abstain(f"{len(found)} measures of the host, and {len(had)} ranks' processor times")
        taken, waiting, lost = mean(each.others for each in found), mean(map(queue, found)), 1 - mean(had)
        evidence = {
            "other processes take": f"{percent(taken)} of all cores",
            "threads that want to run": f"{waiting:.1f} a core",
            "work without its core": percent(lost),
            "cores lost for a second of that": f"{(times := core_losses(analysis, host.ranks)):.0f} times",
        }
        if taken < self.others or waiting <= 1.0 or lost <= self.warn or times < self.losses:
            return self.passed("other processes leave cores for the job", **evidence)
        return self.warning(
            f"processes outside of the job take {percent(taken)} of the cores, and training had none for "
            f"{percent(lost)} of its work",
            evidence=evidence,
            advice=[
                "end them or move them: `top` names them",
                "keep the job on cores of its own (`taskset`)",
            ],
            ranks=host.ranks,
        )


@dataclass(frozen=True)
class OverallSystemUsage(Rule):
    """Were cores, GPUs, memory, disks and the network of each host used?

    For each its largest value, and its 99th, 95th and 50th percentile. It never warns.
    """

    least_steps = 0

    def evaluate(self, analysis: Analysis) -> Finding:
        hosts = {host: own for host, own in sorted(analysis.run.samples.items()) if own}
        if not hosts:
            return self.abstain("no host was measured")
        evidence: dict[str, object] = {}
        for host, own in hosts.items():
            evidence |= {f"{host}: {name}": text for name, text in _table(own).items()}
        return self.info(f"hosts that were measured: {len(hosts)}", evidence=evidence)


def _table(own: tuple[Sample, ...]) -> dict[str, str]:
    """For each measure of a host its percentiles."""
    shares = {
        "cores": [mean(each.cores) for each in own],
        "waiting for disks": [each.io_wait for each in own],
        "memory": [each.memory_bytes / each.memory_limit_bytes for each in own if each.memory_limit_bytes],
        "GPUs": _means([gpu.busy for gpu in each.devices if gpu.busy == gpu.busy] for each in own),
        "GPU memory": _means(
            [gpu.memory_bytes / gpu.memory_limit_bytes for gpu in each.devices if gpu.memory_limit_bytes]
            for each in own
        ),
    }
    rates = {
        "read": [each.read_rate for each in own],
        "written": [each.write_rate for each in own],
        "sent": [each.sent_rate for each in own],
        "received": [each.received_rate for each in own],
    }
    found = {
        name: _row([percent(value) for value in _points(values)]) for name, values in shares.items() if values
    }
    return found | {
        name: _row([f"{format_bytes(value)}/s" for value in _points(values)])
        for name, values in rates.items()
    }


def _means(moments: Iterable[list[float]]) -> list[float]:
    """The mean over GPUs at each moment at which it is known."""
    return [mean(shares) for shares in moments if shares]


def _points(values: list[float]) -> list[float]:
    return [max(values), *(quantile(values, share) for share in (0.99, 0.95, 0.5))]


def _row(texts: list[str]) -> str:
    return "max {}, p99 {}, p95 {}, p50 {}".format(*texts)
