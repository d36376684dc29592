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
        reduction: The loss that says what a microbatch weighs; None for samples.
        by_rows: It is a gradient by rows.
        shape: That of its whole, where it is known before the step runs; else a result has it.
    """

    reduction: Reduction | None = None
    by_rows: bool = False
    shape: tuple[int, ...] | None = None


def rows_of(value: Any) -> tuple[Any, Any, Any]:
    """A gradient by rows as its rows, their places and the shape of the whole; all else with neither of these."""
    if not isinstance(value, tf.IndexedSlices):
        return value, None, None
    return value.values, value.indices, value.dense_shape


def known_of(places: Any, shape: Any, reduction: Reduction | None) -> Returned:
    """The description of a tensor that :func:`rows_of` has taken apart."""
    known = None if shape is None else tf.get_static_value(shape)
    return Returned(
        reduction, places is not None, None if known is None else tuple(int(size) for size in known)
    )


def with_rows(values: Any, places: Any, shape: Any, known: Returned) -> Any:
    """The gradient that :func:`rows_of` has taken apart."""
    if not known.by_rows:
        return values
    return tf.IndexedSlices(
        values, places, shape if known.shape is None else tf.constant(known.shape, tf.int64)
    )
