"""Keras's optimizers on a rank with a part of the variables: what they ask of all gradients, they ask of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from weft.errors import UsageError
from weft.tensorflow import private
from weft.tensorflow.clip import clip_by_global_norm
from weft.tensorflow.output import variable_of_gradient
from weft.tensorflow.session.session import Session, present
from weft.tensorflow.session.wire import sum_over
from weft.tensorflow.trace import capture

_watched: set[type] = set()


def _split() -> Any:
    """The session, if this is a rank of a pipeline outside of a step."""
    joined = present()
    return joined if joined is not None and joined.mesh.pp > 1 and capture.tracing() is None else None


def watch_optimizers() -> None:
    """From now on the optimizers of Keras work on ranks of a pipeline.

    A clip by global norm counts all ranks' gradients. A loss scale sees whether the gradients of all ranks are finite.
    Gradients that belong to other variables than they are paired with are refused. A rank without variables takes part.
    """
    for base in private.optimizer_classes():
        if base in _watched:
            continue
        _watched.add(base)
        _wrap(base, "apply_gradients", _apply_gradients)
        _wrap(base, "_clip_gradients", _clip_gradients)
        if hasattr(base, "apply"):
            _wrap(base, "apply", _apply)
    for base in private.loss_scale_classes():
        if base not in _watched:
            _watched.add(base)
            _wrap(base, "check_finite", _check_finite)


def _wrap(base: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(base, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        joined = _split()
        if joined is None:
            return original(self, *args, **kwargs)
        return around(joined, functools.partial(original, self), self, *args, **kwargs)

    setattr(base, name, wrapped)


def _note(joined: Session, optimizer: Any, variables: Sequence[Any]) -> bool:
    """True if an optimizer trains a part of a model that is split; one without any variable may be another rank's."""
    split = {key for model in joined.models for key in model.owners}
    found = not variables or any(private.key_of(private.handle_of(each)) in split for each in variables)
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            object.__setattr__(each, PARTS, found)
    return found


PARTS = "_weft_trains_parts"
"""The attribute of an optimizer that says whether its latest call was for a part of a model."""


def _apply_gradients(
    joined: Session, original: Any, optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any
) -> Any:
    pairs = list(grads_and_vars)
    if not _note(joined, optimizer, [variable for _, variable in pairs]):
        return original(pairs, *args, **kwargs)
    check_pairs(pairs)
    if not pairs and hasattr(optimizer, "apply"):
        optimizer.apply([], [])
        return optimizer.iterations
    if not pairs:
        _join_in(optimizer)
        return optimizer.iterations
    return original(pairs, *args, **kwargs)


def check_pairs(pairs: list[tuple[Any, Any]]) -> None:
    """Refuse gradients that are paired with other variables than their own.

    Raises:
        UsageError: One is; the variable is named.
    """
    for gradient, variable in pairs:
        own = variable_of_gradient(gradient)
        if own is not None and own != private.key_of(private.handle_of(variable)):
            raise UsageError(
                f"the gradient that is applied to {getattr(variable, 'path', None) or variable.name} is that of "
                "another variable: a step returns the gradients of this rank's variables, so pair them with "
                "model.trainable_variables, in the order in which the step took them"
            )


def _apply(
    joined: Session, original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    variables = private.trained_by(optimizer) if trainable_variables is None else list(trainable_variables)
    concerned = _note(joined, optimizer, variables)
    if grads or not concerned or getattr(optimizer, "inner_optimizer", None) is not None:
        return original(grads, trainable_variables)  # a loss scale asks all ranks, and then its own optimizer
    _join_in(optimizer)
    return None


def _join_in(optimizer: Any) -> None:
    """A step of a rank without variables."""
    if hasattr(optimizer, "apply") and not optimizer.built:
        optimizer.build([])  # Keras asks for averages of variables, which are none here
    calls, steps = private.calls_of(optimizer), getattr(optimizer, "gradient_accumulation_steps", None)
    if optimizer.global_clipnorm and steps:  # as Keras does: clipped is what was accumulated
        tf.cond(
            tf.equal((calls + 1) % steps, 0), lambda: _clip_with_others(optimizer), lambda: tf.constant(False)
        )
    elif optimizer.global_clipnorm:
        _clip_with_others(optimizer)
    calls.assign_add(1)


def _clip_with_others(optimizer: Any) -> Any:
    clip_by_global_norm([], optimizer.global_clipnorm)
    return tf.constant(True)


def _clip_gradients(joined: Session, original: Any, optimizer: Any, grads: Any) -> Any:
    if optimizer.global_clipnorm and optimizer.global_clipnorm > 0 and getattr(optimizer, PARTS, False):
        clipped, _ = clip_by_global_norm(grads, optimizer.global_clipnorm)
        return [
            each if each is None else tf.convert_to_tensor(each) for each in clipped
        ]  # dense, as Keras does it
    return original(grads)


def _check_finite(joined: Session, original: Any, optimizer: Any, grads: Any) -> Any:
    if not getattr(optimizer, PARTS, False):
        return original(grads)
    present_ones = [each for each in grads if each is not None]
    own = original(present_ones) if present_ones else tf.constant(True)
    failed = tf.reshape(tf.where(own, 0.0, 1.0), [1])
    return sum_over(joined, "pp", failed, "whether gradients are finite")[0] == 0
