"""From operations to units: which operations of a model are placed together, and what each of the units costs.

    together    one call of a layer; operations that share a value that cannot be sent; those that TensorFlow wants
                beside each other; all that touch a variable that the forward pass writes into (BatchNorm's means)
    alone       what a model computes outside of layers that do everything themselves: a residual sum, say
    group       units that use one variable, or variables that one operation uses at once: they go to one partition,
                not to one stage

What depends on the step's arguments alone, and has no effect, is no part of a unit: every rank computes it for itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from weft.graph.model import Graph, Tensor, Unit
from weft.tensorflow.split.sets import DisjointSets, circles, in_order
from weft.tensorflow.trace.operations import Operation, Record, Value, Variable


@dataclass
class Units:
    """The units of a step.

    Attributes:
        graph: What the partitioner sees.
        members: The operations of each unit.
        unit_of: The unit of an operation of a model's forward pass.
        replicated: The operations that every rank computes for itself where it needs them.
        by_hand: The partition that the script asks for, by unit.
        owners: The units that use each variable, by its number, and after them those that must be where it is, since
            some operation uses theirs at once with it.
    """

    graph: Graph
    members: list[list[int]]
    unit_of: dict[int, int]
    replicated: set[int]
    by_hand: dict[int, int] = field(default_factory=dict)
    owners: dict[int, list[int]] = field(default_factory=dict)

    def count_variables(self) -> list[int]:
        """The number of variables of each unit; one that several use counts in the first."""
        counts = [0] * len(self.members)
        for using in self.owners.values():
            counts[using[0]] += 1
        return counts


def find_replicated(record: Record, order: list[int]) -> set[int]:
    """The operations that depend on the step's arguments alone, and do nothing but compute."""
    found: set[int] = set()
    for number in order:
        operation = record.operations[number]
        if operation.variable >= 0:
            found.add(number)
        elif not operation.stateful and not operation.reads and operation.partition < 0:
            if all(
                value.operation in found and record.operations[value.operation].variable < 0
                for value in operation.inputs
            ):
                found.add(number)
    return found


def variable_sets(record: Record) -> list[list[int]]:
    """All variables, in sets that belong to one partition: one operation uses them at once, or models are alike."""
    sets = DisjointSets(len(record.variables))
    for operation in record.operations:
        if operation.reads:
            sets.join_all(operation.reads)
    for one, other in record.alike:
        sets.join(one, other)
    found: dict[int, list[int]] = defaultdict(list)
    for variable in range(len(record.variables)):
        found[sets.of(variable)].append(variable)
    return list(found.values())


def make_units(record: Record) -> Units:
    """The units of a step, in an order in which each comes after those that it depends on."""
    order = record.in_order()
    replicated = find_replicated(record, order)
    inside = _find_inside(record, order, replicated)
    sets = DisjointSets(len(record.operations))
    _join(record, sets, inside)
    edges = _edges(record, order, sets, inside)
    while found := circles(edges):
        for circle in found:
            sets.join_all(circle)
        edges = _edges(record, order, sets, inside)
    members: dict[int, list[int]] = defaultdict(list)
    for number in sorted(inside):
        members[sets.of(number)].append(number)
    order = in_order(edges, _first_of_alike(record, members))
    return _describe(record, [members[root] for root in order], replicated)


def _first_of_alike(record: Record, members: dict[int, list[int]]) -> dict[int, int]:
    """The first operation of each unit, or of one at its place in a model that is alike: they come side by side."""
    first = {root: min(numbers) for root, numbers in members.items()}
    if not record.alike:
        return first
    sets = DisjointSets(len(record.variables))
    for one, other in record.alike:
        sets.join(one, other)
    reads = {
        root: {sets.of(each) for number in numbers for each in record.operations[number].reads}
        for root, numbers in members.items()
    }
    earliest: dict[int, int] = {}
    for root, variables in reads.items():
        for variable in variables:
            earliest[variable] = min(first[root], earliest.get(variable, first[root]))
    return {root: min([first[root], *(earliest[each] for each in reads[root])]) for root in members}


