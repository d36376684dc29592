"""Traces whose costs are counts of what was done, so that the splits of a job repeat on a busy machine."""

from __future__ import annotations

from weft.torch.trace.tracer import Tracer

TICK_S = 0.01


def count_costs() -> None:
    """From now on each look of a trace at the clock finds it `TICK_S` later."""
    ticks = 0

    def now(_: Tracer) -> float:
        nonlocal ticks
        ticks += 1
        return TICK_S * ticks

    Tracer.now = now  # type: ignore[method-assign]
