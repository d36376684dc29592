"""What can be done about a partition that takes longer than the others."""

from __future__ import annotations

from weft.analysis.analysis import Analysis
from weft.analysis.run import Unit


def lighten(analysis: Analysis, partition: int, work: dict[int, float]) -> list[str]:
    """Lines that move work away from a partition; with the names of units where those are known."""
    if unit := _at_the_border(analysis, partition, work):
        name, target = unit
        found = [
            f'move `{name}` from partition {partition} to {target}: `"auto_partition": false`, and '
            f'`weft.set_partition(model.get_submodule("{name}"), {target})`'
        ]
    else:
        found = [f"move modules from partition {partition} to others"]
    if analysis.setting("auto_partition") is False:
        return ['let weft split the model: `"auto_partition": true`', *found]
    return [*found, 'if the split balances memory, balance time: `"optimize": "speed"`']


def _at_the_border(analysis: Analysis, partition: int, work: dict[int, float]) -> tuple[str, int] | None:
    """The unit that moves to the lighter neighbour, of those whose move makes the larger of both less."""
    units = next((facts.units for facts in analysis.run.facts.values() if facts.units), ())
    own = [unit for unit in units if unit.partition == partition]
    neighbours = [other for other in (partition - 1, partition + 1) if other in work]
    if len(own) < 2 or not neighbours:
        return None
    target = min(neighbours, key=lambda other: work[other])
    unit = own[0] if target < partition else own[-1]
    times = work[partition] / (sum(map(_cost, own)) or 1.0)
    if work[target] + times * _cost(unit) >= work[partition]:
        return None
    return unit.name, target


def _cost(unit: Unit) -> float:
    return unit.forward_s + unit.backward_s
