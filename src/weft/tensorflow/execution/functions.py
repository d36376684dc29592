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
    """

    phase: Phase
    feeds: list[int]
    function: Any
    passed: dict[Value, int]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        return self.outputs(inputs, private.call(self.function, inputs) if self.function is not None else [])

    def in_graph(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The outputs, and the operations that are done when all of them are there."""
        if self.function is None:
            return self.outputs(inputs, []), []
        found, done = private.call_in_graph(self.function, inputs)
        return self.outputs(inputs, found), done

    def outputs(self, inputs: Sequence[Any], computed: Sequence[Any]) -> list[Any]:
        """The outputs, from what the function takes and what it has computed."""
        found = iter(computed)
        return [
            inputs[self.passed[value]] if value in self.passed else next(found)
            for value in self.phase.outputs
        ]


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

        used = {each if ":" in each else f"{each}:0" for node in graph_def.node for each in node.input}

        def run(*inputs: Any) -> list[Any]:
            graph = tf.compat.v1.get_default_graph()
            given = dict(zip(names_of_inputs, inputs, strict=True))
            mapped = {name: tensor for name, tensor in given.items() if name in used}
            mapped.update({name: graph.capture(handle) for name, handle in variables.items()})
            found = tf.graph_util.import_graph_def(
                graph_def, input_map=mapped, return_elements=names_of_outputs, name=""
            )
            return list(found)

        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in taken]
        made = tf.function(run, autograph=False, jit_compile=compiled or None)
        return PhaseFunction(phase, feeds, made.get_concrete_function(*specs), passed)

    def _is_variable(self, number: int) -> bool:
        return self._capture.record.operations[number].variable >= 0

    def _tensor(self, value: Value) -> Any:
        return self._capture.operations[value.operation].outputs[value.output]
