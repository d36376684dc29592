"""Groups of a split model's parameters that are all-gathered at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from weft.torch.calls.interception import interceptor_of
from weft.torch.pytorch.private import is_compiled


class Place(NamedTuple):
    """Parameters that are whole while ``module`` runs. ``rest``: those that a unit has beside its layers."""

    name: str
    module: nn.Module
    rest: bool
    parameters: list[nn.Parameter]


def places_of(root: nn.Module, plan: Any, here: int) -> Iterator[Place]:
    """The layers of the units on partition ``here``, and what else these units have.

    Left out is a parameter that modules of two layers hold, one that code outside of its layer reads, one that a
    forward pass writes or casts (perhaps by ``weight.data``, which shows nowhere), one of which the step says if it
    needs a gradient, and all of a compiled module, whose code cannot be stood around.

    Args:
        root: The model, whose units' calls are intercepted, unless it is only looked at.
        plan: How it was split.
        here: This rank's partition.
    """
    modules = dict(root.named_modules())
    names = {module: name for name, module in modules.items()}
    holders = Counter(id(p) for module in names for p in module.parameters(recurse=False))
    readers: dict[int, set[nn.Module]] = defaultdict(set)
    for parameter, reader in plan.read:
        readers[id(root.get_parameter(parameter))].add(modules[reader])
    left = {
        id(root.get_parameter(name)) for name in (*plan.toggled, *plan.written, *plan.parameters, *plan.cast)
    }

    def place(name: str, module: nn.Module, inside: set[nn.Module], rest: bool) -> Place:
        held = Counter(id(p) for part in inside for p in part.parameters(recurse=False))
        mine = [
            parameter
            for parameter in module.parameters()
            if id(parameter) not in left
            and held[id(parameter)] == holders[id(parameter)]
            and readers[id(parameter)] <= inside
        ]
        return Place(name, module, rest, mine)

    layers = [block for block in blocks(root) if not is_compiled(block) or interceptor_of(block) is not None]
    for unit in plan.units:
        module = modules[unit.name]
        if unit.partition != here or getattr(interceptor_of(module), "compiled", False):
            continue
        inside = set(module.modules())
        rest = inside.copy()
        for layer in layers:
            if layer is not module and layer in inside and not is_compiled(layer):
                rest -= set(layer.modules())
                yield place(names[layer], layer, set(layer.modules()), rest=False)
        in_a_layer = any(module in set(layer.modules()) for layer in layers)
        yield place(unit.name, module, rest, rest=not in_a_layer)


def blocks(module: nn.Module) -> list[nn.Module]:
    """The parts whose parameters are gathered one part at a time: layers of a kind in a row.

    These are the elements of an ``nn.ModuleList`` or ``nn.Sequential`` whose class occurs there more than once. Layers
    that share a parameter with the rest of the model are left out. Parameters in none of the parts are gathered for the
    whole model at once.
    """
    holders = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
    found: list[nn.Module] = []
    for part in module.modules():
        if not isinstance(part, (nn.ModuleList, nn.Sequential)) or any(
            part in block.modules() for block in found
        ):
            continue
        kinds = Counter(type(child) for child in part)
        for child in dict.fromkeys(part):
            inside = Counter(id(p) for below in child.modules() for p in below.parameters(recurse=False))
            alone = all(holders[key] == count for key, count in inside.items())
            if (
                inside
                and alone
                and kinds[type(child)] > 1
                and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
            ):
                found.append(child)
    return found
