"""Keras as scripts for earlier versions of TensorFlow know it: its optimizers most of all.

``optimizer.get_gradients(loss, variables)`` is how a step takes gradients; Keras 3 has no such method. The original
supports no tape. ``optimizer.variables()`` was a method, and is a list now: here it is a list that can be called.
``metric.reset_states()`` is ``reset_state()`` now, and a schedule of learning rates called None has its default name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

from weft.errors import UsageError
from weft.import_hooks import when_imported
from weft.tensorflow import private

_installed = False


def install() -> None:
    """Give these to the optimizers of Keras, and of ``tf_keras`` when it is imported; once for the process."""
    global _installed
    if _installed:
        return
    _installed = True
    for name in ("keras", "tf_keras"):
        when_imported(name, _extend)


def _extend(keras: ModuleType) -> None:
    base = keras.optimizers.Optimizer
    if not hasattr(base, "get_gradients"):
        base.get_gradients = get_gradients
    owner = next((each for each in base.__mro__ if isinstance(vars(each).get("variables"), property)), None)
    if owner is not None:
        listed = vars(owner)["variables"].fget
        owner.variables = property(lambda self: Variables(listed(self)), doc=listed.__doc__)
    metric = keras.metrics.Metric
    if not hasattr(metric, "reset_states"):
        metric.reset_states = lambda self: self.reset_state()
    schedules = keras.optimizers.schedules
    for each in list(vars(schedules).values()):
        if isinstance(each, type) and issubclass(each, schedules.LearningRateSchedule):
            _name_by_default(each)


def _name_by_default(schedule: Any) -> None:
    made = schedule.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("name", "") is None:
            del kwargs["name"]
        made(self, *args, **kwargs)

    schedule.__init__ = init


class Variables(list[Any]):
    """The variables of an optimizer; ``optimizer.variables`` and ``optimizer.variables()`` are the same."""

    def __call__(self) -> Variables:
        return self


@tf.autograph.experimental.do_not_convert
def get_gradients(self: Any, loss: Any, params: Sequence[Any]) -> list[Any]:
    """The gradients of a loss by variables, in a ``smp.step`` function or a ``tf.function``.

    Raises:
        UsageError: No graph is being traced, or the loss does not depend on a variable.
    """
    if tf.executing_eagerly():
        raise UsageError(
            "optimizer.get_gradients was called outside of a graph: call it in a function that @smp.step or "
            "@tf.function decorates, or take a tf.GradientTape"
        )
    variables = list(params)
    found = tf.gradients(loss, [private.handle_of(variable) for variable in variables])
    for variable, gradient in zip(variables, found, strict=True):
        if gradient is None:
            name = getattr(variable, "path", variable.name)
            raise UsageError(
                f"the loss does not depend on {name}, which has no gradient: leave it out of the variables, or set its "
                "trainable to False"
            )
    return list(found)
