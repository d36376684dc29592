"""Tensors that a step returns, and gradients by rows among them.

TensorFlow's gradient of an embedding is a ``tf.IndexedSlices``: one row for each word of the batch, a word's several
times. Optimizers of Keras take it for another thing than the dense tensor (Adam squares each row, and not their sum).
So it stays one: the rows of all microbatches after one another are those of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from weft.tensorflow.trace.denominators import Reduction


@dataclass(frozen=True)
class Returned:
    """One tensor of a step's result.

    Attributes:
        reduction: The loss that tells what a microbatch weighs; None for samples.
        shape: That of the whole, where there are rows of it; else None.
    """

    reduction: Reduction | None = None
    shape: tuple[int, ...] | None = None


def rows_of(value: Any) -> tuple[Any, Any, tuple[int, ...] | None]:
    """A gradient by rows as its rows, their places and the shape of the whole; all else with no places and no shape.

    It becomes dense where its shape is known only when the step runs.
    """
    if not isinstance(value, tf.IndexedSlices):
        return value, None, None
    shape = None if value.dense_shape is None else tf.get_static_value(value.dense_shape)
    if shape is None:
        return tf.convert_to_tensor(value), None, None
    return value.values, value.indices, tuple(int(size) for size in shape)


def with_rows(values: Any, places: Any, shape: tuple[int, ...] | None) -> Any:
    """The gradient that :func:`rows_of` has taken apart."""
    return values if shape is None else tf.IndexedSlices(values, places, tf.constant(shape, tf.int64))
