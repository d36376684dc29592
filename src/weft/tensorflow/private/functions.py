"""Functions that TensorFlow has traced: how they are called, and which of them XLA compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx, converter
from tensorflow.python.autograph.impl import api
from tensorflow.python.eager.polymorphic_function import (
    attributes,
    compiler_ir,
    concrete_function,
    function_context,
)
from tensorflow.python.eager.polymorphic_function.polymorphic_function import OptionalXlaContext
from tensorflow.python.framework import op_def_registry, ops
from tensorflow.python.ops import control_flow_util

from weft.tensorflow.private.graphs import is_building_function, made, number_of, tracing_a_step
from weft.tensorflow.private.variables import handle_of, handles_made


def call(function: Any, inputs: Sequence[Any]) -> list[Any]:
    """The results of a concrete function for flat inputs, as a flat list."""
    found = function._call_flat(list(inputs), function.captured_inputs)
    return tf.nest.flatten(found)


def call_with(function: Any, inputs: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
    """The same with other variables and tensors than those that the function knows, in their order."""
    return tf.nest.flatten(function._call_flat(list(inputs), [handle_of(each) for each in captured]))


def operation_of(function: Any, kinds: Sequence[str]) -> str:
    """An operation of a concrete function, or of those that it calls, with one of these in its name; empty without."""
    definition = function.graph.as_graph_def()
    nodes = [*definition.node, *(node for each in definition.library.function for node in each.node_def)]
    return next((node.op for node in nodes if any(kind in node.op for kind in kinds)), "")


HARMLESS = (
    "ReadVariable", "AssignVariable", "AssignAddVariable", "AssignSubVariable", "ResourceApply", "ResourceSparseApply",
    "ResourceScatter", "ResourceGather", "ResourceStridedSliceAssign", "VariableShape", "VarIsInitialized",
    "VarHandle", "PartitionedCall", "While", "If", "Case", "Assert", "RngReadAndSkip", "RngSkip", "StatefulUniform",
    "StatefulStandardNormal", "StatefulTruncatedNormal", "LookupTableFind", "LookupTableSize", "Placeholder", "NoOp",
    "TensorArray",
)  # fmt: skip
"""Parts of the names of operations whose only effects are on variables that they are given."""


def effect_of(function: Any) -> str:
    """An operation of a concrete function, or of those that it calls, that does more than to compute and to change
    variables: it draws random numbers of its own, calls Python, or prints; empty without one."""
    definition = function.graph.as_graph_def()
    nodes = [*definition.node, *(node for each in definition.library.function for node in each.node_def)]
    for node in nodes:
        known = op_def_registry.get(node.op)
        if known is not None and known.is_stateful and not any(each in node.op for each in HARMLESS):
            return str(node.op)
    return ""


def call_in_graph(function: Any, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The same in a graph that is being traced, and the operations that are done when all of it is.

    Whoever waits for the call alone waits for its effects on variables, and not for its outputs: TensorFlow puts the
    function's operations in its place. So one more operation takes all outputs.
    """
    graph = ops.get_default_graph()
    before = made(graph)
    found = call(function, inputs)
    tensors = [tensor for tensor in found if tf.is_tensor(tensor)]
    done = [
        each
        for each in graph.get_operations()[-2:]
        if number_of(each) > before and "PartitionedCall" in each.type
    ]
    if tensors:
        done = [tensors[0].op, tf.raw_ops.IdentityN(input=tensors)[0].op]
    return found, done


def with_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with Python's conditions and loops over tensors as operations, as ``tf.function`` has it.

    No feature beside that: with those that order effects a function returns copies of its tensors, which have no masks.
    """
    options = converter.ConversionOptions(recursive=True, user_requested=True, optional_features=())

    def converted(*args: Any, **kwargs: Any) -> Any:
        with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED, options=options):
            return api.converted_call(function, args, kwargs, options=options)

    return converted


def library_of(graph_def: Any, nodes: Sequence[Any]) -> list[Any]:
    """The functions of a graph's library that nodes call, with those that these call."""
    known = {each.signature.name: each for each in graph_def.library.function}
    found: dict[str, Any] = {}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        for attribute in node.attr.values():
            named = [attribute.func.name] if attribute.HasField("func") else []
            named += [each.name for each in attribute.list.func]
            for name in named:
                if name in known and name not in found:
                    found[name] = known[name]
                    todo.extend(known[name].node_def)
    return list(found.values())


def wants_xla() -> bool:
    """True if XLA shall compile the function that is being traced, or one around it."""
    return is_building_function() and bool(
        control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph())
    )


def traced_for_xla(wanted: bool) -> Any:
    """A context: what is traced inside is made for XLA, where that is wanted."""
    return OptionalXlaContext(wanted)


def xla_hindrance(function: Any) -> str | None:
    """Why XLA does not compile a concrete function, in one line; None if it does. Its variables have values."""
    try:
        compiler_ir.from_concrete_function(function)(stage="hlo")
    except Exception as error:  # whatever it is, the function can run without XLA
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


WITH_MESSAGES = "_weft_has_messages"
"""The attribute of graphs in which ranks send each other messages."""


def keep_from_xla() -> None:
    """The function that is being traced, and those around it, will not be compiled as a whole: it has messages."""
    graph = ops.get_default_graph()
    while graph is not None:
        setattr(graph, WITH_MESSAGES, True)
        graph = getattr(graph, "outer_graph", None)


@functools.cache
def watch_functions() -> None:
    """From now on functions whose graph has messages are made without XLA, whatever they ask for.

    Functions that a step calls are traced anew if variables have got other handles since: they know the former ones.
    """
    original = concrete_function.ConcreteFunction.from_func_graph
    make_context = function_context.make_function_context

    def make_function_context(*args: Any, **kwargs: Any) -> Any:
        found = make_context(*args, **kwargs)
        return found._replace(scope_type=(found.scope_type, handles_made())) if tracing_a_step() else found

    def from_func_graph(graph: Any, function_type: Any, attrs: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(graph, WITH_MESSAGES, False) and (attrs or {}).get(attributes.XLA_COMPILE):
            attrs = {**attrs, attributes.XLA_COMPILE: False}
        return original(graph, function_type, attrs, *args, **kwargs)

    concrete_function.ConcreteFunction.from_func_graph = staticmethod(from_func_graph)
    function_context.make_function_context = make_function_context


def context_exists() -> bool:
    """True if TensorFlow has begun to work, so that its threads cannot be set any more."""
    from tensorflow.python.eager import context

    return context.context()._context_handle is not None
