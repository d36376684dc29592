"""Actions, costs and links to a timeline and peak memory: what a step would take, without running it."""

from __future__ import annotations

from weft.simulate.costs import FREE, Edge, Links, StageCost
from weft.simulate.engine import simulate
from weft.simulate.executed_order import executed_order
from weft.simulate.memory import peak_bytes
from weft.simulate.result import Idle, Simulation

as_run = executed_order
"""Its former name."""

__all__ = [
    "FREE",
    "Edge",
    "Idle",
    "Links",
    "Simulation",
    "StageCost",
    "executed_order",
    "peak_bytes",
    "simulate",
]
