"""The two executors: one runs a program call by call, the other writes it into a graph of TensorFlow's.

Both go through the same list of (position, microbatch). What they differ in is who waits: Python, or an operation of
the graph, which calls Python between two phases: it sends what the first computed, and receives what the second takes.
In the graph each phase begins when the one before has been computed, so that an operation that waits never holds up
what others need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from weft.tensorflow import private
from weft.tensorflow.execution.functions import PhaseFunction
from weft.tensorflow.execution.messages import Item, Messages
from weft.tensorflow.execution.program import Phase, Program
from weft.tensorflow.trace.operations import Record, Value


@dataclass
class Runnable:
    """The program of a rank for a step that was traced.

    Attributes:
        record: The step's operations.
        program: This rank's phases.
        functions: Their functions, by position.
        order: (position, microbatch), as they run.
        stages: How many stages there are.
        trains: Whether gradients are taken.
        tensors: Type and shape of each value that crosses, for the receiver.
    """

    record: Record
    program: Program
    functions: dict[int, PhaseFunction]
    order: list[tuple[int, int]]
    stages: int
    trains: bool
    tensors: dict[Value, Any]

    def describe(self, position: int) -> tuple[str, int]:
        """The kind of action at a position, and its stage."""
        if 0 <= position < self.stages:
            return "F", position
        if self.stages <= position < 2 * self.stages:
            return "B", 2 * self.stages - 1 - position
        return "F", -1

    def items(self, messages: Sequence[tuple[int, Value, int]], microbatch: int) -> list[Item]:
        """The values of a phase's ``receives`` or ``sends``."""
        names = self.record.operations
        return [
            Item(microbatch, number, peer, names[value.operation].name) for number, value, peer in messages
        ]

    def received_together(self, order: Sequence[tuple[int, int]], place: int) -> int:
        """The end of the entries whose values are received at once, in the call before the one at ``place``.

        That is one entry, or those at the end of the step: nothing is left to overlap with there.
        """
        phases, end = self.program.phases, place + 1
        while end < len(order) and order[place][0] >= 2 * self.stages and not phases[order[end - 1][0]].sends:
            end += 1
        return end


class Way(Protocol):
    """The operations of an executor that a program needs."""

    def begin(self, trains: bool, tensors: Sequence[Any]) -> None: ...

    def exchange(
        self, sent: list[Item], tensors: list[Any], received: list[Item], specs: list[Any]
    ) -> list[Any]: ...

    def compute(
        self, function: PhaseFunction, inputs: list[Any], what: tuple[str, int, int]
    ) -> list[Any]: ...

    def end(self, results: list[list[Any]]) -> list[list[Any]]: ...


def run(
    runnable: Runnable, feeds: Sequence[dict[int, Any]], way: Way, tensors: Sequence[Any] = ()
) -> list[list[Any]]:
    """For each result of the step what the microbatches return; None for those that this rank does not have.

    ``feeds``: for each microbatch its arguments, by the number of the operation that stands for them. ``tensors``:
    those of the whole mini-batch, which ranks compare.
    """
    phases = runnable.program.phases
    order = [(position, microbatch) for position, microbatch in runnable.order if microbatch < len(feeds)]
    left = _count_uses(runnable)
    values: list[dict[Value, Any]] = [{} for _ in feeds]
    results: list[list[Any]] = [[None] * len(feeds) for _ in runnable.record.results]
    sent: list[Item] = []
    leaving: list[Any] = []
    urgent = False  # somebody waits for what is sent
    here = 0  # the values of so many entries have been received
    way.begin(runnable.trains, tensors)
    for place, (position, microbatch) in enumerate(order):
        phase, own = phases[position], values[microbatch]
        function = runnable.functions[position]
        received, places = [], []
        if place == here:
            here = runnable.received_together(order, place)
            for at, index in order[place:here]:
                received += runnable.items(phases[at].receives, index)
                places += [(index, value) for _, value, _ in phases[at].receives]
        if urgent or received:
            specs = [runnable.tensors[value] for _, value in places]
            arrived = way.exchange(sent, leaving, received, specs)
            for (index, value), tensor in zip(places, arrived, strict=True):
                values[index][value] = tensor
            sent, leaving, urgent = [], [], False
        inputs = [feeds[microbatch][number] for number in function.feeds]
        inputs += [own[value] for value in phase.inputs]
        for value in phase.inputs:
            left[microbatch, value] -= 1
        kind, stage = runnable.describe(position)
        found = way.compute(function, inputs, (kind, microbatch, stage))
        del inputs
        for value, tensor in zip(phase.outputs, found, strict=True):
            own[value] = tensor
        _keep_results(runnable, phase, own, results, microbatch)
        sent += runnable.items(phase.sends, microbatch)
        leaving += [own[value] for _, value, _ in phase.sends]
        urgent = any(number not in phase.late for number, _, _ in phase.sends)
        for value in [value for value in own if left[microbatch, value] <= 0]:
            del own[value]
    if sent:
        way.exchange(sent, leaving, [], [])
    return way.end(results)


