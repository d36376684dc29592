"""Objects of a TensorFlow process that go to other ranks: tensors among them are TensorFlow's on both sides."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import torch

from weft.communication.serialise import MAX_DEPTH
from weft.session.travel import Travel
from weft.tensorflow.session.wire import from_torch, to_torch


def outgoing(value: Any) -> Any:
    """The object with tensors of torch in place of tensors and variables of TensorFlow and Keras.

    What no message can hold stays as it is: whoever writes the message says where it lies.
    """
    return _mapped(value, lambda leaf: to_torch(tf.convert_to_tensor(leaf)) if _is_tensor(leaf) else leaf)


def incoming(value: Any) -> Any:
    """The object with tensors of TensorFlow in place of those of torch."""
    return _mapped(value, lambda leaf: from_torch(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def _mapped(value: Any, change: Callable[[Any], Any], above: frozenset[int] = frozenset()) -> Any:
    """The object with other leaves. ``tf.nest`` would sort keys, which may be of types that have no order."""
    if len(above) > MAX_DEPTH or id(value) in above:
        return value
    inside = above | {id(value)}
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _mapped(item, change, inside)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change, inside) for item in value)
    return change(value)


def _in_graph() -> bool:
    return not tf.executing_eagerly()


def _is_tensor(leaf: Any) -> bool:
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
        return False
    return tf.is_tensor(leaf) or isinstance(leaf, tf.Variable) or hasattr(leaf, "__tf_tensor__")


TRAVEL = Travel(
    _in_graph,
    "while a graph is traced: call it outside of weft.step and tf.function",
    outgoing=outgoing,
    incoming=incoming,
)
"""What the session of a TensorFlow process has."""
