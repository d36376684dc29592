"""Which unit uses which unit's results: one forward pass in which tensors remember where they were made.

A unit makes what it returns. What glue computes is made where its newest operand was made, as in a training run,
and whatever else it uses flows there. What depends on no unit (inputs, masks) is made everywhere and flows nowhere.

    x = embed(ids)          made by embed
    y = block(x)            made by block;  x flows from embed to block
    z = x + y               made by block:  y is newer
    head(z)                 z flows from block to head
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.graph import Graph
from weft.graph import Tensor as Flow
from weft.torch.pytorch.private import SLOT, call_of, no_torch_function
from weft.torch.pytorch.torch_functions import METADATA
from weft.torch.tensors.nested import replace

# Set on tensors while flows are watched: what made them.
Tensor._weft_made_by = None  # type: ignore[attr-defined]


@dataclass(eq=False)
class _Made:
    """One tensor: the number of the unit that made it, its size, and the units that used it."""

    unit: int
    bytes: int
    users: set[int] = field(default_factory=set)


class _Watch(TorchFunctionMode):
    """Sees the torch functions of glue, and the calls of units."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[_Made] = []
        self.inside = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside or func in METADATA:
            return result
        operands = origins((args, kwargs))
        if operands:
            unit = max(operand.unit for operand in operands)
            self.flow(operands, unit)
            self.make(result, unit, ())
        return result

    def flow(self, operands: Sequence[_Made], unit: int) -> None:
        for operand in operands:
            operand.users.add(unit)

    def make(self, result: Any, unit: int, known: Sequence[Tensor]) -> None:
        """`unit` made these tensors, but for those that it was given."""
        given = {id(tensor) for tensor in known}
        for tensor in tensors_in(result):
            old = tensor._weft_made_by  # type: ignore[attr-defined]
            if id(tensor) not in given and (old is None or old.unit != unit):
                made = _Made(unit, tensor.numel() * tensor.element_size())
                self.made.append(made)
                tensor._weft_made_by = made  # type: ignore[attr-defined]

    def calls(self, number: int, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Stands for a unit's call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return inner(*args, **kwargs)
            self.flow(origins((args, kwargs)), number)
            self.inside += 1
            try:
                result = inner(*args, **kwargs)
            finally:
                self.inside -= 1
            self.make(result, number, tensors_in((args, kwargs)))
            return result

        return call


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a nested structure, each once."""
    found: dict[int, Tensor] = {}

    def see(tensor: Tensor) -> Tensor:
        found[id(tensor)] = tensor
        return tensor

    with no_torch_function():
        replace(tree, see)
    return list(found.values())


def origins(tree: Any) -> list[_Made]:
    """What made the tensors of a nested structure, where a unit did."""
    made = (tensor._weft_made_by for tensor in tensors_in(tree))  # type: ignore[attr-defined]
    return [one for one in made if one is not None]


@contextmanager
def _attached(watch: _Watch, units: Sequence[nn.Module]) -> Iterator[None]:
    before = [module.__dict__.get(SLOT) for module in units]
    for number, module in enumerate(units):
        module.__dict__[SLOT] = watch.calls(number, call_of(module))
    try:
        yield
    finally:
        for module, inner in zip(units, before, strict=True):
            if inner is None:
                del module.__dict__[SLOT]
            else:
                module.__dict__[SLOT] = inner


def with_flows(graph: Graph, units: Sequence[nn.Module], run: Callable[[], Any]) -> Graph:
    """The graph with the tensors that flow between its units while `run` runs the model.

    Args:
        graph: Its units.
        units: The module of each unit of the graph.
        run: One forward pass.

    Tensors that would flow back to an earlier unit (of a module that is called several times) are left out.
    """
    watch = _Watch()
    with _attached(watch, units), watch:
        run()
    names = [unit.name for unit in graph]
    tensors = []
    for made in sorted(watch.made, key=lambda one: one.unit):
        users = [number for number in sorted(made.users) if number > made.unit]
        if users:
            tensors.append(Flow(names[made.unit], tuple(names[number] for number in users), made.bytes))
    return Graph(graph.units, tensors)
