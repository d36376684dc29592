"""Answers of `weft plan` for the tests of its page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.report.run.reports import HOSTILE
from weft.graph.sizes import Sizes
from weft.machines.cluster import parse_cluster
from weft.plan.parallelism.answer import Answer, Asked, answer
from weft.plan.parallelism.job import Job

LARGE = Sizes(40, 5120, 40, 13824, 32000, 4096, gated=True, tied=False)
SMALL = Sizes(12, 768, 12, 3072, 32000, 1024)


def answered(
    cluster: str, sizes: Sizes = LARGE, batch: int = 1024, price: float | None = None, **more: Any
) -> Answer:
    """What `weft plan` finds."""
    machines = parse_cluster(cluster)
    machines = replace(machines, host=replace(machines.host, price_per_hour=price))
    precision = "bf16" if "bf16" in machines.host.accelerator.peak else "fp16"
    return answer(Asked(Job(sizes, batch, precision), machines, **more))


def usual() -> Answer:
    """13 billion parameters on four hosts, with everything that can be asked: its best has a pipeline."""
    machines = parse_cluster("4x8xA100-80")
    prices = {"SCRATCH_2": {"gib_month": 0.1}, "S3": {"gib_month": 0.02, "thousand_reads": 0.0004}}
    host = replace(machines.host, price_per_hour=20.0, storage_prices=prices)
    asked = Asked(
        Job(LARGE, 1024), replace(machines, host=host), tokens=10**11, data_bytes=100e9, epoch_s=30.0
    )
    found = answer(asked)
    assert found.search.best[0].division.pipeline > 1
    return found


def nothing() -> Answer:
    """The same on a single small device."""
    return answered("1xT4", replace(LARGE, layers=4), 8)


def single() -> Answer:
    """A small model on one device."""
    return answered("1xA100-80", SMALL, 32)


def hostile() -> Answer:
    """Machines whose names want to do harm."""
    machines = parse_cluster("2x8xA100-80")
    device = replace(machines.host.accelerator, name=HOSTILE)
    host = replace(machines.host, name=HOSTILE, accelerator=device)
    return answer(Asked(Job(SMALL, 64), replace(machines, host=host)))
