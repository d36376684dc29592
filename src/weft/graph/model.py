"""The model as the partitioner sees it: units in program order with what each costs, and what flows.

A graph is measured by the frontend's trace (or described, or read from a file) and is all that the
partitioner needs to know: it holds no data and no module, and one rank can send it to another.

Its JSON form, of which everything but `name` and the four costs may be left out in a file written by hand:

    {"weft": "graph", "version": 1,
     "units": [{"name": "embedding", "forward_ms": 0.1, "backward_ms": 0.1, "parameter_bytes": 400,
                "activation_bytes": 0, "output_bytes": 64, "parameters": 100, "group": null,
                "input_ms": null, "weight_ms": null,
                "cut_share": 0.99, "cut_bytes": 64, "cut_ranks": 8, "cut_group": null,
                "transient_bytes": 64}, ...],
     "tensors": [{"from": "embedding", "to": ["block", "head"], "bytes": 64}, ...]}

Without `tensors` each unit's result (`output_bytes`) goes to the next unit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property

from weft.document import Document
from weft.errors import FormatError

VERSION = 1
LARGEST = 1e200
"""No cost is larger, so that sums of them are numbers."""

Flow = tuple[int, tuple[int, ...], int]
"""A tensor with units as numbers: (index of its source, indices of its targets ascending, bytes)."""


@dataclass(frozen=True)
class Unit:
    """The smallest piece that may be placed.

    Attributes:
        name: Its name in the model, unique in the graph.
        forward_ms: Time of its forward pass for one microbatch.
        backward_ms: Time of its backward pass for one microbatch.
        parameter_bytes: What its parameters take; a shared one counts in its first unit only.
        activation_bytes: What it keeps for the backward pass, for one microbatch.
        output_bytes: What its result takes, for one microbatch.
        parameters: How many numbers its parameters hold.
        group: Units of the same group must lie on the same partition.
        input_ms: Time of the backward pass for its inputs only; None if nobody measured it.
        weight_ms: Time of the backward pass for its weights only; None if nobody measured it.
        cut_share: The share of its parameters and work that ranks can divide among them (tensor parallelism).
        cut_bytes: What these ranks then add up in its forward pass, for one microbatch; backward as much.
        cut_ranks: Over how many ranks it can be cut; 1 if it cannot.
        cut_group: Units that ranks cut together, and that then lie on the same partition.
        transient_bytes: What its backward pass takes besides, while it runs: gradients of activations.
    """

    name: str
    forward_ms: float
    backward_ms: float
    parameter_bytes: int
    activation_bytes: int
    output_bytes: int = 0
    parameters: int = 0
    group: str | None = None
    input_ms: float | None = None
    weight_ms: float | None = None
    cut_share: float = 0.0
    cut_bytes: int = 0
    cut_ranks: int = 1
    cut_group: str | None = None
    transient_bytes: int = 0

    @property
    def halves_ms(self) -> tuple[float, float]:
        """Backward for the inputs and for the weights; where that was not measured, half of the backward each."""
        if self.input_ms is None or self.weight_ms is None:
            return self.backward_ms / 2, self.backward_ms / 2
        return self.input_ms, self.weight_ms

    @property
    def time_ms(self) -> float:
        """Forward and backward time together."""
        return self.forward_ms + self.backward_ms

    def plus_work(self, other: Unit) -> Unit:
        """This unit, if it does what the other does besides: times and activations of both, all else its own.

        >>> Unit("a", 1.0, 2.0, 400, 64).plus_work(Unit("b", 0.5, 1.0, 400, 32))
        Unit(name='a', forward_ms=1.5, backward_ms=3.0, parameter_bytes=400, activation_bytes=96, ...)
        """
        halves_known = self.input_ms is not None or other.input_ms is not None
        return replace(
            self,
            forward_ms=self.forward_ms + other.forward_ms,
            backward_ms=self.backward_ms + other.backward_ms,
            activation_bytes=self.activation_bytes + other.activation_bytes,
            transient_bytes=max(self.transient_bytes, other.transient_bytes),
            input_ms=(self.input_ms or 0.0) + (other.input_ms or 0.0) if halves_known else None,
            weight_ms=(self.weight_ms or 0.0) + (other.weight_ms or 0.0) if halves_known else None,
        )


@dataclass(frozen=True)
class Tensor:
    """A result that later units use: it makes a transfer where one of them lies elsewhere.

    Attributes:
        source: The unit that makes it.
        targets: The units that use it, all of them after `source` in the program.
        bytes: What it takes, for one microbatch.
    """

    source: str
    targets: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Graph:
    """Units in program order, and the tensors between them: a chain if none are given.

    >>> head = Unit("head", 1.0, 2.0, parameter_bytes=400, activation_bytes=64, group="embedding")
    >>> graph = Graph((Unit("embedding", 0.1, 0.1, 400, 0, output_bytes=64, group="embedding"), head))
    >>> graph.groups
    {'embedding': (0, 1)}
    >>> graph.tensors
    (Tensor(source='embedding', targets=('head',), bytes=64),)
    >>> Graph.from_json(graph.to_json()) == graph
    True
    """

    units: tuple[Unit, ...]
    tensors: tuple[Tensor, ...]

    def __init__(self, units: Iterable[Unit], tensors: Iterable[Tensor] | None = None) -> None:
        units = tuple(units)
        _check_units(units)
        if tensors is None:
            tensors = (
                Tensor(one.name, (other.name,), one.output_bytes) for one, other in itertools.pairwise(units)
            )
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "tensors", tuple(tensors))
        _check_tensors(self.tensors, self.index)

    def __len__(self) -> int:
        return len(self.units)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    @cached_property
    def index(self) -> dict[str, int]:
        """Where each unit stands in the program, by its name."""
        return {unit.name: index for index, unit in enumerate(self.units)}

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        """The tensors with units as numbers."""
        return tuple(
            (
                self.index[tensor.source],
                tuple(sorted({self.index[name] for name in tensor.targets})),
                tensor.bytes,
            )
            for tensor in self.tensors
        )

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each unit the units that use one of its results, ascending."""
        found: list[set[int]] = [set() for _ in self.units]
        for source, targets, _ in self.flows:
            found[source].update(targets)
        return tuple(tuple(sorted(targets)) for targets in found)

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Colocation groups: name to the indices of the units, ascending."""
        members: dict[str, list[int]] = {}
        for index, unit in enumerate(self.units):
            if unit.group is not None:
                members.setdefault(unit.group, []).append(index)
        return {name: tuple(indices) for name, indices in members.items()}

    def to_json(self) -> str:
        """The graph as text that `from_json` reads."""
        return json.dumps(
            {
                "weft": "graph",
                "version": VERSION,
                "units": [asdict(unit) for unit in self.units],
                "tensors": [
                    {"from": tensor.source, "to": list(tensor.targets), "bytes": tensor.bytes}
                    for tensor in self.tensors
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Graph:
        """Read what `to_json` wrote, or a file of that form; a fault is named by its path."""
        document = Document.parse(text, kind="graph", version=VERSION)
        document.only("weft", "version", "units", "tensors")
        units = map(_read_unit, document["units"])
        return cls(units, map(_read_tensor, document["tensors"]) if "tensors" in document else None)


_MEASURES = ("forward_ms", "backward_ms", "parameter_bytes", "activation_bytes", "output_bytes", "parameters")
_HALVES = ("input_ms", "weight_ms")
_CUTS = ("cut_share", "cut_bytes", "cut_ranks", "transient_bytes")
_FIELDS = tuple(field.name for field in fields(Unit))


def _check_units(units: tuple[Unit, ...]) -> None:
    seen: set[str] = set()
    for index, unit in enumerate(units):
        if unit.name in seen:
            raise FormatError(f'$.units[{index}].name: there is a unit "{unit.name}" already')
        seen.add(unit.name)
        for field in _MEASURES:
            _check_measure(index, unit, field)
        for field in _HALVES:
            if getattr(unit, field) is not None:
                _check_measure(index, unit, field)
        for field in _CUTS:
            _check_measure(index, unit, field)
        if unit.cut_share > 1 or unit.cut_ranks < 1:
            raise FormatError(
                f"$.units[{index}]: cut_share is {unit.cut_share} and cut_ranks {unit.cut_ranks} (unit {unit.name}): "
                "a share is at most 1, and there is at least 1 rank"
            )
        if (unit.input_ms is None) != (unit.weight_ms is None):
            has, lacks = _HALVES if unit.weight_ms is None else _HALVES[::-1]
            raise FormatError(
                f"$.units[{index}]: {has} is given without {lacks} (unit {unit.name}): give both, or none"
            )


def _check_measure(index: int, unit: Unit, field: str) -> None:
    value = getattr(unit, field)
    if not 0 <= value <= LARGEST:
        what = "negative" if value < 0 else f"not a number up to {LARGEST:g}"
        raise FormatError(f"$.units[{index}].{field}: {value} is {what} (unit {unit.name})")


def _check_tensors(tensors: tuple[Tensor, ...], index: dict[str, int]) -> None:
    for number, tensor in enumerate(tensors):
        path = f"$.tensors[{number}]"
        if tensor.source not in index:
            raise FormatError(f'{path}.from: there is no unit "{tensor.source}"')
        if not 0 <= tensor.bytes <= LARGEST:
            what = "negative" if tensor.bytes < 0 else f"not a number up to {LARGEST:g}"
            raise FormatError(f"{path}.bytes: {tensor.bytes} is {what}")
        for place, target in enumerate(tensor.targets):
            if target not in index:
                raise FormatError(f'{path}.to[{place}]: there is no unit "{target}"')
            if index[target] <= index[tensor.source]:
                raise FormatError(
                    f'{path}.to[{place}]: "{target}" does not come after "{tensor.source}", '
                    "but units stand in program order and tensors flow forwards"
                )


def _read_unit(record: Document) -> Unit:
    record.only(*_FIELDS)
    return Unit(
        name=record["name"].text(),
        forward_ms=record["forward_ms"].number(),
        backward_ms=record["backward_ms"].number(),
        parameter_bytes=record["parameter_bytes"].whole(),
        activation_bytes=record["activation_bytes"].whole(),
        output_bytes=record["output_bytes"].whole() if "output_bytes" in record else 0,
        parameters=record["parameters"].whole() if "parameters" in record else 0,
        group=_name(record, "group"),
        input_ms=_half(record, "input_ms"),
        weight_ms=_half(record, "weight_ms"),
        cut_share=record["cut_share"].number() if "cut_share" in record else 0.0,
        cut_bytes=record["cut_bytes"].whole() if "cut_bytes" in record else 0,
        cut_ranks=record["cut_ranks"].whole() if "cut_ranks" in record else 1,
        cut_group=_name(record, "cut_group"),
        transient_bytes=record["transient_bytes"].whole() if "transient_bytes" in record else 0,
    )


def _name(record: Document, name: str) -> str | None:
    return record[name].text() if name in record and record[name].value is not None else None


def _half(record: Document, name: str) -> float | None:
    return record[name].number() if name in record and record[name].value is not None else None


def _read_tensor(record: Document) -> Tensor:
    record.only("from", "to", "bytes")
    return Tensor(
        source=record["from"].text(),
        targets=tuple(target.text() for target in record["to"]),
        bytes=record["bytes"].whole(),
    )
