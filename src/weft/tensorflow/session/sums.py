"""Small sums over the ranks of an axis, at once or from inside of a graph: norms, flags."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch
import torch.distributed as dist

from weft.tensorflow.session.session import Session
from weft.tensorflow.session.wire import to_torch


def sum_over(session: Session, axis: str, numbers: Any, what: str) -> Any:
    """The sum of the ranks' numbers (float64 or float32, [n]) along an axis, on each of them.

    Every rank of the axis calls this in the same order. ``what``: what this is for, as reports of waits have it.
    """
    if len(session.peers(axis)) == 1:
        return numbers

    def add_up(given: Any) -> Any:
        with session.guarded(), session.doing(what):
            total = to_torch(given).to(torch.float64).clone()
            dist.all_reduce(total, group=session.group(axis))
            return tf.constant(total.tolist(), given.dtype)

    if tf.executing_eagerly():
        return add_up(numbers)
    found = tf.py_function(add_up, [numbers], numbers.dtype)
    found.set_shape(numbers.shape)
    return found
