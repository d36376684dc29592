"""From operations to units: which operations of a model are placed together, and what each of the units costs.

    together    one call of a layer; operations that share a value that cannot be sent; those that TensorFlow wants
                beside each other; all that touch a variable that the forward pass writes into (BatchNorm's means)
    alone       what a model computes outside of layers that do everything themselves: a residual sum, say
    group       units that use one variable: they go to one partition, not to one stage

What depends on the step's arguments alone, and has no effect, is no part of a unit: every rank computes it for itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from weft.graph.model import Graph, Tensor, Unit
from weft.tensorflow.trace.operations import Record


class Together:
    """Numbers that belong together, as they are told.

    >>> sets = Together(4)
    >>> sets.join(0, 2)
    >>> sets.of(2) == sets.of(0), sets.of(1) == sets.of(3)
    (True, False)
    """

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def of(self, number: int) -> int:
        """The number that stands for all that belong to this one: the smallest."""
        root = number
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[number] != root:
            self._parent[number], number = root, self._parent[number]
        return root

    def join(self, one: int, other: int) -> None:
        """These two, and all that belong to them, belong together."""
        low, high = sorted((self.of(one), self.of(other)))
        self._parent[high] = low

    def join_all(self, numbers: Iterable[int]) -> None:
        """All of these belong together."""
        first, *others = numbers
        for other in others:
            self.join(first, other)


@dataclass
class Units:
    """The units of a step.

    Attributes:
        graph: What the partitioner sees.
        members: The operations of each unit.
        unit_of: The unit of an operation of a model's forward pass.
        replicated: The operations that every rank computes for itself where it needs them.
        by_hand: The partition that the script asks for, by unit.
        owners: The units that use each variable of a model, by the variable's number.
    """

    graph: Graph
    members: list[list[int]]
    unit_of: dict[int, int]
    replicated: set[int]
    by_hand: dict[int, int] = field(default_factory=dict)
    owners: dict[int, list[int]] = field(default_factory=dict)

    def count_variables(self) -> list[int]:
        """How many variables each unit has; one that several use counts in the first."""
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


def make_units(record: Record) -> Units:
    """The units of a step, in an order in which each comes after those that it depends on."""
    operations = record.operations
    order = record.in_order()
    replicated = find_replicated(record, order)
    forward = [
        n for n in order if operations[n].unit and operations[n].gradient_of < 0 and n not in replicated
    ]
    inside = set(forward) | _needed_by(record, forward, replicated)
    sets = Together(len(operations))
    _join(record, sets, inside)
    while _join_circles(record, sets, inside, replicated):
        pass
    members: dict[int, list[int]] = defaultdict(list)
    for number in sorted(inside):
        members[sets.of(number)].append(number)
    roots = _sorted_roots(record, sets, members, inside, replicated)
    return _describe(record, [members[root] for root in roots], replicated)


def _needed_by(record: Record, forward: list[int], replicated: set[int]) -> set[int]:
    """What the forward pass takes that was made outside of it, when gradients were taken: states of a loop, say."""
    found: set[int] = set()
    todo = [value.operation for number in forward for value in record.operations[number].inputs]
    seen = set(forward)
    while todo:
        number = todo.pop()
        operation = record.operations[number]
        if number in seen or number in replicated:
            continue
        seen.add(number)
        if operation.gradient_of >= 0:
            found.add(number)
            todo += [value.operation for value in operation.inputs]
    return found


def _join(record: Record, sets: Together, inside: set[int]) -> None:
    """All that must be in one unit for reasons of its own."""
    by_label: dict[str, list[int]] = defaultdict(list)
    written: dict[int, list[int]] = defaultdict(list)
    for number in inside:
        operation = record.operations[number]
        if operation.unit and not operation.unit.endswith("*"):
            by_label[operation.unit].append(number)
        for variable in operation.reads:
            written[variable].append(number)
        for other in operation.beside:
            if other in inside:
                sets.join(number, other)
        for value in operation.inputs:
            source = record.operations[value.operation]
            if value.operation in inside and not source.sendable[value.output]:
                sets.join(number, value.operation)
            if value.operation in inside and operation.gradient_of >= 0 and operation.unit == "":
                sets.join(number, value.operation)
    for numbers in by_label.values():
        sets.join_all(numbers)
    for numbers in written.values():
        if any(record.operations[number].writes for number in numbers):
            variables = set().union(*(record.operations[number].writes for number in numbers))
            for variable in variables:
                touching = [n for n in numbers if variable in record.operations[n].reads]
                if touching:
                    sets.join_all(touching)


def _edges(record: Record, sets: Together, inside: set[int], replicated: set[int]) -> dict[int, set[int]]:
    """Which unit depends on which, through operations outside of units as well; by the units' roots."""
    reach: dict[int, frozenset[int]] = {}
    edges: dict[int, set[int]] = defaultdict(set)
    for number in record.in_order():
        operation = record.operations[number]
        if number in replicated:
            continue
        sources: set[int] = set()
        for value in operation.inputs:
            source = value.operation
            if source in inside:
                sources.add(sets.of(source))
            elif source in reach:
                sources |= reach[source]
        if number in inside:
            own = sets.of(number)
            edges[own] |= sources - {own}
            for control in operation.controls:
                if (
                    control in inside
                    and sets.of(control) != own
                    and record.operations[control].reads & operation.reads
                ):
                    edges[own].add(sets.of(control))
        elif operation.gradient_of < 0:
            reach[number] = frozenset(sources)
    return edges


