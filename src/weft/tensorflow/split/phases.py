"""From stages to phases: when, and on which partition, each operation of a step runs.

A microbatch goes through positions. With S stages there are

    0 ... S-1          the forward pass of stage 0 ... S-1        F
    S ... 2S-1         the backward pass of stage S-1 ... 0       B
    2S, 2S+1, ...      what is left, on every partition           the end of the step

Each of the first 2S belongs to the partition of its stage. An operation runs at the first position of its partition
at which all is there that it takes. So the step can be anything that TensorFlow can trace; its parts of the forward and
of the backward pass find their places, and whatever else it computes comes at the end.

Where a step does not go forward and then backward (a gradient that goes into the model again), there are no stages:
every position belongs to all partitions, and each value that crosses leads to the next position (`stages=()`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.errors import PlacementError
from weft.tensorflow.split.units import Units, variable_sets
from weft.tensorflow.trace.operations import Operation, Record

EVERYWHERE = -1
"""The partition of what every rank does for itself: effects on variables that belong to no model."""
BEFORE = -1
"""The position of what runs before all else: it takes nothing but the step's arguments."""


class NotInOrder(Exception):
    """The step does not go forward through the stages and then backward."""


@dataclass
class Phases:
    """When and where each operation runs.

    Attributes:
        stages: The partition of each stage; none where positions belong to all partitions.
        partitions: How many partitions there are.
        partition: Of each operation, :data:`EVERYWHERE` too; those that every rank may compute for itself have none.
        position: Of each operation.
        owner: The partition of each variable of a model; :data:`EVERYWHERE` for other variables.
        serial: Why one microbatch must be done before the next begins; empty if they may overlap.
        wanted: Of each result, the partition that needs it; :data:`EVERYWHERE` for all.
    """

    stages: tuple[int, ...]
    partitions: int
    partition: dict[int, int] = field(default_factory=dict)
    position: dict[int, int] = field(default_factory=dict)
    owner: dict[int, int] = field(default_factory=dict)
    serial: str = ""
    wanted: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The first position that belongs to every partition."""
        return 2 * len(self.stages)

    def at(self, position: int) -> int:
        """The partition that a position belongs to; :data:`EVERYWHERE` for all."""
        if not 0 <= position < self.end:
            return EVERYWHERE
        stages = len(self.stages)
        return self.stages[position] if position < stages else self.stages[2 * stages - 1 - position]

    def first(self, partition: int, least: int) -> int:
        """The first position from ``least`` on at which a partition may run something."""
        for position in range(max(least, 0), self.end):
            if self.at(position) == partition:
                return position
        return max(least, self.end)


def place_operations(
    record: Record,
    units: Units,
    partitions: int,
    stage_of_unit: Sequence[int],
    partition_of_unit: Sequence[int],
    stages: Sequence[int],
    known: Mapping[int, int] | None = None,
) -> Phases:
    """When and where each operation of a step runs.

    Args:
        record: The step.
        units: Its units.
        partitions: How many partitions there are.
        stage_of_unit: The stage of each unit.
        partition_of_unit: The partition of each unit.
        stages: The partition of each stage; none if the step does not go forward and then backward.
        known: The partition of each variable that has one already, by its number.

    Raises:
        NotInOrder: With ``stages``, where such stages cannot run the step.
        PlacementError: One operation uses variables that are on different partitions already.
    """
    phases = Phases(tuple(stages), partitions)
    phases.owner = _find_owners(record, units, partition_of_unit, known or {})
    for number in record.in_order():
        if number in units.replicated:
            continue
        operation = record.operations[number]
        unit = units.unit_of.get(number)
        if unit is not None:
            phases.partition[number] = partition_of_unit[unit]
            _place(record, phases, number, stage_of_unit[unit] if stages else 0)
            if stages and phases.position[number] != stage_of_unit[unit]:
                raise NotInOrder(operation.name)
            continue
        home, floor = _home(record, units, phases, operation)
        phases.partition[number] = home
        _place(record, phases, number, floor)
    _use_at_the_end(record, units, phases)
    phases.serial = _reason_to_wait(record, phases)
    phases.wanted = [
        phases.owner[next(iter(variables))] if len(variables) == 1 else EVERYWHERE
        for variables in record.gradients
    ]
    return phases


def _find_owners(
    record: Record, units: Units, partition_of_unit: Sequence[int], known: Mapping[int, int]
) -> dict[int, int]:
    """The partition of each variable; what no unit and no model has is everywhere."""
    found: dict[int, int] = {}
    for variables in variable_sets(record):
        places = {known[variable]: variable for variable in variables if variable in known}
        for unit in units.owners.get(variables[0], ())[:1]:
            places.setdefault(partition_of_unit[unit], variables[0])
        if len(places) > 1:
            shown = " and ".join(
                f"{record.variables[variable].name} (partition {at})"
                for at, variable in sorted(places.items())
            )
            raise PlacementError(
                f"one operation of the step uses {shown} at once, and an earlier step has put these on different "
                "partitions: call first the step that uses them together"
            )
        in_model = any(record.variables[variable].model for variable in variables)
        home = next(iter(places), 0 if in_model else EVERYWHERE)
        found |= dict.fromkeys(variables, home)
    return found


def _home(record: Record, units: Units, phases: Phases, operation: Operation) -> tuple[int, int]:
    """The partition of an operation outside of models, and the first position that it may have."""
    owner = next((phases.owner[variable] for variable in operation.reads), None)  # all of them have the same
    if owner == EVERYWHERE:
        return EVERYWHERE, 0
    floor = 0
    stages = len(phases.stages)
    source = operation.gradient_of
    if source >= 0 and source in phases.position:
        at = phases.position[source]
        floor = 2 * stages - 1 - at if 0 <= at < stages and source in units.unit_of else max(stages, at)
    if owner is not None:
        return owner, floor
    placed = [
        value for value in operation.inputs if phases.partition.get(value.operation, EVERYWHERE) != EVERYWHERE
    ]
    for value in placed:
        if not record.operations[value.operation].sendable[value.output]:
            return phases.partition[value.operation], floor
    if source >= 0 and phases.partition.get(source, EVERYWHERE) != EVERYWHERE:
        return phases.partition[source], floor
    if operation.partition >= 0:
        return operation.partition, floor
    if placed:
        latest = max(placed, key=lambda value: (phases.position[value.operation], record.size_of(value)))
        return phases.partition[latest.operation], floor
    return (phases.stages[0] if phases.stages else 0), floor


def _place(record: Record, phases: Phases, number: int, floor: int) -> None:
    """Give an operation its position: the first at which all that it takes is there."""
    operation, home = record.operations[number], phases.partition[number]
    least, placed = floor, False
    for value in operation.inputs:
        source = value.operation
        if source not in phases.position:
            continue
        there = phases.partition[source]
        at = phases.position[source]
        if there == home or there == EVERYWHERE:
            least = max(least, at)
        else:
            least = max(least, at + 1)
        placed |= there != EVERYWHERE or at > BEFORE
    for source in operation.controls:
        if phases.partition.get(source) == home and phases.position[source] > BEFORE:
            least, placed = max(least, phases.position[source]), True
    if home == EVERYWHERE:
        phases.position[number] = max(least, phases.end) if placed else BEFORE
    else:
        phases.position[number] = phases.first(home, least)


def _use_at_the_end(record: Record, units: Units, phases: Phases) -> None:
    """Let a variable of no model that is written at the end be read there, too, where nothing needs it before.

    A metric adds to what it has read: so its microbatches need not wait for each other.
    """
    positions, partitions = phases.position, phases.partition
    written = frozenset().union(*(each.writes for each in record.operations))
    after = record.users()
    for number, operation in enumerate(record.operations):
        for source in operation.controls:
            after[source].append(number)
    for variable in sorted(written):
        if phases.owner.get(variable) != EVERYWHERE:
            continue
        touching = [number for number in positions if variable in record.operations[number].reads]
        last = max((positions[number] for number in touching), default=BEFORE)
        moved: set[int] = set()
        todo = [number for number in touching if positions[number] < last]
        while todo:
            number = todo.pop()
            if number not in moved and positions.get(number, last) < last:
                moved.add(number)
                todo += after[number]
        if all(_may_wait(record, units, phases, number, moved) for number in moved):
            positions.update(dict.fromkeys(moved, last))
            partitions.update(dict.fromkeys(moved, EVERYWHERE))


def _may_wait(record: Record, units: Units, phases: Phases, number: int, moved: set[int]) -> bool:
    """True if every rank can run an operation at the end, with others that are moved there."""
    operation = record.operations[number]
    if number in units.unit_of or any(phases.owner[each] != EVERYWHERE for each in operation.reads):
        return False
    return all(
        value.operation in moved
        or phases.partition.get(value.operation, EVERYWHERE) == EVERYWHERE
        or record.operations[value.operation].sendable[value.output]
        for value in operation.inputs
    )


def _reason_to_wait(record: Record, phases: Phases) -> str:
    """Why microbatches must not overlap: a variable is written at one position and used at another."""
    touched: dict[int, set[int]] = {}
    written: set[int] = set()
    for number, at in phases.position.items():
        operation = record.operations[number]
        for variable in operation.reads:
            touched.setdefault(variable, set()).add(at)
        written |= operation.writes
    for variable in sorted(written):
        if len(touched.get(variable, ())) > 1:
            name = record.variables[variable].name or "a variable of the script"
            return f"{name} is written and read at different times of a microbatch"
    return ""
