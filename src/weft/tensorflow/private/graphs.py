"""A step as a graph that is being traced: its operations, their effects, and the gradients that are taken in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import backprop, execute, imperative_grad, record
from tensorflow.python.framework import auto_control_deps, auto_control_deps_utils, func_graph, ops
from tensorflow.python.ops import array_ops, gradients_util, resource_variable_ops


@contextmanager
def step_graph(name: str) -> Iterator[Any]:
    """A graph of its own, in which operations are made inside; effects on one variable keep their order in it.

    Variables that are made inside are made at once, as outside of every graph.
    """
    graph = func_graph.FuncGraph(name, collections={})
    _step_graphs.append(graph)
    try:
        with (
            graph.as_default(),
            tf.variable_creator_scope(_make_variable),
            auto_control_deps.AutomaticControlDependencies(),
        ):
            yield graph
    finally:
        _step_graphs.pop()


_step_graphs: list[Any] = []


def _make_variable(others: Callable[..., Any], **arguments: Any) -> Any:
    """A variable with its value; a ``tf.function`` around would give it its value only when it runs."""
    with ops.init_scope():
        return resource_variable_ops.default_variable_creator_v2(None, **arguments)


def tracing_a_step() -> bool:
    """Whether a step's graph is being traced."""
    return bool(_step_graphs)


def placeholder(dtype: Any, shape: Any, name: str) -> Any:
    """An input of the graph that is being traced."""
    return array_ops.placeholder(dtype, shape, name)


def captures(graph: Any) -> list[tuple[Any, Any]]:
    """What a graph uses of the world outside: (the tensor or the variable's handle there, its stand-in inside)."""
    return list(graph.captures)


def made(graph: Any) -> int:
    """The number of the last operation that was made: those made from now on have larger ones."""
    return int(graph.version) + 1  # the source and the sink of a graph have numbers, too


def number_of(operation: Any) -> int:
    """When an operation was made."""
    return int(operation._id)


def operations_of(graph: Any, name: str) -> list[Any]:
    """The operations of a function that a graph knows by its name; none if it has only the function's definition."""
    inside = getattr(graph._get_function(name), "graph", None)
    return [] if inside is None else list(inside.get_operations())


def type_of(handle: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and type of the variable behind a handle; dims that are not known count 1."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.shape_and_type:
        return (), tf.float32
    known = data.shape_and_type[0]
    return tuple(max(dim.size, 1) for dim in known.shape.dim), tf.dtypes.as_dtype(known.dtype)


def is_stateful(operation: Any) -> bool:
    """Whether an operation does something beside computing its outputs from its inputs."""
    return bool(operation.op_def.is_stateful)


def writes(operation: Any) -> set[str]:
    """The names of the resources among an operation's inputs that it may write into."""
    _, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
    return {tensor.name for tensor in written}


@contextmanager
def watch_gradients(
    graph: Any,
    differentiated: Callable[[str, int, int], None],
    asked: Callable[[Sequence[Any], Sequence[Any]], None],
) -> Iterator[None]:
    """Tell of gradients that are taken inside, by a tape or by ``tf.gradients``.

    ``differentiated(name, first, end)``: for the gradient of the operation of that name, those from number ``first`` to
    ``end`` were made. ``asked(sources, gradients)``: what someone asked for, and got.
    """
    of_operation, in_graph = backprop._gradient_function, gradients_util._MaybeCompile
    recorded, operation_of = execute.record_gradient, {}
    by_hand = record.record_operation
    by_tape, by_graph = imperative_grad.imperative_grad, gradients_util._GradientsHelper

    def inside() -> bool:
        return ops.get_default_graph() is graph

    def note(op_name: str, inputs: Any, attributes: Any, outputs: Any) -> Any:
        """An operation goes on a tape: the tape hands the very same attributes back when it takes the gradient."""
        made_by = next(
            (tensor.op for tensor in outputs or () if getattr(tensor, "graph", None) is graph), None
        )
        if made_by is not None:
            operation_of[id(attributes)] = made_by.name, attributes
        return recorded(op_name, inputs, attributes, outputs)

    def note_function(
        op_type: str,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Any,
        forward_function: Any = None,
    ) -> None:
        """A call of a function, or of one with a gradient of its own, goes on a tape."""
        made_by = next((each.op for each in output_tensors if getattr(each, "graph", None) is graph), None)
        if made_by is None or not inside():
            by_hand(op_type, output_tensors, input_tensors, backward_function, forward_function)
            return
        name = made_by.name

        def noted(*gradients: Any) -> Any:
            first = made(graph)
            result = backward_function(*gradients)
            differentiated(name, first + 1, made(graph) + 1)
            return result

        by_hand(op_type, output_tensors, input_tensors, noted, forward_function)

    def taped(op_name: str, attributes: Any, count: int, inputs: Any, outputs: Any, *rest: Any) -> Any:
        if not inside():
            return of_operation(op_name, attributes, count, inputs, outputs, *rest)
        first = made(graph)
        result = of_operation(op_name, attributes, count, inputs, outputs, *rest)
        name, _ = operation_of.get(id(attributes), ("", None))
        if name:
            differentiated(name, first + 1, made(graph) + 1)
        return result

    def compiled(scope: str, operation: Any, function: Any, gradient: Any) -> Any:
        if not inside():
            return in_graph(scope, operation, function, gradient)
        first = made(graph)
        result = in_graph(scope, operation, function, gradient)
        if operation.graph is graph:
            differentiated(operation.name, first + 1, made(graph) + 1)
        return result

    def from_tape(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        found = by_tape(tape, target, sources, *args, **kwargs)
        if inside():
            asked(list(sources), list(found))
        return found

    def from_graph(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        found = by_graph(ys, xs, *args, **kwargs)
        if inside():
            asked(tf.nest.flatten(xs), tf.nest.flatten(found))
        return found

    register = backprop.pywrap_tfe.TFE_Py_RegisterGradientFunction
    register(taped)
    execute.record_gradient = note
    record.record_operation = note_function
    gradients_util._MaybeCompile = compiled
    imperative_grad.imperative_grad = from_tape
    gradients_util._GradientsHelper = from_graph
    try:
        yield
    finally:
        register(of_operation)
        execute.record_gradient = recorded
        record.record_operation = by_hand
        gradients_util._MaybeCompile = in_graph
        imperative_grad.imperative_grad = by_tape
        gradients_util._GradientsHelper = by_graph


def present_graph() -> Any:
    """The graph that is being traced; None outside of all."""
    return ops.get_default_graph() if ops.inside_function() else None


def is_symbolic(tensor: Any) -> bool:
    """Whether a tensor is one of a graph, without a value."""
    return not isinstance(tensor, ops.EagerTensor)


def is_building_function() -> bool:
    """Whether a ``tf.function`` is being traced."""
    return bool(ops.inside_function())
