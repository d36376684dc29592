"""One microbatch of a step as a graph: traced once, forward and backward, with what belongs to which layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import tensorflow as tf

from weft.errors import UsageError
from weft.tensorflow import private
from weft.tensorflow.trace.cost import bytes_of, work_s
from weft.tensorflow.trace.operations import Operation, Record, Value, Variable

UNSENDABLE = (tf.resource, tf.variant, tf.string)


@dataclass
class Marks:
    """The marks of a step that is traced: ranges of operations, by the numbers of the first and of the next one.

    Attributes:
        models: The models that are called; what lies inside of such a range is split.
        layers: The calls of layers: (name, first, next, whether other layers were called inside).
        gradients: (the operation whose gradient is taken, first, next).
        asked: (keys of the variables, their gradients) of each call that took gradients.
        by_hand: (partition, first, next).
    """

    models: list[tuple[Any, int, int]] = field(default_factory=list)
    layers: list[tuple[str, int, int, bool]] = field(default_factory=list)
    gradients: list[tuple[str, int, int]] = field(default_factory=list)
    asked: list[tuple[list[int], list[Any]]] = field(default_factory=list)
    by_hand: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Capture:
    """A step, traced.

    Attributes:
        graph: Its graph.
        arguments: The operations that stand for the tensors that the step is called with, by their numbers.
        result: What the step returns, with tensors of the graph.
        record: Its operations as plain records.
        operations: The graph's operations, in the order of the record.
        gradients: Of each tensor that the step returns, flat, the key of the variable whose gradient it is.
        feeds: Of each placeholder that is no argument and no variable, the tensor outside.
        variables: The handles of the variables, in the order of the record.
    """

    graph: Any
    arguments: list[int]
    result: Any
    record: Record
    operations: list[Any]
    gradients: list[int | None]
    feeds: dict[int, Any]
    variables: list[Any]
    marks: Marks


_tracing: list[tuple[Any, Marks, list[bool]]] = []


def tracing() -> Marks | None:
    """The marks of the step that is being traced, if one is."""
    return _tracing[-1][1] if _tracing else None


@contextmanager
def aside() -> Iterator[None]:
    """Inside, models are called as in a step; nothing is noted of it."""
    _tracing.append((tf.Graph(), Marks(), []))
    try:
        yield
    finally:
        _tracing.pop()


@contextmanager
def noted(add: Callable[[int, int], None]) -> Iterator[None]:
    """``add(first, next)`` gets the operations that were made inside, where a step is being traced."""
    if not _tracing:
        yield
        return
    graph = _tracing[-1][0]
    first = private.made(graph)
    yield
    add(first + 1, private.made(graph) + 1)


@contextmanager
def _layer_call(layer: Any) -> Iterator[None]:
    graph, marks, open_calls = _tracing[-1]
    if open_calls:
        open_calls[-1] = True
    open_calls.append(False)
    first = private.made(graph)
    try:
        yield
    finally:
        composite = open_calls.pop()
        if private.made(graph) > first:
            marks.layers.append((_path(layer), first + 1, private.made(graph) + 1, composite))


def _path(layer: Any) -> str:
    return str(getattr(layer, "path", None) or layer.name)


def capture(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[tf.TensorSpec],
    name_of: Callable[[Any], str | None],
) -> Capture:
    """Trace a step for one microbatch.

    Args:
        name: The step's name.
        function: Called with the placeholders of the tensors.
        arguments: What they are like.
        name_of: From a variable's handle to its name, if it belongs to a model that is split; None for others.
    """
    marks = Marks()
    with private.step_graph(name) as graph:
        _tracing.append((graph, marks, []))
        try:
            placeholders = [
                private.placeholder(spec.dtype, spec.shape, f"argument_{index}")
                for index, spec in enumerate(arguments)
            ]
            with (
                private.watch_gradients(
                    graph,
                    lambda source, first, end: marks.gradients.append((source, first, end)),
                    lambda targets, sources, found: marks.asked.append(
                        ([private.key_of(private.handle_of(source)) for source in sources], list(found))
                    ),
                ),
                private.watch_layers(graph, _layer_call),
                private.variables_wait(),
            ):
                result = function(*placeholders)
                result = tf.nest.map_structure(dense, result)
        finally:
            _tracing.pop()
    return _read(graph, placeholders, result, marks, name_of)


def dense(value: Any) -> Any:
    """A gradient of rows as a dense tensor, so that those of microbatches can be summed."""
    return tf.convert_to_tensor(value) if isinstance(value, tf.IndexedSlices) else value


def _read(
    graph: Any, placeholders: list[Any], result: Any, marks: Marks, name_of: Callable[[Any], str | None]
) -> Capture:
    operations = graph.get_operations()
    index = {operation.name: number for number, operation in enumerate(operations)}
    outside = {inside.op.name: tensor for tensor, inside in private.captures(graph)}
    variables: list[Any] = []
    number_of_variable: dict[str, int] = {}
    for name, tensor in outside.items():
        if tensor.dtype == tf.resource:
            number_of_variable[name] = len(variables)
            variables.append(tensor)
    records = [_operation(operation, index, number_of_variable) for operation in operations]
    for operation in [*(tensor.op for tensor in placeholders)]:
        records[index[operation.name]].feed = True
    feeds = {}
    for name, tensor in outside.items():
        if name not in number_of_variable:
            records[index[name]].feed = True
            feeds[index[name]] = tensor
    _mark(operations, records, index, marks)
    record = Record(records, [_variable(handle, name_of(handle)) for handle in variables])
    keys = {private.key_of(handle): number for number, handle in enumerate(variables)}
    leaves = tf.nest.flatten(result)
    of_tensor = _gradients_of(records, index, marks, keys)
    for leaf in leaves:
        if tf.is_tensor(leaf) and getattr(leaf, "graph", None) is graph:
            value = Value(index[leaf.op.name], leaf.value_index)
            record.results.append(value)
            record.gradients.append(of_tensor.get(value, frozenset()))
        else:
            record.results.append(None)
            record.gradients.append(frozenset())
    known = [{private.key_of(variables[number]) for number in each} for each in record.gradients]
    gradients = _one_each(leaves, known, marks)
    record.gradients = [frozenset() if key not in keys else frozenset({keys[key]}) for key in gradients]
    numbers = [index[tensor.op.name] for tensor in placeholders]
    return Capture(graph, numbers, result, record, operations, gradients, feeds, variables, marks)


def _one_each(leaves: list[Any], known: list[set[int]], marks: Marks) -> list[int | None]:
    """The key of the variable whose gradient each result is, a variable without a gradient among them.

    Results that stand in the order in which someone asked for them are those of these variables, one by one.
    """
    found = [next(iter(each)) if len(each) == 1 else None for each in known]
    for sources, gradients in marks.asked:
        count = len(sources)
        for start in range(len(leaves) - count + 1):
            fits = all(
                (leaves[start + i] is None and gradients[i] is None) or sources[i] in known[start + i]
                for i in range(count)
            )
            if fits:
                found[start : start + count] = sources
                break
    return found


def _operation(operation: Any, index: dict[str, int], variables: dict[str, int]) -> Operation:
    resources = {
        tensor.name: variables[tensor.op.name] for tensor in operation.inputs if tensor.op.name in variables
    }
    beside = []
    if "_class" in operation.node_def.attr:
        for each in operation.get_attr("_class"):
            other = each.decode().removeprefix("loc:@")
            if other in index:
                beside.append(index[other])
    return Operation(
        name=operation.name,
        kind=operation.type,
        inputs=tuple(Value(index[tensor.op.name], tensor.value_index) for tensor in operation.inputs),
        controls=tuple(index[other.name] for other in operation.control_inputs),
        sizes=tuple(bytes_of(tensor) for tensor in operation.outputs),
        sendable=tuple(tensor.dtype not in UNSENDABLE for tensor in operation.outputs),
        stateful=private.is_stateful(operation) and operation.type != "Placeholder",
        reads=frozenset(resources.values()),
        writes=frozenset(resources[name] for name in private.writes(operation) if name in resources),
        variable=variables.get(operation.name, -1),
        beside=tuple(beside),
        work_s=work_s(operation),
    )


def _mark(operations: list[Any], records: list[Operation], index: dict[str, int], marks: Marks) -> None:
    """Mark the operations with the layer, the gradient and the partition that they belong to."""
    at = {private.number_of(operation): number for number, operation in enumerate(operations)}

    def each(first: int, end: int) -> Iterator[Operation]:
        for number in range(first, end):
            if number in at:
                yield records[at[number]]

    for number, (_, first, end) in enumerate(marks.models):
        for record in each(first, end):
            record.unit = f"model{number}*"
    calls: dict[str, int] = {}
    for name, first, end, composite in sorted(marks.layers, key=lambda call: (call[1], -call[2])):
        calls[name] = calls.get(name, 0) + 1
        label = f"{name}#{calls[name]}" if calls[name] > 1 else name
        for record in each(first, end):
            if record.unit:
                record.unit = f"{label}*" if composite else label
    for source, first, end in marks.gradients:
        for record in each(first, end):
            if source in index:
                record.gradient_of = index[source]
    for partition, first, end in marks.by_hand:
        for record in each(first, end):
            record.partition = partition


def _variable(handle: Any, name: str | None) -> Variable:
    shape, dtype = private.type_of(handle)
    elements = prod(shape)
    return Variable(name or "", elements * (dtype.size or 0), elements, name is not None)


def _gradients_of(
    records: list[Operation], index: dict[str, int], marks: Marks, keys: dict[int, int]
) -> dict[Value, frozenset[int]]:
    """The variables whose gradient each value is, or follows from element by element."""
    found: dict[Value, frozenset[int]] = {}
    for sources, gradients in marks.asked:
        for key, gradient in zip(sources, gradients, strict=False):
            if gradient is None or key not in keys:
                continue
            tensors = [gradient.values] if isinstance(gradient, tf.IndexedSlices) else [gradient]
            for tensor in tensors:
                if tensor.op.name in index:
                    value = Value(index[tensor.op.name], tensor.value_index)
                    found[value] = found.get(value, frozenset()) | {keys[key]}
    if not found:
        return found
    for number, record in enumerate(records):
        if record.gradient_of >= 0 or len(record.sizes) != 1 or Value(number, 0) in found:
            continue
        from_gradients = [value for value in record.inputs if value in found]
        if len(from_gradients) == 1:
            source = from_gradients[0]
            grows = record.kind == "UnsortedSegmentSum"
            if grows or records[source.operation].sizes[source.output] == record.sizes[0]:
                found[Value(number, 0)] = found[source]
    return found


def check_no_call_outside(what: str) -> None:
    """Refuse what belongs into a step.

    Raises:
        UsageError: No step is being traced.
    """
    if not _tracing:
        raise UsageError(f"{what} was called outside of a weft.step function: call it inside of one")
