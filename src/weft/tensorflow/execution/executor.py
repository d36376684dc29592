"""The two executors: one runs a program call by call, the other writes it into a graph of TensorFlow's.

Both go through the same list of (position, microbatch). What they differ in is who waits: Python, or an operation of
the graph, which calls Python for each message. In the graph each phase begins when the one before has been computed,
so that an operation that waits never holds up what others need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from weft.tensorflow.execution.functions import PhaseFunction
from weft.tensorflow.execution.messages import Item, Messages
from weft.tensorflow.execution.program import Phase, Program
from weft.tensorflow.trace.operations import Record, Value


@dataclass
class Runnable:
    """What a rank runs for a step that was traced.

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


class Way(Protocol):
    """How an executor does what a program says."""

    def begin(self, trains: bool, tensors: Sequence[Any]) -> None: ...

    def receive(self, microbatch: int, items: list[Item], specs: list[Any]) -> list[Any]: ...

    def compute(
        self, function: PhaseFunction, inputs: list[Any], what: tuple[str, int, int]
    ) -> list[Any]: ...

    def send(self, microbatch: int, items: list[Item], tensors: list[Any]) -> None: ...

    def end(self, results: list[list[Any]]) -> list[list[Any]]: ...


def run(
    runnable: Runnable, feeds: Sequence[dict[int, Any]], way: Way, tensors: Sequence[Any] = ()
) -> list[list[Any]]:
    """For each result of the step what the microbatches return; None for those that this rank does not have.

    ``feeds``: for each microbatch its arguments, by the number of the operation that stands for them. ``tensors``:
    those of the whole mini-batch, which ranks compare.
    """
    phases = runnable.program.phases
    left = _count_uses(runnable)
    values: list[dict[Value, Any]] = [{} for _ in feeds]
    results: list[list[Any]] = [[None] * len(feeds) for _ in runnable.record.results]
    way.begin(runnable.trains, tensors)
    for position, microbatch in runnable.order:
        if microbatch >= len(feeds):
            continue
        phase, own = phases[position], values[microbatch]
        function = runnable.functions[position]
        if phase.receives:
            items = [Item(number, peer, _name(runnable, value)) for number, value, peer in phase.receives]
            specs = [runnable.tensors[value] for _, value, _ in phase.receives]
            arrived = way.receive(microbatch, items, specs)
            for (_, value, _), tensor in zip(phase.receives, arrived, strict=True):
                own[value] = tensor
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
        if phase.sends:
            items = [Item(number, peer, _name(runnable, value)) for number, value, peer in phase.sends]
            way.send(microbatch, items, [own[value] for _, value, _ in phase.sends])
        for value in [value for value in own if left[microbatch, value] <= 0]:
            del own[value]
    return way.end(results)


def _count_uses(runnable: Runnable) -> Counter[tuple[int, Value]]:
    """How often each value is still taken."""
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


def _name(runnable: Runnable, value: Value) -> str:
    return runnable.record.operations[value.operation].name


class Eagerly:
    """Python goes through the program, and calls a function for each phase."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def begin(self, trains: bool, tensors: Sequence[Any]) -> None:
        self._messages.begin(not trains, tensors)

    def receive(self, microbatch: int, items: list[Item], specs: list[Any]) -> list[Any]:
        return self._messages.receive(microbatch, items)

    def compute(self, function: PhaseFunction, inputs: list[Any], what: tuple[str, int, int]) -> list[Any]:
        kind, microbatch, stage = what
        self._messages.start("forward" if kind == "F" else "backward", microbatch)
        found = function(inputs)
        self._messages.done(kind, microbatch, stage)
        return found

    def send(self, microbatch: int, items: list[Item], tensors: list[Any]) -> None:
        self._messages.send(microbatch, items, tensors)

    def end(self, results: list[list[Any]]) -> list[list[Any]]:
        self._messages.end(results)
        return results


class InGraph:
    """The program becomes operations of the graph that is being traced, one after the other."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._after: list[Any] = []
        self._records = messages.records

    def _tell(self, tell: Any) -> None:
        """An operation that calls Python, after all before it."""
        with tf.control_dependencies(self._after):
            done = tf.py_function(lambda: (tell(), 0)[1], [], tf.int32)
        self._after = [done.op]

    def begin(self, trains: bool, tensors: Sequence[Any]) -> None:
        messages, count = self._messages, len(tensors)
        handles = messages.proof.handles if messages.proof is not None else []

        def began(*given: Any) -> int:
            messages.begin(not trains, given[:count])
            return 0

        done = tf.py_function(
            began, [*tensors, *handles], tf.int32
        )  # after what was written into variables before
        self._after = [done.op]

    def receive(self, microbatch: int, items: list[Item], specs: list[Any]) -> list[Any]:
        messages = self._messages
        with tf.control_dependencies(self._after):
            found = tf.py_function(
                lambda: messages.receive(microbatch, items), [], [spec.dtype for spec in specs]
            )
        for tensor, spec in zip(found, specs, strict=True):
            tensor.set_shape(spec.shape)
        self._after = [found[0].op]
        return list(found)

    def compute(self, function: PhaseFunction, inputs: list[Any], what: tuple[str, int, int]) -> list[Any]:
        kind, microbatch, stage = what
        messages = self._messages
        if self._records:
            self._tell(lambda: messages.start("forward" if kind == "F" else "backward", microbatch))
        with tf.control_dependencies(self._after) if self._after else nullcontext():
            found, done = function.in_graph(inputs)
        if done:  # of a call without effects only some operations may wait for what is before it
            self._after = [tf.group(*done, *self._after)]
        if self._records:
            self._tell(lambda: messages.done(kind, microbatch, stage))
        return found

    def send(self, microbatch: int, items: list[Item], tensors: list[Any]) -> None:
        messages = self._messages

        def sent(*given: Any) -> int:
            messages.send(microbatch, items, given)
            return 0

        with tf.control_dependencies(self._after):
            done = tf.py_function(sent, tensors, tf.int32)
        self._after = [done.op]

    def end(self, results: list[list[Any]]) -> list[list[Any]]:
        messages = self._messages
        if messages.proof is None:
            self._tell(messages.end)
            return results
        wanted, handles = messages.proof.wanted(results), messages.proof.handles
        at = {id(each): number for number, each in enumerate(wanted)}
        places = [[at.get(id(each)) for each in row] for row in results]

        def ended(*given: Any) -> int:
            messages.end([[None if place is None else given[place] for place in row] for row in places])
            return 0

        with tf.control_dependencies(self._after):
            done = tf.py_function(ended, [*wanted, *handles], tf.int32)
        with tf.control_dependencies([done.op]):  # nothing uses a result before it was compared
            return [[None if each is None else tf.identity(each) for each in row] for row in results]
