"""Every name of TensorFlow and Keras that is not public, and that weft uses: those of TensorFlow 2.21, Keras 3.15.

step_graph        a graph that is being traced, with the order of its effects
watch_gradients   which operations are made while the gradient of another one is taken
watch_layers      which operations are made by which call of a layer
writes            what an operation may write into
call              a concrete function, by its quickest way
free              a variable without its value
trained_by        what an optimizer has slots for
watch_iterators   when the next element of a data set is waited for
watch_updates     when an optimizer works
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope as in_scope
from tensorflow.python.autograph.core import ag_ctx, converter
from tensorflow.python.autograph.impl import api
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.eager import backprop, execute, imperative_grad, record
from tensorflow.python.framework import auto_control_deps, auto_control_deps_utils, func_graph, ops
from tensorflow.python.ops import array_ops, gradients_util, resource_variable_ops


@contextmanager
def step_graph(name: str) -> Iterator[Any]:
    """A graph of its own, in which operations are made inside; effects on one variable keep their order in it.

    Variables that are made inside are made at once, as outside of every graph.
    """
    graph = func_graph.FuncGraph(name, collections={})
    with (
        graph.as_default(),
        tf.variable_creator_scope(_make_variable),
        auto_control_deps.AutomaticControlDependencies(),
    ):
        yield graph


def _make_variable(others: Callable[..., Any], **arguments: Any) -> Any:
    """A variable with its value; a ``tf.function`` around would give it its value only when it runs."""
    with ops.init_scope():
        return resource_variable_ops.default_variable_creator_v2(None, **arguments)


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


def handle_of(variable: Any) -> Any:
    """The handle of a variable of TensorFlow or Keras; the thing itself if it is none."""
    value = getattr(variable, "handle", None)
    return variable if value is None else value


def key_of(handle: Any) -> int:
    """A number for a variable, by its handle: the same for every way to get at it."""
    return id(handle)


def layer_classes() -> list[type]:
    """The classes that layers derive from, of every Keras that is imported."""
    found = []
    if "keras" in sys.modules:
        found.append(sys.modules["keras"].layers.Layer)
    if "tf_keras" in sys.modules:
        found.append(sys.modules["tf_keras"].layers.Layer)
    return found


@contextmanager
def watch_layers(graph: Any, called: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, ``called(layer)`` gives the context in which each call of a layer runs, while ``graph`` is traced."""
    with ExitStack() as stack:
        for each in layer_classes():
            original = each.__call__

            @functools.wraps(original)
            def call(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if ops.get_default_graph() is not graph:
                    return _original(self, *args, **kwargs)
                with called(self):
                    return _original(self, *args, **kwargs)

            setattr(each, "__call__", call)  # noqa: B010
            stack.callback(setattr, each, "__call__", original)
        yield


def call(function: Any, inputs: Sequence[Any]) -> list[Any]:
    """What a concrete function makes of flat inputs, as a flat list."""
    found = function._call_flat(list(inputs), function.captured_inputs)
    return tf.nest.flatten(found)


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
    """The function with Python's conditions and loops over tensors as operations, as ``tf.function`` has it."""
    options = converter.ConversionOptions(recursive=True, user_requested=True)

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


def optimizer_classes() -> list[type]:
    """The classes that optimizers derive from, of every Keras that is imported."""
    found = []
    if "keras" in sys.modules:
        found.append(sys.modules["keras.src.optimizers.base_optimizer"].BaseOptimizer)
    if "tf_keras" in sys.modules:
        found.append(sys.modules["tf_keras.src.optimizers.optimizer"].Optimizer)
    return found


def loss_scale_classes() -> list[type]:
    """The classes that scale losses, of every Keras that is imported, and look whether gradients are finite."""
    return [sys.modules["keras"].optimizers.LossScaleOptimizer] if "keras" in sys.modules else []


def present_graph() -> Any:
    """The graph that is being traced; None outside of all."""
    return ops.get_default_graph() if ops.inside_function() else None


def is_symbolic(tensor: Any) -> bool:
    """Whether a tensor is one of a graph, without a value."""
    return not isinstance(tensor, ops.EagerTensor)


def in_symbolic_scope() -> bool:
    """Whether Keras only asks for the shapes of results."""
    return bool(in_scope())


def set_untracked(model: Any, name: str, value: Any) -> None:
    """Set an attribute of a Keras model that is none of its parts."""
    model.__dict__[name] = value


def is_of_keras_two(model: Any) -> bool:
    """Whether this is a model of ``tf_keras``."""
    return "tf_keras" in sys.modules and isinstance(model, sys.modules["tf_keras"].Model)


def keras_two_model() -> type:
    """The class of models of ``tf_keras``."""
    found: type = sys.modules["tf_keras"].Model
    return found


def loss_tracker(model: Any) -> Any:
    """The metric in which a Keras model keeps its mean loss."""
    return model._loss_tracker


def is_building_function() -> bool:
    """Whether a ``tf.function`` is being traced."""
    return bool(ops.inside_function())


def uninitialised(value: Any) -> bool:
    """Whether a variable has no value yet."""
    return not bool(resource_variable_ops.is_resource_variable(value) and value.is_initialized())


def free(variable: Any, named: str) -> None:
    """Give back the memory of a variable's value. Its handle is another one from now on.

    Reading it is TensorFlow's own error then, "Could not find variable ``named``"; assigning gives it a value again.
    A variable of an eager program cannot be destroyed, and without a value it reads as an empty tensor. So what the
    former handle holds becomes small, and the new one names a resource that is not there until something is assigned.
    """
    kept = underlying(variable)
    former = kept.handle
    with tf.init_scope(), tf.device(former.device):
        tf.raw_ops.AssignVariableOp(resource=former, value=tf.zeros([0], kept.dtype), validate_shape=False)
        handle = tf.raw_ops.VarHandleOp(
            dtype=kept.dtype, shape=kept.shape, shared_name=f"{named} ({next(_freed)})"
        )
    handle._handle_data = former._handle_data
    kept._handle = handle


_freed = itertools.count(1)


def underlying(variable: Any) -> Any:
    """The variable of TensorFlow that one of Keras is made of; the thing itself if it is none of Keras."""
    return getattr(variable, "_value", variable)


def trained_by(optimizer: Any) -> list[Any]:
    """The variables that an optimizer of Keras was built for, in their order; nothing for those of tf_keras."""
    return list(getattr(optimizer, "_trainable_variables", ()))


def build_optimizer(optimizer: Any, variables: Iterable[Any]) -> None:
    """Make an optimizer's own variables for these, with the names that they have after ``apply_gradients``."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        optimizer.build(list(variables))
        return
    build = (
        getattr(optimizer, "_create_all_weights", None) or optimizer.build
    )  # the older kind of tf_keras has the first
    with tf.name_scope(getattr(optimizer, "name", None) or optimizer._name):
        build([underlying(each) for each in variables])


def context_exists() -> bool:
    """Whether TensorFlow has begun to work, so that its threads cannot be set any more."""
    from tensorflow.python.eager import context

    return context.context()._context_handle is not None


def watch_iterators(before: Callable[[], int], after: Callable[[], int]) -> Callable[[], None]:
    """Call these around whatever gives the next element of a data set, in graphs too; the result ends that."""
    original = iterator_ops.OwnedIterator._next_internal

    @functools.wraps(original)
    def next_element(self: Any) -> Any:
        if tf.executing_eagerly():
            before()
            try:
                return original(self)
            finally:
                after()
        with tf.control_dependencies([tf.py_function(before, [], tf.int32)]):
            found = original(self)
        tensors = [each for each in tf.nest.flatten(found, expand_composites=True) if tf.is_tensor(each)]
        with tf.control_dependencies(tensors):
            tf.py_function(after, [], tf.int32)
        return found

    def undo() -> None:
        if iterator_ops.OwnedIterator._next_internal is next_element:
            iterator_ops.OwnedIterator._next_internal = original

    iterator_ops.OwnedIterator._next_internal = next_element
    return undo


def watch_updates(before: Callable[[], int], after: Callable[[], int]) -> Callable[[], None]:
    """Call these around whatever an optimizer does to variables, in graphs too; the result ends that.

    In a graph an update has ended when the variables have their new values.
    """
    stack = ExitStack()
    for base in optimizer_classes():
        stack.callback(_watch_update(base, before, after))
    return stack.close


def _watch_update(base: type, before: Callable[[], int], after: Callable[[], int]) -> Callable[[], None]:
    name = "apply" if hasattr(base, "apply") else "apply_gradients"
    original = getattr(base, name)
    depth: list[Any] = []

    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        if depth:  # a loss scale calls its own optimizer
            return original(self, *args, **kwargs)
        depth.append(self)
        try:
            if tf.executing_eagerly():
                before()
                try:
                    return original(self, *args, **kwargs)
                finally:
                    after()
            with tf.control_dependencies([tf.py_function(before, [], tf.int32)]):
                result = original(self, *args, **kwargs)
            values = [tf.convert_to_tensor(each) for each in trained_by(self)]
            with tf.control_dependencies([*values, tf.convert_to_tensor(self.iterations)]):
                tf.py_function(after, [], tf.int32)
            return result
        finally:
            depth.pop()

    def undo() -> None:
        if getattr(base, name) is update:
            setattr(base, name, original)

    setattr(base, name, update)
    return undo
