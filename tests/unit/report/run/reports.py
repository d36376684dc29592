"""Reports of made runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.analysis.plan.comparison import beside_plan
from weft.analysis.run import Device, Run, Sample, Unit
from weft.plan.measured.planned import Part, Planned
from weft.report.run.report import Report
from weft.rules.rule import judge
from weft.rules.table import RULES
from weft.rules.verdict import verdict

HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[2J\x00\"'`&{{data}}"
"""A name that would do harm if it were taken for anything but text."""
MS = 1e-3


def step_values(rank: int, step: int) -> dict[str, object]:
    """Every step uses more memory and has a lower loss; the tenth takes far longer."""
    values: dict[str, object] = {
        "memory_bytes": (100 + 10 * rank + step) << 20,
        "values": {"loss": 4.0 * math.exp(-step / 20)},
    }
    return {**values, "step_s": 0.5} if step == 10 else values


def samples(end_s: float, number: int = 20) -> tuple[Sample, ...]:
    """A machine of two cores and a GPU."""
    return tuple(
        Sample(
            end_s * place / number, (0.5, 0.7), memory_bytes=1 << 30, memory_limit_bytes=4 << 30, ours=0.4,
            read_rate=1000.0 * place, devices=(Device(0.25, 1 << 20, 1 << 30),),
        )
        for place in range(number)
    )  # fmt: skip


def made(name: str = "made", steps: int = 20, units: bool = True, **more: Any) -> Run:
    """Four partitions in milliseconds, of which the last takes 1.3 times as long."""
    defaults: dict[str, Any] = {
        "partitions": 4, "forward_s": MS, "backward_s": 2 * MS, "transfer_s": 0.05 * MS, "optimizer_s": MS,
        "slow": {3: 1.3}, "step_values": step_values,
    }  # fmt: skip
    own: Mapping[str, Any] = {**defaults, **more}
    partitions = own["partitions"]
    found = tuple(Unit(f"layers.{n}", n * partitions // 12, MS, 2 * MS) for n in range(12)) if units else ()
    run = Recorded(steps=steps, units=found, **own).run(name)
    return replace(run, samples={"node": samples(run.timeline.end_s)})


EXPECTED = Planned(33 * MS, (Part(8 * MS, 16 * MS, 64 << 20),) * 4)
"""What equal partitions without transfers would take of `made`."""


def report(run: Run, **more: Any) -> Report:
    """What all rules say of a run."""
    analysis = Analysis(run)
    more = {"plan": beside_plan(analysis), **more}
    return Report(analysis, verdict(judge(RULES, analysis)), RULES, **more)


def hostile() -> Run:
    """A run in which every name wants to do harm."""
    run = made(HOSTILE, steps=8)
    facts = {
        rank: replace(
            each, host=HOSTILE, device=HOSTILE, settings={**each.settings, HOSTILE: HOSTILE},
            versions={HOSTILE: HOSTILE}, units=tuple(replace(unit, name=HOSTILE + unit.name) for unit in each.units),
        )
        for rank, each in run.facts.items()
    }  # fmt: skip
    steps = {
        rank: tuple(replace(step, values={HOSTILE: float(step.step)}) for step in own)
        for rank, own in run.steps.items()
    }
    timeline = type(run.timeline)(
        replace(span, label=f"{HOSTILE}{span.label}") for span in run.timeline.spans
    )
    return replace(
        run,
        facts=facts,
        steps=steps,
        timeline=timeline,
        samples={HOSTILE: run.samples["node"]},
        warnings=(HOSTILE,),
    )
