"""Gradient norms over the ranks of a pipeline, each of which has the gradients of its own variables only."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from weft.tensorflow.output import is_gradient
from weft.tensorflow.session.session import present, session
from weft.tensorflow.session.sums import sum_over
from weft.tensorflow.trace import capture


def global_norm(gradients: Sequence[Any]) -> Any:
    """The norm of the gradients of all ranks together, on each of them: sqrt of the sum of all squares.

    ``gradients``: those of this rank's variables; None counts nothing. Every rank of the pipeline calls this.
    """
    squares = [
        tf.nn.l2_loss(tf.cast(_values(each), tf.float32)) * 2.0 for each in gradients if each is not None
    ]
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


_clip, _norm = tf.clip_by_global_norm, tf.linalg.global_norm


def watch_clipping() -> None:
    """From now on TensorFlow's own functions count all ranks' gradients, where they are given those of a step."""

    def concerns(tensors: Any) -> bool:
        joined = present()
        return (
            joined is not None
            and joined.mesh.pp > 1
            and capture.tracing() is None
            and any(map(is_gradient, tensors))
        )

    @functools.wraps(_clip)
    def clip(t_list: Any, clip_norm: Any, use_norm: Any = None, name: Any = None) -> Any:
        if use_norm is None and concerns(t_list):
            return clip_by_global_norm(t_list, clip_norm)
        return _clip(t_list, clip_norm, use_norm, name)

    @functools.wraps(_norm)
    def norm(t_list: Any, name: Any = None) -> Any:
        return global_norm(t_list) if concerns(t_list) else _norm(t_list, name)

    tf.clip_by_global_norm = clip
    tf.linalg.global_norm = norm
