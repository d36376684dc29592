"""A step as a graph that is being traced: its operations, and their effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps, auto_control_deps_utils, func_graph, ops
from tensorflow.python.ops import array_ops, resource_variable_ops


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
    """True if a step's graph is being traced."""
    return bool(_step_graphs)


def placeholder(dtype: Any, shape: Any, name: str) -> Any:
    """An input of the graph that is being traced."""
    return array_ops.placeholder(dtype, shape, name)


def captures(graph: Any) -> list[tuple[Any, Any]]:
    """The outside tensors that a graph uses: (the tensor or the variable's handle there, its placeholder inside)."""
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
    """True if an operation does something beside computing its outputs from its inputs."""
    return bool(operation.op_def.is_stateful)


def writes(operation: Any) -> set[str]:
    """The names of the resources among an operation's inputs that it may write into."""
    _, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
    return {tensor.name for tensor in written}


def present_graph() -> Any:
    """The graph that is being traced; None outside of all."""
    return ops.get_default_graph() if ops.inside_function() else None


def is_symbolic(tensor: Any) -> bool:
    """True if a tensor is one of a graph, without a value."""
    return not isinstance(tensor, ops.EagerTensor)


def is_of_graph(thing: Any) -> bool:
    """True for a tensor of a graph."""
    return isinstance(thing, (tf.Tensor, tf.IndexedSlices)) and not isinstance(thing, ops.EagerTensor)


def is_building_function() -> bool:
    """True if a ``tf.function`` is being traced."""
    return bool(ops.inside_function())