def _count_uses(runnable: Runnable) -> Counter[tuple[int, Value]]:
    """The number of times that each value is still taken."""
    return Counter(
        (microbatch, value)
        for position, microbatch in runnable.order
        for value in runnable.program.phases[position].inputs
    )


def _keep_results(
    runnable: Runnable, phase: Phase, own: dict[Value, Any], results: list[list[Any]], microbatch: int
) -> None:
    there = {*phase.outputs, *(value for _, value, _ in phase.receives)}
    for number, (value, has) in enumerate(
        zip(runnable.record.results, runnable.program.results, strict=True)
    ):
        if has and value in there and results[number][microbatch] is None:
            results[number][microbatch] = own[value]


class Eagerly:
    """Python goes through the program, and calls a function for each phase."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def begin(self, trains: bool, tensors: Sequence[Any]) -> None:
        self._messages.begin(not trains, tensors)

    def exchange(
        self, sent: list[Item], tensors: list[Any], received: list[Item], specs: list[Any]
    ) -> list[Any]:
        return self._messages.exchange(sent, tensors, received)

    def compute(self, function: PhaseFunction, inputs: list[Any], what: tuple[str, int, int]) -> list[Any]:
        kind, microbatch, stage = what
        self._messages.start("forward" if kind == "F" else "backward", microbatch)
        found = function(inputs)
        self._messages.done(kind, microbatch, stage)
        return found

    def end(self, results: list[list[Any]]) -> list[list[Any]]:
        self._messages.end(results)
        return results


class InGraph:
    """The program becomes operations of the graph that is being traced, one after the other."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._after: list[Any] = []
        self._records = messages.records

    def _call(self, function: Any) -> None:
        """An operation that calls Python, after all before it."""
        with tf.control_dependencies(self._after):
            done = private.call_in_order(lambda: (function(), 0)[1], [], tf.int32)
        self._after = [done.op]

    def begin(self, trains: bool, tensors: Sequence[Any]) -> None:
        messages, count = self._messages, len(tensors)
        handles = messages.proof.handles if messages.proof is not None else []

        def began(*given: Any) -> int:
            messages.begin(not trains, given[:count])
            return 0

        done = private.call_in_order(
            began, [*tensors, *handles], tf.int32
        )  # after what was written into variables before
        self._after = [done.op]

    def exchange(
        self, sent: list[Item], tensors: list[Any], received: list[Item], specs: list[Any]
    ) -> list[Any]:
        messages = self._messages
        with tf.control_dependencies(self._after):
            if not received:
                done = private.call_in_order(
                    lambda *given: (messages.exchange(sent, given, []), 0)[1], tensors, tf.int32
                )
                self._after = [done.op]
                return []
            found = private.call_in_order(
                lambda *given: messages.exchange(sent, given, received),
                tensors,
                [spec.dtype for spec in specs],
            )
        for tensor, spec in zip(found, specs, strict=True):
            tensor.set_shape(spec.shape)
        self._after = [found[0].op]
        return list(found)

    def compute(self, function: PhaseFunction, inputs: list[Any], what: tuple[str, int, int]) -> list[Any]:
        kind, microbatch, stage = what
        messages = self._messages
        if self._records:
            self._call(lambda: messages.start("forward" if kind == "F" else "backward", microbatch))
        found, done = function.in_graph(inputs, self._after)
        if done:  # of a call without effects only some operations may wait for what is before it
            self._after = [tf.group(*done, *self._after)]
        if self._records:
            self._call(lambda: messages.done(kind, microbatch, stage))
        return found

    def end(self, results: list[list[Any]]) -> list[list[Any]]:
        messages = self._messages
        if messages.proof is None:
            self._call(messages.end)
            return results
        wanted, handles = messages.proof.wanted(results), messages.proof.handles
        at = {id(each): number for number, each in enumerate(wanted)}
        places = [[at.get(id(each)) for each in row] for row in results]

        def ended(*given: Any) -> int:
            messages.end([[None if place is None else given[place] for place in row] for row in places])
            return 0

        with tf.control_dependencies(self._after):
            done = private.call_in_order(ended, [*wanted, *handles], tf.int32)
        with tf.control_dependencies([done.op]):  # nothing uses a result before it was compared
            return [[None if each is None else tf.identity(each) for each in row] for row in results]
