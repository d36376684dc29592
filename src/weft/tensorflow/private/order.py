"""Calls of Python in a graph that wait for other ranks: in the order of the program, whatever their inputs are.

TensorFlow orders operations that have the same resource among their inputs, also those of functions that a graph
calls. Without one it orders stateful operations of one graph only that have no resource at all. So all of these calls
get one resource more, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_orders: list[Any] = []


def call_in_order(call: Callable[..., Any], tensors: Sequence[Any], types: Any) -> Any:
    """As `tf.py_function`; after all such calls before it, on every rank."""
    if not tf.inside_function():  # a graph of TensorFlow 1, which takes in no resource of another one
        return tf.py_function(call, tensors, types)
    if not _orders:
        with tf.init_scope():
            _orders.append(
                tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name="weft order of calls")
            )
    return tf.py_function(lambda _, *given: call(*given), [_orders[0], *tensors], types)
