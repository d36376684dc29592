"""Variables of TensorFlow and Keras: their handles, and those that have no memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.initializers.initializer import Initializer
from tensorflow.python.framework import ops
from tensorflow.python.ops import resource_variable_ops


def handle_of(variable: Any) -> Any:
    """The handle of a variable of TensorFlow or Keras; the thing itself if it is none."""
    value = getattr(variable, "handle", None)
    return variable if value is None else value


def key_of(handle: Any) -> int:
    """A number for a variable, by its handle: the same for every way to get at it."""
    return id(handle)


def underlying(variable: Any) -> Any:
    """The variable of TensorFlow that one of Keras is made of; the thing itself if it is none of Keras."""
    return getattr(variable, "_value", variable)


def bytes_of(variable: Any) -> int:
    """The bytes of a variable's value."""
    kept = underlying(variable)
    return int(kept.shape.num_elements() or 0) * int(kept.dtype.size)


def uninitialised(value: Any) -> bool:
    """True if a variable has no value yet."""
    return not bool(resource_variable_ops.is_resource_variable(value) and value.is_initialized())


def free(variable: Any, named: str) -> None:
    """Give back the memory of a variable's value. Its handle is another one from now on.

    Reading it is TensorFlow's own error then, "Could not find variable ``named``"; assigning gives it a value again.
    A variable of an eager program cannot be destroyed, and without a value it reads as an empty tensor. So what the
    former handle holds becomes small, and the new one names a resource that is not there until something is assigned.
    """
    kept = underlying(variable)
    with tf.init_scope(), tf.device(kept.handle.device):
        tf.raw_ops.AssignVariableOp(
            resource=kept.handle, value=tf.zeros([0], kept.dtype), validate_shape=False
        )
    if _waiting.pop(id(kept), None) is not None:
        del kept._make
    _take_new_handle(kept, named)


def _take_new_handle(variable: Any, named: str) -> None:
    """Let a variable have the handle of something that is not there; whoever reads it gets this name in an error."""
    former = variable.handle
    with tf.init_scope(), tf.device(former.device):
        handle = tf.raw_ops.VarHandleOp(
            dtype=variable.dtype, shape=variable.shape, shared_name=f"{named} ({_new_handles[0] + 1})"
        )
    handle._handle_data = former._handle_data
    variable._handle = handle
    _new_handles[0] += 1


_new_handles = [0]


def handles_made() -> int:
    """The number of variables that have got another handle so far."""
    return _new_handles[0]


class WaitingVariable(resource_variable_ops.UninitializedVariable):
    """A variable that has no memory until someone makes its value, or reads it outside of graphs."""

    def __init__(self, *, make: Callable[[], Any], named: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._make = make
        _take_new_handle(self, f"{named}, which has no value before the first step")
        _waiting[id(self)] = self

    def make_value(self) -> None:
        """Give it its first value, unless it has one."""
        if _waiting.pop(id(self), None) is not None:
            with ops.init_scope():
                if not self.is_initialized():
                    self.assign(self._make())
            del self._make  # which may hold a file

    def take_later(self, make: Callable[[], Any]) -> None:
        """Its first value is what ``make()`` will give."""
        self._make = make

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        if tf.executing_eagerly():
            self.make_value()
        return super()._read_variable_op(no_copy)


_waiting: weakref.WeakValueDictionary[int, WaitingVariable] = weakref.WeakValueDictionary()


def waiting() -> list[WaitingVariable]:
    """The variables whose values were not made yet."""
    return list(_waiting.values())


def waits(variable: Any) -> bool:
    """True if the value of a variable was not made yet."""
    return id(underlying(variable)) in _waiting


def has_type(handle: Any) -> bool:
    """True for the handle of a variable whose values can be read and sent; other resources are tables, say."""
    data = getattr(handle, "_handle_data", None)
    if data is None or len(data.shape_and_type) != 1:
        return False
    return bool(tf.dtypes.as_dtype(data.shape_and_type[0].dtype) != tf.string)


def read(handle: Any) -> Any:
    """The value of a variable, by its handle."""
    dtype = tf.dtypes.as_dtype(handle._handle_data.shape_and_type[0].dtype)
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def copied(captured: Any) -> Any:
    """A new variable with the value of another one, given its handle; what is none, as it is."""
    data = getattr(captured, "_handle_data", None)
    if captured.dtype != tf.resource or data is None or not data.shape_and_type:
        return captured
    waits = next((each for each in _waiting.values() if each.handle is captured), None)
    with ops.init_scope():
        if waits is not None:
            value = waits._make()
        else:
            dtype = tf.dtypes.as_dtype(data.shape_and_type[0].dtype)
            value = tf.raw_ops.ReadVariableOp(resource=captured, dtype=dtype)
        return tf.Variable(value, trainable=False)


_delays: list[bool] = []


def delays() -> bool:
    """True inside of :func:`variables_wait`."""
    return bool(_delays)


@contextmanager
def variables_wait(of_layers: bool = True) -> Iterator[None]:
    """Inside, variables of Keras 3 wait for their values, where these depend on a number as a seed alone.

    ``of_layers``: those that ``add_weight`` makes; else all.
    """
    layer, kind = keras.layers.Layer, keras.Variable
    add_weight, initialise = layer.add_weight, kind._initialize_with_initializer
    depth = [0 if of_layers else 1]

    @functools.wraps(add_weight)
    def add(self: Any, *args: Any, **kwargs: Any) -> Any:
        depth[0] += 1
        try:
            return add_weight(self, *args, **kwargs)
        finally:
            depth[0] -= 1

    def wait(self: Any, initializer: Any) -> None:
        if not depth[0] or not _can_wait(initializer):
            initialise(self, initializer)
            return
        shape, dtype = self._shape, self._dtype
        variable = WaitingVariable(
            make=lambda: initializer(shape, dtype=dtype), named=self.path, shape=shape, dtype=dtype,
            trainable=self.trainable, name=self.name, aggregation=self._map_aggregation(self.aggregation),
            synchronization=self._map_synchronization(self.synchronization),
        )  # fmt: skip
        self._initialize(variable)

    layer.add_weight, kind._initialize_with_initializer = add, wait
    _delays.append(True)
    try:
        yield
    finally:
        _delays.pop()
        layer.add_weight, kind._initialize_with_initializer = add_weight, initialise


def _can_wait(initializer: Any) -> bool:
    """True if an initialiser gives the same values whenever it is called: one of Keras's own, without a state."""
    own = isinstance(initializer, Initializer) and type(initializer).__module__.startswith("keras.src.")
    return own and isinstance(getattr(initializer, "seed", 0), int)
