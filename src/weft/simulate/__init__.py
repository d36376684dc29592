"""Actions, costs and links to a timeline and peak memory: what a step would take, without running it."""

from __future__ import annotations

from weft.simulate.costs import FREE, Edge, Links, StageCost
from weft.simulate.memory import peak_bytes
from weft.simulate.result import Idle, Simulation
from weft.simulate.step import as_weft_runs, executed_order, simulate

as_run = executed_order
"""Its former name."""

__all__ = [
    "FREE",
    "Edge",
    "Idle",
    "Links",
    "Simulation",
    "StageCost",
    "as_weft_runs",
    "executed_order",
    "peak_bytes",
    "simulate",
]
