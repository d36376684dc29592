"""Gradient norms over the ranks of a pipeline, each of which has the gradients of its own variables only."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from weft.errors import UsageError
from weft.tensorflow.output import is_gradient
from weft.tensorflow.session.session import Session, present, session
from weft.tensorflow.session.wire import sum_over
from weft.tensorflow.trace import capture


def global_norm(gradients: Sequence[Any]) -> Any:
    """The norm of the gradients of all ranks together, on each of them: sqrt of the sum of all squares.

    ``gradients``: those of this rank's variables; None counts nothing. Every rank of the pipeline calls this.
    """
    values = [_values(each) for each in gradients if each is not None]
    kind = tf.float64 if any(each.dtype == tf.float64 for each in values) else tf.float32
    squares = [tf.nn.l2_loss(tf.cast(each, kind)) * 2.0 for each in values]
    own = tf.reshape(tf.add_n(squares) if squares else tf.constant(0.0), [1])
    return tf.sqrt(sum_over(session(), "pp", own, "the norm of the gradients")[0])


def clip_by_global_norm(
    gradients: Sequence[Any], clip_norm: Any, use_norm: Any = None
) -> tuple[list[Any], Any]:
    """The gradients scaled so that the norm of all ranks' together is at most ``clip_norm``; and that norm before.

    Like ``tf.clip_by_global_norm``: if the norm is no finite number, all gradients are NaN. Every rank of the pipeline
    calls this outside of the step. Inside of one the gradients of all ranks are there, and TensorFlow's own does it.
    """
    if capture.tracing() is not None:
        return _clip(gradients, clip_norm, use_norm)
    norm = global_norm(gradients) if use_norm is None else use_norm
    if session().mesh.pp == 1 or gradients:
        return _clip(gradients, clip_norm, norm)
    return [], norm


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _look_like_gradients(joined: Session, tensors: Sequence[Any]) -> bool:
    """True if each of these tensors has the shape of another variable that this rank trains of a split model."""
    shapes = Counter(
        tuple(variable.shape)
        for model in joined.models
        if model.partitioned
        for variable in model.trainable_variables
    )
    given = Counter(tuple(each.shape) for each in tensors if each is not None and each.shape.rank is not None)
    return bool(given) and given <= shapes


_clip, _norm = tf.clip_by_global_norm, tf.linalg.global_norm


def watch_clipping() -> None:
    """From now on TensorFlow's own functions count all ranks' gradients, where they are given those of a step.

    What has been made of these is refused, where it looks like gradients: it would be the norm of one rank's.
    """

    def concerns(tensors: Any, name: str) -> bool:
        joined = present()
        if joined is None or joined.mesh.pp == 1 or capture.tracing() is not None:
            return False
        if any(map(is_gradient, tensors)):
            return True
        if _look_like_gradients(joined, tensors):
            raise UsageError(
                f"tf.{name} is given tensors that are as large as this rank's variables, and would count "
                f"this rank's only: if they are gradients of a split model, call weft.{name.rpartition('.')[2]} on "
                "every rank, which counts those of all ranks"
            )
        return False

    @functools.wraps(_clip)
    def clip(t_list: Any, clip_norm: Any, use_norm: Any = None, name: Any = None) -> Any:
        if use_norm is None and concerns(t_list, "clip_by_global_norm"):
            return clip_by_global_norm(t_list, clip_norm)
        return _clip(t_list, clip_norm, use_norm, name)

    @functools.wraps(_norm)
    def norm(t_list: Any, name: Any = None) -> Any:
        return global_norm(t_list) if concerns(t_list, "linalg.global_norm") else _norm(t_list, name)

    tf.clip_by_global_norm = clip
    tf.linalg.global_norm = norm
