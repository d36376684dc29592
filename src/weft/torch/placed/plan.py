"""The plan of a split model: which unit lies on which partition, and what ranks must know of the units."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from weft.graph.model import Unit
from weft.report.placement import ModelPlacement
from weft.report.text import PlacementRow
from weft.torch.context_parallel import Sequences
from weft.torch.execution.unit_call import FLOATING
from weft.torch.tensor_parallel import Splits
from weft.untrusted import shown


def is_below(name: str, module: str) -> bool:
    """True if a name lies in a module. The model itself has the empty name, and everything lies in it."""
    return name.startswith(f"{module}." if module else "")


COSTS = ("parameters", "parameter_bytes", "activation_bytes", "forward_ms", "backward_ms")
"""The costs of a unit that a plan has."""


DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Those that a plan may cast parameters to."""

EXPECTED = ("forward_s", "backward_s", "memory_bytes")
"""The expected work of a partition that a plan has."""


@dataclass(frozen=True)
class PlannedUnit:
    """One row of the plan.

    Attributes:
        unit: What the unit costs.
        partition: Where it goes; FLOATING for a module without state.
        cost: What it costs as a part of the whole, as the split weighs time and memory.
        writes: How often a microbatch calls it if it writes its buffers, else 0.
        stage: Which stage it is in, where partitions have several.
        traced: Whether the trace has called it.
        reads: Whether it may use what other units have put into lists, dicts and objects.
        hooks: Its forward hooks that run with it; see ``calls.own_hooks``.
        tied: Units of the same word must lie on one partition; empty for a unit that may lie anywhere.
    """

    unit: Unit
    partition: int
    cost: float = 0.0
    writes: int = 0
    stage: int | None = None
    traced: bool = True
    reads: bool = True
    hooks: tuple[str, ...] = ()
    tied: str = ""

    @property
    def name(self) -> str:
        """The name of the module in the model."""
        return self.unit.name

    def to_record(self) -> dict[str, Any]:
        """One flat row, as checkpoints have it since there are plans."""
        costs = {name: getattr(self.unit, name) for name in COSTS}
        costs |= {name: round(costs[name], 4) for name in ("forward_ms", "backward_ms")}
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "unit"}
        return {"name": self.name, **costs, **own}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PlannedUnit:
        """The unit that :meth:`to_record` gave; older rows have fewer values.

        Raises:
            TypeError: There is a value that no plan has.
        """
        own = {**record}  # a TypeError where a file has something else in the place of a row
        costs = {name: own.pop(name, 0) for name in COSTS}
        own["hooks"] = tuple(own.pop("hooks", ()))
        return cls(Unit(own.pop("name"), **costs), **own)


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
        written: Parameters that a forward pass writes.
        read: Parameters that a module reads which does not hold them, each with that module.
        optimize: The setting as it was decided; empty in plans of older checkpoints.
        memory_weight: The same of this setting.
        microbatches: The number of them that was decided with the places; 0 if the settings gave it.
        in_flight: How many microbatches a rank may hold.
        by_hand: The script has placed the units.
        planned: What a step is expected to take, as :class:`weft.plan.measured.planned.Planned` writes it.
        tensors: Which weights are cut over ranks, as :class:`weft.torch.tensor_parallel.Splits` writes it.
        sequences: Which modules compute on parts of sequences, as :class:`weft.torch.context_parallel.Sequences` writes
            it.
        experts: Which experts replicas share, as :class:`weft.torch.tensor_parallel.Splits` writes it.
        cast: The dtypes of parameters that the forward pass casts, by name: as it leaves them.
    """

    units: tuple[PlannedUnit, ...]
    parameters: dict[str, int]
    buffers: dict[str, int]
    numpy: bool
    chosen: dict[str, Any] | None = None
    attributes: tuple[tuple[str, str], ...] = ()
    serial: bool = False
    toggled: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    read: tuple[tuple[str, str], ...] = ()
    optimize: str = ""
    memory_weight: float = 0.0
    microbatches: int = 0
    in_flight: int = 1
    by_hand: bool = False
    planned: dict[str, Any] | None = None
    tensors: dict[str, Any] | None = None
    sequences: dict[str, Any] | None = None
    experts: dict[str, Any] | None = None
    cast: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        rows = tuple(unit.to_record() for unit in self.units)
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)} | {"units": rows})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        content = json.loads(text)
        content["units"] = tuple(map(PlannedUnit.from_record, content["units"]))
        content["attributes"] = tuple(map(tuple, content.get("attributes", ())))
        content["toggled"] = tuple(content.get("toggled", ()))
        content["written"] = tuple(content.get("written", ()))
        content["read"] = tuple(map(tuple, content.get("read", ())))
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
        if self.planned is not None:
            parts = self.planned["parts"]
            figures = [self.planned["step_s"], *(part[name] for part in parts for name in EXPECTED)]
            if len(parts) != partitions or not all(type(figure) in (int, float) for figure in figures):
                raise ValueError(f"its plan expects {shown(self.planned)} of {partitions} partitions")
        if type(self.microbatches) is not int or self.microbatches < 0:
            raise ValueError(f"its plan is for {shown(self.microbatches)} microbatches")
        if not all(dtype in DTYPES for dtype in self.cast.values()):
            raise ValueError(f"its plan casts parameters to {shown(sorted(map(str, self.cast.values())))}")
        if not all(type(unit.name) is str and type(unit.writes) is int for unit in self.units):
            raise ValueError("a unit of its plan has no name")
        for splits in (self.tensors, self.experts):
            if splits is not None:
                Splits.from_record(splits)
        if self.sequences is not None:
            Sequences.from_record(self.sequences)

    def modules(self) -> set[str]:
        """The names of all modules that it says something of."""
        names = {unit.name for unit in self.units}
        for splits in (self.tensors, self.experts):
            for region in Splits.from_record(splits).regions if splits is not None else ():
                names |= {region.name, *region.linears}
        if self.sequences is not None:
            names |= Sequences.from_record(self.sequences).regions.keys()
        return names

    @property
    def revisits(self) -> bool:
        """True if a microbatch comes back to a stage that it has left."""
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
        from weft.partition.cost import memory_bytes

        rows = [
            PlacementRow(
                row.name, row.partition, row.unit.parameters, row.unit.parameter_bytes, row.unit.forward_ms,
                row.unit.backward_ms, memory_bytes(row.unit, self.in_flight),
            )
            for row in self.units
            if row.partition != FLOATING
        ]  # fmt: skip
        return ModelPlacement(
            tuple(rows), partitions, "" if self.by_hand else self.optimize, microbatches,
            measured=bool(self.microbatches),
        )  # fmt: skip
