"""Where parts of a model may go: shared parameters, and units that are larger than a partition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from weft.check.finding import Finding, Grade
from weft.errors import PlacementError
from weft.graph import Graph
from weft.torch.split.by_hand import wishes
from weft.torch.tensors.marks import MARK
from weft.untrusted import listed

UNEVEN = 1.1
"""From so many even shares on a unit that cannot be cut is told of: times are measured, and never quite alike."""


def check_shared(model: nn.Module, partitions: int, line: int) -> Iterator[Finding]:
    """Modules that share a parameter: those that are put apart by hand, and those that the split keeps together."""
    if partitions < 2:
        return
    by_hand = any(MARK in module.__dict__ for module in model.modules())
    try:
        placed = wishes(model, 0, partitions) if by_hand else {}
    except PlacementError as error:
        yield Finding("placed_nowhere", Grade.WRONG, line, str(error), f"weft.partition({partitions - 1})")
        return
    for names in _shared(model):
        owners = [name.rpartition(".")[0] for name in names]
        apart = {placed[owner] for owner in owners if owner in placed}
        if len(apart) > 1:
            yield Finding(
                "shared_apart",
                Grade.WRONG,
                line,
                f"{listed(names, 4)} are one parameter, and its modules are put on the partitions "
                f"{listed(sorted(apart))}",
                f"weft.set_partition(model.get_submodule('{owners[-1]}'), {placed.get(owners[0], 0)})",
            )
        else:
            yield Finding(
                "shared_together",
                Grade.HINT,
                line,
                f"{listed(names, 4)} are one parameter, so their modules go to one partition, and what lies between "
                "them makes each microbatch come back to it",
                f"nothing; or a parameter of its own for {owners[-1] or 'the model'}, where the model allows it",
            )


def check_even(graph: Graph, partitions: int, line: int) -> Iterator[Finding]:
    """A unit, or units that must lie together, that takes more than an even share of the time."""
    times: dict[tuple[str, bool], float] = defaultdict(float)
    for unit in graph:
        times[(unit.group, True) if unit.group else (unit.name, False)] += unit.time_ms
    (name, tied), most = max(times.items(), key=lambda item: item[1])
    whole = sum(times.values())
    if partitions < 2 or whole <= 0 or most * partitions <= UNEVEN * whole:
        return
    what = listed((unit.name for unit in graph if unit.group == name), 4) if tied else name
    yield Finding(
        "unit_too_large",
        Grade.SLOW,
        line,
        f"{what} {'together take' if tied else 'takes'} {most / whole:.0%} of the time and cannot be cut, so no split "
        f"over {partitions} partitions is even",
        f'"partitions": {max(1, int(UNEVEN * whole / most))}; or make it of modules that run one after the other',
    )


def _shared(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that several modules have."""
    owners: dict[int, dict[int, str]] = defaultdict(dict)
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners[id(parameter)].setdefault(id(module), f"{module_name}.{name}" if module_name else name)
    return [[*names.values()] for names in owners.values() if len(names) > 1]
