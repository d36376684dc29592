"""Actions, costs and links to a timeline and peak memory: what a step would take, without running it."""

from __future__ import annotations

from weft.simulate.as_run import as_run
from weft.simulate.costs import FREE, Edge, Links, StageCost
from weft.simulate.engine import simulate
from weft.simulate.memory import peak_bytes
from weft.simulate.result import Idle, Simulation

__all__ = ["FREE", "Edge", "Idle", "Links", "Simulation", "StageCost", "as_run", "peak_bytes", "simulate"]
