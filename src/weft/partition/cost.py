"""The cost of a unit: a weighted sum of memory and time.

    cost(u) = w * memory(u) / memory(all) + (1 - w) * time(u) / time(all)        w = memory_weight

    memory(u) = 4 * parameter bytes + in_flight * activation bytes
    time(u)   = forward + backward

The factor 4 stands for the parameters, their gradients and the two moments of an Adam-like optimizer.
The costs of a graph add up to 1, unless it has neither memory nor time.
"""

from __future__ import annotations

from weft.errors import ConfigError
from weft.graph.model import Graph, Unit

COPIES = 4
"""Parameters, gradients and two optimizer moments."""


def memory_bytes(unit: Unit, in_flight: int = 1, copies: int = COPIES) -> int:
    """The memory of a unit while `in_flight` microbatches wait for their backward pass."""
    return copies * unit.parameter_bytes + in_flight * unit.activation_bytes


def unit_costs(graph: Graph, memory_weight: float, in_flight: int = 1) -> list[float]:
    """The cost of each unit of `graph`.

    A graph without memory is weighed by time alone, one without time by memory alone, and one with
    neither by the number of units.

    >>> units = (Unit("a", 1.0, 2.0, 300, 0), Unit("b", 0.5, 0.5, 100, 0))
    >>> unit_costs(Graph(units), memory_weight=0.5)
    [0.75, 0.25]
    """
    return [memory + time for memory, time in zip(*cost_shares(graph, memory_weight, in_flight), strict=True)]


def cost_shares(
    graph: Graph, memory_weight: float, in_flight: int = 1, copies: int = COPIES
) -> tuple[list[float], list[float]]:
    """The two parts of each unit's cost: by memory and by time."""
    if not 0.0 <= memory_weight <= 1.0:
        raise ConfigError(f"memory_weight is {memory_weight}, it must be a number from 0 to 1")
    memory = [float(memory_bytes(unit, in_flight, copies)) for unit in graph]
    time = [unit.time_ms for unit in graph]
    if not sum(memory) and not sum(time):
        return [0.0] * len(graph), [1.0 / len(graph) for _ in graph]
    weight = memory_weight if sum(memory) and sum(time) else float(bool(sum(memory)))
    return _shares(memory, weight), _shares(time, 1.0 - weight)


def _shares(values: list[float], weight: float) -> list[float]:
    total = sum(values)
    return [weight * (value / total) if total else 0.0 for value in values]
