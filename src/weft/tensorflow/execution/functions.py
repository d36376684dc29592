"""From phases to functions of TensorFlow: each is cut out of the step's graph, and takes and returns plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from weft.tensorflow import private
from weft.tensorflow.execution.program import Phase
from weft.tensorflow.trace.capture import Capture
from weft.tensorflow.trace.operations import Value

DROPPED = ("_class", "_gradient_op_type")
"""Attributes of operations that name others, or gradients: these are taken already."""


@dataclass
class PhaseFunction:
    """A phase that can be called.

    Attributes:
        phase: What it runs.
        feeds: The operations that stand for the arguments it takes; variables are not among them.
        function: Takes the values of these and the phase's inputs, and returns its outputs, flat; None for nothing.
        passed: Those of the outputs that are feeds, with the number of the feed.
        operations: The operations, to write them into a graph; None where XLA compiles the function.
    """

    phase: Phase
    feeds: list[int]
    function: Any
    passed: dict[Value, int]
    operations: Operations | None = None

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        return self.outputs(inputs, private.call(self.function, inputs) if self.function is not None else [])

    def in_graph(self, inputs: Sequence[Any], after: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The outputs, and the operations that are done when all of them are there.

        ``after``: the operations that come before.
        """
        if self.function is None:
            return self.outputs(inputs, []), []
        if self.operations is not None:
            found, done = self.operations.write(inputs, after)
        else:
            with tf.control_dependencies(after):
                found, done = private.call_in_graph(self.function, inputs)
        return self.outputs(inputs, found), done

    def outputs(self, inputs: Sequence[Any], computed: Sequence[Any]) -> list[Any]:
        """The outputs, from what the function takes and what it has computed."""
        found = iter(computed)
        return [
            inputs[self.passed[value]] if value in self.passed else next(found)
            for value in self.phase.outputs
        ]


BEFORE = "weft_before"
"""Stands for what comes before the operations of a phase."""


@dataclass
class Operations:
    """The operations of a phase.

    Attributes:
        graph_def: The operations.
        inputs: The tensors that it takes, by name.
        outputs: The tensors that it returns, by name.
        variables: The variables that it takes, by the name of their tensor.
        effects: The names of those that do more than compute their outputs: nothing may take what they return.
    """

    graph_def: Any
    inputs: list[str]
    outputs: list[str]
    variables: dict[str, Any]
    effects: list[str]

    def __post_init__(self) -> None:
        nodes = self.graph_def.node
        self._used = {each if ":" in each else f"{each}:0" for node in nodes for each in node.input}
        names = {node.name for node in nodes}
        for node in nodes:
            if not any(each.lstrip("^").partition(":")[0] in names for each in node.input):
                node.input.append(f"^{BEFORE}")

    def write(self, inputs: Sequence[Any], after: Sequence[Any] = ()) -> tuple[list[Any], list[Any]]:
        """Write them into the graph that is being traced: the outputs, and the operations at the end.

        ``after``: operations that come before.
        """
        graph = tf.compat.v1.get_default_graph()
        given = dict(zip(self.inputs, inputs, strict=True)) | self.variables
        mapped = {name: graph.capture(tensor) for name, tensor in given.items() if name in self._used}
        with tf.control_dependencies(after):
            mapped[f"^{BEFORE}"] = tf.constant(0)
        found = tf.graph_util.import_graph_def(
            self.graph_def, input_map=mapped, return_elements=[*self.outputs, *self.effects], name="phase"
        )
        outputs, done = found[: len(self.outputs)], found[len(self.outputs) :]
        return outputs, [*done, *([tf.raw_ops.IdentityN(input=outputs)[0].op] if outputs else [])]


class Cutter:
    """Cuts functions out of a step's graph."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._graph_def = capture.graph.as_graph_def()
        self._nodes = {node.name: node for node in self._graph_def.node}

    def function(self, phase: Phase, compiled: bool = False) -> PhaseFunction:
        """The function of a phase; none where it only hands on what it gets. ``compiled``: XLA compiles it."""
        operations, records = self._capture.operations, self._capture.record.operations
        feeds = [number for number in phase.feeds if not self._is_variable(number)]
        passed = {value: feeds.index(value.operation) for value in phase.outputs if value.operation in feeds}
        outputs = [value for value in phase.outputs if value not in passed]
        if not phase.operations:
            return PhaseFunction(phase, feeds, None, passed)
        graph_def = tf.compat.v1.GraphDef()
        graph_def.versions.CopyFrom(self._graph_def.versions)
        names = {operations[number].name for number in phase.operations}
        for number in phase.operations:
            node = graph_def.node.add()
            node.CopyFrom(self._nodes[operations[number].name])
            kept = [each for each in node.input if not each.startswith("^") or each[1:] in names]
            del node.input[:]
            node.input.extend(kept)
            for attribute in DROPPED:
                if attribute in node.attr:
                    del node.attr[attribute]
        graph_def.library.function.extend(private.library_of(self._graph_def, graph_def.node))
        taken = [operations[number].outputs[0] for number in feeds] + [
            self._tensor(value) for value in phase.inputs
        ]
        names_of_inputs = [tensor.name for tensor in taken]
        names_of_outputs = [self._tensor(value).name for value in outputs]
        variables = {
            operations[number].outputs[0].name: self._capture.variables[records[number].variable]
            for number in phase.feeds
            if self._is_variable(number)
        }

        nodes = [operations[number] for number in phase.operations]
        effects = [node.name for node in nodes if private.is_stateful(node)]
        cut = Operations(graph_def, names_of_inputs, names_of_outputs, variables, effects)
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in taken]
        made = tf.function(
            lambda *inputs: cut.write(inputs)[0], autograph=False, jit_compile=compiled or None
        ).get_concrete_function(*specs)
        return PhaseFunction(phase, feeds, made, passed, None if compiled else cut)

    def _is_variable(self, number: int) -> bool:
        return self._capture.record.operations[number].variable >= 0

    def _tensor(self, value: Value) -> Any:
        return self._capture.operations[value.operation].outputs[value.output]
