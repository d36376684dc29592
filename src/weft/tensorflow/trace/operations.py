"""A step's operations as plain records: what splits a step needs to know of each, and no more.

Here nothing of TensorFlow is left but the names, so that the split can be tried on graphs written by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Value(NamedTuple):
    """An output of an operation: the operation's number in the record, and which of its outputs."""

    operation: int
    output: int


@dataclass
class Operation:
    """One operation of one microbatch.

    Attributes:
        name: Its name in the graph.
        kind: Its type: MatMul, say.
        inputs: The values that it takes.
        controls: The operations that have to be done before it, because of effects.
        sizes: What each output takes, in bytes; 0 where that is not known before it runs.
        sendable: Of each output, whether it can go to another process.
        stateful: Whether it does something beside computing its outputs.
        reads: The variables that it uses, by their number.
        writes: Those of them that it may write into.
        feed: Whether it stands for something that every rank has: an argument of the step, a value from outside.
        variable: The variable that it stands for; -1 for none.
        unit: The call of a layer, or the part of the model, that it belongs to; empty outside of models.
        gradient_of: The operation whose gradient it helps to compute; -1 for none.
        partition: Where the script wants it; -1 if it did not say.
        beside: Operations that it must be placed with.
        work_s: What it takes, in seconds.
    """

    name: str
    kind: str
    inputs: tuple[Value, ...] = ()
    controls: tuple[int, ...] = ()
    sizes: tuple[int, ...] = (0,)
    sendable: tuple[bool, ...] = (True,)
    stateful: bool = False
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    feed: bool = False
    variable: int = -1
    unit: str = ""
    gradient_of: int = -1
    partition: int = -1
    beside: tuple[int, ...] = ()
    work_s: float = 0.0


@dataclass
class Variable:
    """A variable that the step uses.

    Attributes:
        name: Its name.
        bytes: What it takes.
        elements: How many numbers it holds.
        model: Whether it belongs to a model that is split.
    """

    name: str
    bytes: int
    elements: int
    model: bool = True


@dataclass
class Record:
    """One microbatch of a step.

    Attributes:
        operations: All operations, in the order in which they were made.
        variables: All variables that they use.
        results: What the step returns, flat; None where that is no tensor.
        gradients: Of each of ``results`` the variables whose gradient it may be.
        alike: Variables that belong to one partition since models are alike, two by two.
    """

    operations: list[Operation]
    variables: list[Variable] = field(default_factory=list)
    results: list[Value | None] = field(default_factory=list)
    gradients: list[frozenset[int]] = field(default_factory=list)
    alike: list[tuple[int, int]] = field(default_factory=list)

    def size_of(self, value: Value) -> int:
        """The bytes of a value; 0 where that is not known before it is made."""
        return self.operations[value.operation].sizes[value.output]

    def users(self) -> list[list[int]]:
        """For each operation those that take one of its outputs."""
        found: list[list[int]] = [[] for _ in self.operations]
        for number, operation in enumerate(self.operations):
            for source in {value.operation for value in operation.inputs}:
                found[source].append(number)
        return found

    def in_order(self) -> list[int]:
        """The operations so that each comes after all that it takes, and after its controls; else as they were made.

        A gradient may have given an operation more inputs, made after it: a loop that must now remember its states.
        """
        import heapq

        before = [
            {value.operation for value in operation.inputs} | set(operation.controls)
            for operation in self.operations
        ]
        after: list[list[int]] = [[] for _ in before]
        left = [len(sources) for sources in before]
        for number, sources in enumerate(before):
            for source in sources:
                after[source].append(number)
        ready = [number for number, count in enumerate(left) if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            number = heapq.heappop(ready)
            order.append(number)
            for user in after[number]:
                left[user] -= 1
                if not left[user]:
                    heapq.heappush(ready, user)
        assert len(order) == len(before), "a step's operations wait for each other"
        return order
