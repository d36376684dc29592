"""The use of the machines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.analysis.run import Sample
from weft.analysis.series import quantile
from weft.rules.measures import mean, percent
from weft.rules.rule import Finding, Rule
from weft.units import format_bytes


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