def _find_inside(record: Record, order: list[int], replicated: set[int]) -> set[int]:
    """The operations of the models' forward passes: those that were made in them, and what these need beside."""
    found: set[int] = set()
    for number in order:
        operation = record.operations[number]
        if operation.unit and operation.gradient_of < 0 and number not in replicated:
            found.add(number)
    return found | _needed_by(record, found, replicated)


def _needed_by(record: Record, forward: set[int], replicated: set[int]) -> set[int]:
    """The operations that the forward pass takes, but that were made with the gradients: states of a loop, say."""
    found: set[int] = set()
    todo = [value.operation for number in forward for value in record.operations[number].inputs]
    while todo:
        number = todo.pop()
        operation = record.operations[number]
        if operation.gradient_of >= 0 and number not in replicated and number not in found:
            found.add(number)
            todo += [value.operation for value in operation.inputs]
    return found


def _join(record: Record, sets: DisjointSets, inside: set[int]) -> None:
    """All that must be in one unit for reasons of its own."""
    by_label: dict[str, list[int]] = defaultdict(list)
    using: dict[int, list[int]] = defaultdict(list)
    written: set[int] = set()
    for number in inside:
        operation = record.operations[number]
        if operation.unit and not operation.unit.endswith("*"):
            by_label[operation.unit].append(number)
        for variable in operation.reads:
            using[variable].append(number)
        written |= operation.writes
        for other in (*operation.beside, *_inseparable(record, operation)):
            if other in inside:
                sets.join(number, other)
    for numbers in (*by_label.values(), *(using[variable] for variable in written)):
        sets.join_all(numbers)


def _inseparable(record: Record, operation: Operation) -> list[int]:
    """The operations whose values an operation must have where they are made.

    Those of values that cannot be sent; and all, if it was made when gradients were taken, outside of any model.
    """
    return [
        value.operation
        for value in operation.inputs
        if not record.operations[value.operation].sendable[value.output]
        or (operation.gradient_of >= 0 and not operation.unit)
    ]


def _edges(record: Record, order: list[int], sets: DisjointSets, inside: set[int]) -> dict[int, set[int]]:
    """The units that each unit depends on, through operations outside of units as well; by the units' roots."""
    reach: dict[int, frozenset[int]] = {}
    edges: dict[int, set[int]] = {sets.of(number): set() for number in inside}
    for number in order:
        operation = record.operations[number]
        sources: set[int] = set()
        for value in operation.inputs:
            if value.operation in inside:
                sources.add(sets.of(value.operation))
            else:
                sources |= reach.get(value.operation, frozenset())
        if number in inside:
            sources.update(
                sets.of(control)
                for control in operation.controls
                if control in inside and record.operations[control].reads & operation.reads
            )
            own = sets.of(number)
            edges[own] |= sources - {own}
        elif operation.gradient_of < 0 and sources:
            reach[number] = frozenset(sources)
    return edges


def _describe(record: Record, members: list[list[int]], replicated: set[int]) -> Units:
    """Units with their costs, and what flows between them."""
    unit_of = {number: index for index, numbers in enumerate(members) for number in numbers}
    owners = _owners(record, members)
    names = _names(record, members)
    flows, saved = _flows(record, unit_of)
    tensors = [
        Tensor(
            names[unit_of[value.operation]],
            tuple(names[target] for target in sorted(targets)),
            record.size_of(value),
        )
        for value, targets in sorted(flows.items())
    ]
    variables: list[list[Variable]] = [[] for _ in members]
    for variable, using in owners.items():
        variables[using[0]].append(record.variables[variable])
    leaving = Counter[int]()
    for value in flows:
        leaving[unit_of[value.operation]] += record.size_of(value)
    forward_s = [sum(record.operations[number].work_s for number in numbers) for numbers in members]
    backward_s = _backward_s(record, unit_of, len(members))
    if members:  # what follows the models, the loss say, most often runs where the last unit is
        for halves, more in zip(
            (forward_s, backward_s), _outside_s(record, unit_of, replicated), strict=True
        ):
            halves[-1] += more
    groups = _groups(owners, len(members))
    made = [
        Unit(
            name=names[index],
            forward_ms=1e3 * forward_s[index],
            backward_ms=1e3 * backward_s[index],
            parameter_bytes=sum(variable.bytes for variable in variables[index]),
            activation_bytes=sum(record.size_of(value) for value in saved[index]),
            output_bytes=leaving[index],
            transient_bytes=2 * max((record.size_of(value) for value in saved[index]), default=0),
            parameters=sum(variable.elements for variable in variables[index]),
            group=groups[index],
        )
        for index, numbers in enumerate(members)
    ]
    return Units(Graph(made, tensors), members, unit_of, replicated, _by_hand(record, members), owners)


