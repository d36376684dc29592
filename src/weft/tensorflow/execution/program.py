"""The program of each rank for one step: phases in an order, what goes into each, what comes out, what is sent.

A *phase* is all that a rank runs at one position of a microbatch: the forward pass of a stage, say. A value goes to a
rank once, when it is made; the rank takes it when its first phase begins that uses it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.errors import PlacementError
from weft.schedule.schedule import Action
from weft.tensorflow.split.phases import BEFORE, EVERYWHERE, Phases
from weft.tensorflow.trace.operations import Record, Value


@dataclass
class Phase:
    """The operations of a rank at one position of a microbatch.

    Attributes:
        position: The position.
        operations: Its operations in order, with those that every rank computes for itself where it needs them.
        feeds: The arguments of the step, and values from outside, that it takes.
        inputs: The values of other phases that it takes.
        outputs: The values that other phases take, other ranks, or whoever called the step.
        receives: Those of the inputs that come from another partition: (number of the message, value, partition).
        sends: Those of the outputs that go to another partition: (number of the message, value, partition).
        late: The numbers of those of the sends that nobody takes before the end of the step.
    """

    position: int
    operations: list[int] = field(default_factory=list)
    feeds: list[int] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    receives: list[tuple[int, Value, int]] = field(default_factory=list)
    sends: list[tuple[int, Value, int]] = field(default_factory=list)
    late: set[int] = field(default_factory=set)


@dataclass
class Program:
    """The program of one rank in a step.

    Attributes:
        phases: By position.
        results: Of each result of the step, whether this rank has it.
    """

    phases: dict[int, Phase]
    results: list[bool]

    def order(self, actions: Sequence[Action], microbatches: int, phases: Phases) -> list[tuple[int, int]]:
        """(position, microbatch) of all that this rank runs, in order.

        The n-th time that an action of a stage comes is microbatch n's, whatever the schedule says: what a phase
        writes into variables, the next microbatch reads. Gradients are taken as a whole, where the schedule has B or I.
        """
        stages = len(phases.stages)
        late = [position for position in sorted(self.phases) if position >= phases.end]
        if phases.serial or not stages:
            return [(at, index) for index in range(microbatches) for at in sorted(self.phases)]
        found: list[tuple[int, int]] = []
        begun: set[int] = set()
        counts: Counter[int] = Counter()
        for stage, kind, _ in actions:
            if kind == "W":
                continue
            at = stage if kind == "F" else 2 * stages - 1 - stage
            index = counts[at]
            counts[at] += 1
            if index not in begun and BEFORE in self.phases:
                found.append((BEFORE, index))
            begun.add(index)
            if at in self.phases:
                found.append((at, index))
        for index in range(microbatches):
            if index not in begun and BEFORE in self.phases:
                found.append((BEFORE, index))
            found += [(at, index) for at in late]
        return found


def make_program(
    record: Record, phases: Phases, rank: int, replicated: set[int], order: list[int]
) -> Program:
    """The program of the rank of partition ``rank`` in a step.

    Raises:
        PlacementError: A value that cannot be sent is needed on another partition; on every rank.
    """
    uses = _uses(record, phases, replicated)
    numbers = _number_messages(record, uses, phases)
    found: dict[int, Phase] = {}

    def phase(position: int) -> Phase:
        return found.setdefault(position, Phase(position))

    own: dict[int, list[int]] = defaultdict(list)
    for number in order:
        if phases.partition.get(number) in (rank, EVERYWHERE):
            own[phases.position[number]].append(number)
    for position, numbers_at in own.items():
        phase(position).operations = numbers_at
    for value, readers in uses.items():
        there, made_at = phases.partition[value.operation], phases.position[value.operation]
        mine = sorted(at for partition, at in readers if partition == rank)
        if there in (rank, EVERYWHERE):
            others = sorted({partition for partition, _ in readers} - {rank}) if there != EVERYWHERE else []
            if others or any(at != made_at for at in mine):
                phase(made_at).outputs.append(value)
            for partition in others:
                number = numbers[value, partition]
                phase(made_at).sends.append((number, value, partition))
                if phases.stages and all(at >= phases.end for reader, at in readers if reader == partition):
                    phase(made_at).late.add(number)
            for at in mine:
                if at != made_at:
                    phase(at).inputs.append(value)
        elif mine:
            phase(mine[0]).receives.append((numbers[value, rank], value, there))
            for at in mine:
                phase(at).inputs.append(value)
    results = []
    for result, wanted in zip(record.results, phases.wanted, strict=True):
        has = result is not None and (wanted in (rank, EVERYWHERE) or result.operation in replicated)
        results.append(has)
        if result is not None and result.operation in replicated:
            last = phase(phases.end)
            if result not in last.outputs:
                last.outputs.append(result)
        elif result is not None and has:
            at = phases.position[result.operation]
            if phases.partition[result.operation] in (rank, EVERYWHERE) and result not in phase(at).outputs:
                phase(at).outputs.append(result)
    for each in found.values():
        _complete(record, each, replicated, order)
        each.receives.sort()
        each.sends.sort()
    return Program(found, results)


def number_messages(record: Record, phases: Phases, replicated: set[int]) -> dict[tuple[Value, int], int]:
    """The messages of a step: each value that goes from partition to partition, where to, and its number."""
    return _number_messages(record, _uses(record, phases, replicated), phases)


def _uses(record: Record, phases: Phases, replicated: set[int]) -> dict[Value, set[tuple[int, int]]]:
    """Who takes each value that is not computed wherever it is needed: (partition, position)."""
    partitions = range(phases.partitions)
    found: dict[Value, set[tuple[int, int]]] = defaultdict(set)
    for number, at in phases.position.items():
        home = phases.partition[number]
        readers = {(partition, at) for partition in (partitions if home == EVERYWHERE else [home])}
        for value in record.operations[number].inputs:
            if value.operation not in replicated:
                found[value] |= readers
    for result, wanted in zip(record.results, phases.wanted, strict=True):
        if result is None or result.operation in replicated:
            continue
        there, at = phases.partition[result.operation], phases.position[result.operation]
        if there != EVERYWHERE:
            late = max(phases.end, at + 1)
            for partition in partitions if wanted == EVERYWHERE else [wanted]:
                if partition != there:
                    found[result].add((partition, late))
    return found


def _number_messages(
    record: Record, uses: dict[Value, set[tuple[int, int]]], phases: Phases
) -> dict[tuple[Value, int], int]:
    """A number for each value and each partition that it goes to; the same on every rank."""
    pairs = sorted(
        (value, partition)
        for value, readers in uses.items()
        for partition in {partition for partition, _ in readers}
        if phases.partition[value.operation] not in (partition, EVERYWHERE)
    )
    for value, partition in pairs:
        operation = record.operations[value.operation]
        if not operation.sendable[value.output]:
            raise PlacementError(
                f"{operation.name} ({operation.kind}) computes what cannot be sent, a text or a list of tensors, on "
                f"partition {phases.partition[value.operation]}, and partition {partition} needs it: make and use it "
                "inside of one layer, and do not return it from the step"
            )
    return {pair: number for number, pair in enumerate(pairs)}


def _complete(record: Record, phase: Phase, replicated: set[int], order: list[int]) -> None:
    """Add the operations that every rank computes for itself, as far as the phase needs them, and its feeds."""
    needed: set[int] = set()
    feeds: set[int] = set()
    todo = [value.operation for number in phase.operations for value in record.operations[number].inputs]
    todo += [value.operation for value in phase.outputs]
    while todo:
        number = todo.pop()
        if number not in replicated or number in needed or number in feeds:
            continue
        operation = record.operations[number]
        if operation.feed or operation.variable >= 0:
            feeds.add(number)
        else:
            needed.add(number)
            todo += [value.operation for value in operation.inputs]
    place = {number: at for at, number in enumerate(order)}
    phase.operations = sorted({*phase.operations, *needed}, key=place.__getitem__)
    phase.feeds = sorted(feeds)