def _join_circles(record: Record, sets: Together, inside: set[int], replicated: set[int]) -> bool:
    """Join units that depend on each other; whether there were any."""
    edges = _edges(record, sets, inside, replicated)
    joined = False
    for circle in _circles(edges):
        sets.join_all(circle)
        joined = True
    return joined


def _circles(edges: dict[int, set[int]]) -> list[list[int]]:
    """The sets of more than one node that depend on each other (Tarjan's strongly connected components)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for start in list(edges):
        if start in index:
            continue
        work = [(start, iter(edges[start]))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(edges.get(other, ()))))
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        other = stack.pop()
                        on_stack.discard(other)
                        component.append(other)
                        if other == node:
                            break
                    if len(component) > 1:
                        found.append(component)
    return found


def _sorted_roots(
    record: Record, sets: Together, members: dict[int, list[int]], inside: set[int], replicated: set[int]
) -> list[int]:
    """The units so that each comes after those that it depends on; else as they were made."""
    import heapq

    edges = _edges(record, sets, inside, replicated)
    after: dict[int, list[int]] = defaultdict(list)
    left = {root: len(edges.get(root, ())) for root in members}
    for root, sources in edges.items():
        for source in sources:
            after[source].append(root)
    first = {root: min(numbers) for root, numbers in members.items()}
    ready = [(first[root], root) for root, count in left.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, root = heapq.heappop(ready)
        order.append(root)
        for user in after[root]:
            left[user] -= 1
            if not left[user]:
                heapq.heappush(ready, (first[user], user))
    assert len(order) == len(members), "units wait for each other"
    return order


def _describe(record: Record, members: list[list[int]], replicated: set[int]) -> Units:
    """Units with their costs, and what flows between them."""
    operations = record.operations
    unit_of = {number: index for index, numbers in enumerate(members) for number in numbers}
    backward = [0.0] * len(members)
    saved: list[dict[tuple[int, int], int]] = [{} for _ in members]
    flows: dict[tuple[int, int], set[int]] = defaultdict(set)
    for number, operation in enumerate(operations):
        home = unit_of.get(operation.gradient_of, -1) if operation.gradient_of >= 0 else -1
        if home >= 0 and number not in unit_of:
            backward[home] += operation.work_s
        for value in operation.inputs:
            source = unit_of.get(value.operation, -1)
            if source < 0:
                continue
            size = operations[value.operation].sizes[value.output]
            own = unit_of.get(number, -1)
            if own >= 0 and own != source:
                flows[value].add(own)
            elif own < 0 and operation.gradient_of >= 0:
                saved[source][value] = size
    owners: dict[int, list[int]] = defaultdict(list)
    groups = Together(len(members))
    for index, numbers in enumerate(members):
        for variable in sorted(frozenset().union(*(operations[n].reads for n in numbers))):
            owners[variable].append(index)
    for sharing in owners.values():
        groups.join_all(sharing)
    shared = {groups.of(index) for index in range(len(members)) if groups.of(index) != index}
    names = _names(record, members)
    variables_of: list[list[int]] = [[] for _ in members]
    for variable, using in sorted(owners.items()):
        variables_of[using[0]].append(variable)
    made = []
    for index, numbers in enumerate(members):
        leaving = {
            value: operations[value[0]].sizes[value[1]] for value in flows if unit_of[value[0]] == index
        }
        made.append(
            Unit(
                name=names[index],
                forward_ms=1e3 * sum(operations[n].work_s for n in numbers),
                backward_ms=1e3 * backward[index],
                parameter_bytes=sum(record.variables[v].bytes for v in variables_of[index]),
                activation_bytes=sum(saved[index].values()),
                output_bytes=sum(leaving.values()),
                parameters=sum(record.variables[v].elements for v in variables_of[index]),
                group=f"shared{groups.of(index)}" if groups.of(index) in shared else None,
            )
        )
    tensors = [
        Tensor(
            names[unit_of[value[0]]],
            tuple(names[t] for t in sorted(targets)),
            operations[value[0]].sizes[value[1]],
        )
        for value, targets in sorted(flows.items())
    ]
    by_hand = {}
    for index, numbers in enumerate(members):
        wanted = [operations[n].partition for n in numbers if operations[n].partition >= 0]
        if wanted:
            by_hand[index] = max(set(wanted), key=wanted.count)
    return Units(Graph(made, tensors), members, unit_of, replicated, by_hand, dict(owners))


def _names(record: Record, members: list[list[int]]) -> list[str]:
    """A name for each unit: its layer's, or that of its first operation; numbered where two are alike."""
    found: list[str] = []
    count: dict[str, int] = defaultdict(int)
    for numbers in members:
        first = record.operations[numbers[0]]
        name = first.unit if first.unit and not first.unit.endswith("*") else first.name
        count[name] += 1
        found.append(name if count[name] == 1 else f"{name}#{count[name]}")
    return found