def _owners(record: Record, members: list[list[int]]) -> dict[int, list[int]]:
    """The units that use each variable, or one that must be where it is; those that use it themselves come first."""
    direct: dict[int, list[int]] = defaultdict(list)
    for index, numbers in enumerate(members):
        for variable in frozenset().union(*(record.operations[number].reads for number in numbers)):
            direct[variable].append(index)
    found: dict[int, list[int]] = {}
    for variables in variable_sets(record):
        for variable in variables:
            using = dict.fromkeys(unit for each in (variable, *variables) for unit in direct[each])
            if using:
                found[variable] = list(using)
    return found


def _groups(owners: dict[int, list[int]], count: int) -> list[str | None]:
    """The group of each of so many units: those that use one variable, directly or through others, have one."""
    sets = DisjointSets(count)
    for using in owners.values():
        sets.join_all(using)
    roots = [sets.of(index) for index in range(count)]
    sizes = Counter(roots)
    return [f"shared{root}" if sizes[root] > 1 else None for root in roots]


def _flows(record: Record, unit_of: dict[int, int]) -> tuple[dict[Value, set[int]], list[set[Value]]]:
    """The values that go from units to others, with these; and for each unit those that gradients take."""
    flows: dict[Value, set[int]] = defaultdict(set)
    saved: list[set[Value]] = [set() for _ in set(unit_of.values())]
    for number, operation in enumerate(record.operations):
        own = unit_of.get(number)
        for value in operation.inputs:
            source = unit_of.get(value.operation)
            if source is None or source == own:
                continue
            if own is not None:
                flows[value].add(own)
            elif operation.gradient_of >= 0:
                saved[source].add(value)
    return flows, saved


def _backward_s(record: Record, unit_of: dict[int, int], count: int) -> list[float]:
    """The seconds of the gradients of each of so many units."""
    found = [0.0] * count
    for number, operation in enumerate(record.operations):
        if operation.gradient_of in unit_of and number not in unit_of:
            found[unit_of[operation.gradient_of]] += operation.work_s
    return found


def _outside_s(record: Record, unit_of: dict[int, int], replicated: set[int]) -> tuple[float, float]:
    """The seconds of what the step computes outside of units, and of the gradients of that."""
    forward = backward = 0.0
    for number, operation in enumerate(record.operations):
        if number in unit_of or number in replicated or operation.gradient_of in unit_of:
            continue
        if operation.gradient_of < 0:
            forward += operation.work_s
        else:
            backward += operation.work_s
    return forward, backward


def _by_hand(record: Record, members: list[list[int]]) -> dict[int, int]:
    """The partition that the script wants most operations of a unit on, by unit."""
    found = {}
    for index, numbers in enumerate(members):
        wanted = [each for number in numbers if (each := record.operations[number].partition) >= 0]
        if wanted:
            found[index] = max(sorted(set(wanted)), key=wanted.count)
    return found


def _names(record: Record, members: list[list[int]]) -> list[str]:
    """A name for each unit: its layer's, or that of its first operation; numbered where two are alike."""
    found: dict[str, None] = {}
    for numbers in members:
        first = record.operations[numbers[0]]
        name = alone = first.unit if first.unit and not first.unit.endswith("*") else first.name
        count = 1
        while name in found:
            count += 1
            name = f"{alone}#{count}"
        found[name] = None
    return list(found)
