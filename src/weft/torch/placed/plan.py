"""The plan of a split model: which unit lies on which partition, and what ranks must know of the units."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from weft.foreign import shown
from weft.partition.cost import COPIES
from weft.report.placement import ModelPlacement
from weft.report.text import PlacementRow
from weft.torch.execution.unit_call import FLOATING


def is_below(name: str, module: str) -> bool:
    """Whether a name lies in a module. The model itself has the empty name, and everything lies in it."""
    return name.startswith(f"{module}." if module else "")


@dataclass(frozen=True)
class PlannedUnit:
    """One row of the plan.

    ``partition``: FLOATING for a module without state. ``writes``: how often a microbatch calls a unit that writes its
    buffers, else 0. ``stage``: the unit's stage, where partitions have several. ``traced``: the trace has called the
    unit.
    """

    name: str
    partition: int
    parameters: int = 0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    cost: float = 0.0
    writes: int = 0
    stage: int | None = None
    traced: bool = True


@dataclass(frozen=True)
class Plan:
    """The places of a model's parts.

    Args:
        units: The units in the order of the program.
        parameters: The partitions of parameters that opened modules use themselves, by name.
        buffers: The partitions of buffers that the model writes, by name.
        numpy: Whether the step draws from NumPy's global random state.
        chosen: The schedule that was chosen with the places, as :class:`weft.plan.chosen.Chosen` writes it.
        attributes: Attributes of modules, by module and name, that each microbatch has for itself.
        serial: A microbatch begins when the microbatch before has ended.
        toggled: Parameters of which the step says whether they need gradients.
        optimize: The setting as it was decided; empty in plans of older checkpoints.
        memory_weight: The same of this setting.
        in_flight: How many microbatches a rank may hold.
        by_hand: The script has placed the units.
    """

    units: tuple[PlannedUnit, ...]
    parameters: dict[str, int]
    buffers: dict[str, int]
    numpy: bool
    chosen: dict[str, Any] | None = None
    attributes: tuple[tuple[str, str], ...] = ()
    serial: bool = False
    toggled: tuple[str, ...] = ()
    optimize: str = ""
    memory_weight: float = 0.0
    in_flight: int = 1
    by_hand: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        content = json.loads(text)
        content["units"] = tuple(PlannedUnit(**unit) for unit in content["units"])
        content["attributes"] = tuple(map(tuple, content.get("attributes", ())))
        content["toggled"] = tuple(content.get("toggled", ()))
        return cls(**content)

    def check(self, partitions: int) -> None:
        """Refuse a plan, read from a file, that is none for so many partitions.

        Raises:
            ValueError: A place is no partition, or a unit has no name.
        """
        places = [unit.partition for unit in self.units if unit.partition != FLOATING]
        for at in (*places, *self.parameters.values(), *self.buffers.values()):
            if type(at) is not int or not 0 <= at < partitions:
                raise ValueError(f"a unit of its plan is on the partition {shown(at)} of {partitions}")
        if not all(type(unit.name) is str and type(unit.writes) is int for unit in self.units):
            raise ValueError("a unit of its plan has no name")

    @property
    def revisits(self) -> bool:
        """Whether a microbatch comes back to a stage that it has left."""
        visits = [unit.stage for unit in self.units if unit.partition != FLOATING]
        stages = [at for at, before in zip(visits, [None, *visits], strict=False) if at != before]
        return len(stages) > len(set(stages))

    def elsewhere(self, partition: int) -> list[str]:
        """The units of other partitions."""
        return [unit.name for unit in self.units if unit.partition not in (partition, FLOATING)]

    def owners(self, root: nn.Module) -> dict[str, int]:
        """The partition of every parameter, of units' buffers and of buffers that the model writes, by every name."""
        found: dict[str, int] = {}
        by_id: dict[int, int] = {}
        places = {unit.name: unit.partition for unit in self.units if unit.partition != FLOATING}
        named = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            at = {**self.parameters, **self.buffers}.get(name)
            above = name
            while at is None and above:
                above = above.rpartition(".")[0]
                at = places.get(above)
            if at is not None:
                found[name] = by_id.setdefault(id(tensor), at)
        for name, tensor in named:
            if name not in found and id(tensor) in by_id:
                found[name] = by_id[id(tensor)]
        return found

    def changing_buffers(self, owners: dict[str, int]) -> set[str]:
        """The names of buffers that the model writes: only the owner of such a buffer knows what it holds."""
        writers = [unit.name for unit in self.units if unit.writes and unit.partition != FLOATING]
        return {
            name for name in owners if name in self.buffers or any(is_below(name, unit) for unit in writers)
        }

    def placement(self, partitions: int, microbatches: int) -> ModelPlacement:
        """The places of the units as tables for people."""
        rows = [
            PlacementRow(
                u.name, u.partition, u.parameters, u.parameter_bytes, u.forward_ms, u.backward_ms,
                COPIES * u.parameter_bytes + self.in_flight * u.activation_bytes,
            )
            for u in self.units
            if u.partition != FLOATING
        ]  # fmt: skip
        return ModelPlacement(tuple(rows), partitions, "" if self.by_hand else self.optimize, microbatches)
