"""Objects of a TensorFlow process that go to other ranks: tensors among them are TensorFlow's on both sides."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch

from weft.session.travel import Travel
from weft.tensorflow.session.wire import from_torch, to_torch


def outgoing(value: Any) -> Any:
    """The object with tensors of torch in place of tensors and variables of TensorFlow and Keras."""
    return tf.nest.map_structure(
        lambda leaf: to_torch(tf.convert_to_tensor(leaf)) if _is_tensor(leaf) else leaf, value
    )


def incoming(value: Any) -> Any:
    """The object with tensors of TensorFlow in place of those of torch."""
    return tf.nest.map_structure(
        lambda leaf: from_torch(leaf) if isinstance(leaf, torch.Tensor) else leaf, value
    )


def _in_graph() -> bool:
    return not tf.executing_eagerly()


def _is_tensor(leaf: Any) -> bool:
    return tf.is_tensor(leaf) or isinstance(leaf, tf.Variable) or hasattr(leaf, "__tf_tensor__")


TRAVEL = Travel(
    _in_graph,
    "while a graph is traced: call it outside of weft.step and tf.function",
    outgoing=outgoing,
    incoming=incoming,
)
"""What the session of a TensorFlow process has."""
