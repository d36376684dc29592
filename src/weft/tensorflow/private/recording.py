"""When TensorFlow waits for the next element of a data set, and when an optimizer works: for a recording.

XLA compiles no calls of Python. What is traced for XLA goes without them, and is not recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

from weft.tensorflow.private.functions import wants_xla
from weft.tensorflow.private.models import optimizer_classes, trained_by
from weft.tensorflow.private.order import call_in_order


def watch_iterators(before: Callable[[], int], after: Callable[[], int]) -> Callable[[], None]:
    """Call these around whatever gives the next element of a data set, in graphs too; the result ends that."""
    original = iterator_ops.OwnedIterator._next_internal

    @functools.wraps(original)
    def next_element(self: Any) -> Any:
        if wants_xla():
            return original(self)
        if tf.executing_eagerly():
            before()
            try:
                return original(self)
            finally:
                after()
        with tf.control_dependencies([call_in_order(before, [], tf.int32)]):
            found = original(self)
        tensors = [each for each in tf.nest.flatten(found, expand_composites=True) if tf.is_tensor(each)]
        with tf.control_dependencies(tensors):
            call_in_order(after, [], tf.int32)
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
        if depth or wants_xla():  # a loss scale calls its own optimizer
            return original(self, *args, **kwargs)
        depth.append(self)
        try:
            if tf.executing_eagerly():
                before()
                try:
                    return original(self, *args, **kwargs)
                finally:
                    after()
            with tf.control_dependencies([call_in_order(before, [], tf.int32)]):
                result = original(self, *args, **kwargs)
            values = [tf.convert_to_tensor(each) for each in trained_by(self)]
            with tf.control_dependencies([*values, tf.convert_to_tensor(self.iterations)]):
                call_in_order(after, [], tf.int32)
            return result
        finally:
            depth.pop()

    def undo() -> None:
        if getattr(base, name) is update:
            setattr(base, name, original)

    setattr(base, name, update)
    return undo
