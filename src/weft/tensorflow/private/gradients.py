"""Gradients that are taken while a graph is traced, by a tape or by ``tf.gradients``: who takes them, and of what.

on a tape    execute.record_gradient       an operation goes on the tape, with attributes that come back with it
             record.record_operation       a call of a function does, or of one with a gradient of its own
taken        backprop._gradient_function   the tape comes to an operation
             gradients_util._MaybeCompile  ``tf.gradients`` comes to one
asked for    imperative_grad, gradients_util._GradientsHelper
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop, execute, imperative_grad, record
from tensorflow.python.framework import ops
from tensorflow.python.ops import gradients_util

from weft.tensorflow.private.graphs import made

Differentiated = Callable[[str, int, int], None]
Asked = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], None]


@contextmanager
def watch_gradients(graph: Any, differentiated: Differentiated, asked: Asked) -> Iterator[None]:
    """Report gradients that are taken inside, while a graph is traced.

    ``differentiated(name, first, end)``: for the gradient of the operation of that name, those from number ``first`` to
    ``end`` were made. ``asked(targets, sources, gradients)``: of what, for what, and what came.
    """

    def inside() -> bool:
        return ops.get_default_graph() is graph

    with (
        _watch_operations_on_tapes(graph, inside, differentiated),
        _watch_functions_on_tapes(graph, inside, differentiated),
        _watch_graphs(graph, inside, differentiated),
        watch_asked(asked, inside),
    ):
        yield


@contextmanager
def outside_of_graphs() -> Iterator[None]:
    """``tf.init_scope`` in which tapes of functions that are traced inside record all the same."""
    with tf.init_scope():
        stopped = bool(pywrap_tfe.TFE_Py_TapeSetIsStopped())
        if stopped:
            pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
        try:
            yield
        finally:
            if stopped:
                pywrap_tfe.TFE_Py_TapeSetStopOnThread()


@contextmanager
def watch_asked(
    asked: Asked, inside: Callable[[], bool] = lambda: True, outermost: bool = False
) -> Iterator[None]:
    """Report what gradients someone asks for, and gets, where ``inside()`` says so.

    ``outermost``: not what is asked while a gradient is computed, for the body of a loop or by `tf.recompute_grad`.
    """
    depth = 0

    by_tape, by_graph = imperative_grad.imperative_grad, gradients_util._GradientsHelper

    @contextmanager
    def deeper() -> Iterator[None]:
        nonlocal depth
        depth += 1
        try:
            yield
        finally:
            depth -= 1

    def from_tape(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        with deeper():
            found = by_tape(tape, target, sources, *args, **kwargs)
        if inside() and not (outermost and depth):
            asked(tf.nest.flatten(target), list(sources), list(found))
        return found

    def from_graph(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        with deeper():
            found = by_graph(ys, xs, *args, **kwargs)
        if inside() and not (outermost and depth):
            asked(tf.nest.flatten(ys), tf.nest.flatten(xs), tf.nest.flatten(found))
        return found

    with (
        _replaced(imperative_grad, "imperative_grad", from_tape),
        _replaced(gradients_util, "_GradientsHelper", from_graph),
    ):
        yield


@contextmanager
def _watch_operations_on_tapes(
    graph: Any, inside: Callable[[], bool], differentiated: Differentiated
) -> Iterator[None]:
    """Report the gradients of operations that a tape takes."""
    recorded, of_operation = execute.record_gradient, backprop._gradient_function
    operation_of: dict[int, tuple[str, Any]] = {}

    def note(op_name: str, inputs: Any, attributes: Any, outputs: Any) -> Any:
        """An operation goes on a tape: the tape hands the very same attributes back when it takes the gradient."""
        made_by = _operation_of(graph, outputs)
        if made_by is not None:
            operation_of[id(attributes)] = made_by.name, attributes
        return recorded(op_name, inputs, attributes, outputs)

    def taken(op_name: str, attributes: Any, count: int, inputs: Any, outputs: Any, *rest: Any) -> Any:
        first = made(graph)
        result = of_operation(op_name, attributes, count, inputs, outputs, *rest)
        name, _ = operation_of.get(id(attributes), ("", None))
        if name and inside():
            differentiated(name, first + 1, made(graph) + 1)
        return result

    register = backprop.pywrap_tfe.TFE_Py_RegisterGradientFunction
    register(taken)
    try:
        with _replaced(execute, "record_gradient", note):
            yield
    finally:
        register(of_operation)


@contextmanager
def _watch_functions_on_tapes(
    graph: Any, inside: Callable[[], bool], differentiated: Differentiated
) -> Iterator[None]:
    """Report the gradients of calls that a tape takes: of functions, and of those with gradients of their own."""
    by_hand = record.record_operation

    def note(
        op_type: str,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Any,
        forward_function: Any = None,
    ) -> None:
        made_by = _operation_of(graph, output_tensors)
        if made_by is None or not inside():
            by_hand(op_type, output_tensors, input_tensors, backward_function, forward_function)
            return
        name = made_by.name

        def taken(*gradients: Any) -> Any:
            first = made(graph)
            result = backward_function(*gradients)
            differentiated(name, first + 1, made(graph) + 1)
            return result

        by_hand(op_type, output_tensors, input_tensors, taken, forward_function)

    with _replaced(record, "record_operation", note):
        yield


@contextmanager
def _watch_graphs(graph: Any, inside: Callable[[], bool], differentiated: Differentiated) -> Iterator[None]:
    """Report the gradients of operations that ``tf.gradients`` takes."""
    in_graph = gradients_util._MaybeCompile

    def taken(scope: str, operation: Any, function: Any, gradient: Any) -> Any:
        first = made(graph)
        result = in_graph(scope, operation, function, gradient)
        if operation.graph is graph and inside():
            differentiated(operation.name, first + 1, made(graph) + 1)
        return result

    with _replaced(gradients_util, "_MaybeCompile", taken):
        yield


def _operation_of(graph: Any, tensors: Any) -> Any:
    """The operation of a graph that has made the first of these tensors that are its own; None without one."""
    return next((each.op for each in tensors or () if getattr(each, "graph", None) is graph), None)


@contextmanager
def _replaced(owner: Any, name: str, thing: Any) -> Iterator[None]:
    """Inside, an attribute is another one."""
    former = getattr(owner, name)
    setattr(owner, name, thing)
    try:
        yield
    finally:
        setattr(owner, name, former)
