"""Layers, models and optimizers of Keras 3 and of ``tf_keras``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope as in_scope
from keras.src.backend.tensorflow import trainer
from tensorflow.python.framework import ops

from weft.tensorflow.private.variables import underlying


def layer_classes() -> list[type]:
    """The classes that layers derive from, of every Keras that is imported."""
    found = []
    if "keras" in sys.modules:
        found.append(sys.modules["keras"].layers.Layer)
    if "tf_keras" in sys.modules:
        found.append(sys.modules["tf_keras"].layers.Layer)
    return found


@contextmanager
def watch_layers(graph: Any, called: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, ``called(layer)`` gives the context in which each call of a layer runs, while ``graph`` is traced."""
    with ExitStack() as stack:
        for each in layer_classes():
            original = each.__call__

            @functools.wraps(original)
            def call(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if ops.get_default_graph() is not graph:
                    return _original(self, *args, **kwargs)
                with called(self):
                    return _original(self, *args, **kwargs)

            setattr(each, "__call__", call)  # noqa: B010
            stack.callback(setattr, each, "__call__", original)
        yield


def optimizer_classes() -> list[type]:
    """The classes that optimizers derive from, of every Keras that is imported."""
    found = []
    if "keras" in sys.modules:
        found.append(sys.modules["keras.src.optimizers.base_optimizer"].BaseOptimizer)
    if "tf_keras" in sys.modules:
        found.append(sys.modules["tf_keras.src.optimizers.optimizer"].Optimizer)
    return found


def loss_scale_classes() -> list[type]:
    """The classes that scale losses, of every Keras that is imported, and look whether gradients are finite."""
    return [sys.modules["keras"].optimizers.LossScaleOptimizer] if "keras" in sys.modules else []


def optimizer_reads() -> list[tuple[type, str]]:
    """Classes of optimizers, of every Keras that is imported, and their members that give away or use variables."""
    classes = [*optimizer_classes(), *loss_scale_classes()]
    if "tf_keras" in sys.modules:
        kind = sys.modules["tf_keras.src.optimizers.optimizer"]
        classes += [kind._BaseOptimizer, sys.modules["tf_keras"].optimizers.legacy.Optimizer]
    names = (
        "variables", "weights", "get_weights", "get_slot", "finalize_variable_values", "apply", "apply_gradients",
    )  # fmt: skip
    return [(base, name) for base in classes for name in names if name in vars(base)]


def in_symbolic_scope() -> bool:
    """Whether Keras only asks for the shapes of results."""
    return bool(in_scope())


def set_untracked(model: Any, name: str, value: Any) -> None:
    """Set an attribute of a Keras model that is none of its parts."""
    model.__dict__[name] = value


def is_of_keras_two(model: Any) -> bool:
    """Whether this is a model of ``tf_keras``."""
    return "tf_keras" in sys.modules and isinstance(model, sys.modules["tf_keras"].Model)


def keras_two_model() -> type:
    """The class of models of ``tf_keras``."""
    found: type = sys.modules["tf_keras"].Model
    return found


def loss_tracker(model: Any) -> Any:
    """The metric in which a Keras model keeps its mean loss."""
    return model._loss_tracker


def begin_fit(model: Any, epoch: int | None) -> None:
    """Let the next loop of ``fit`` of a model of Keras 3 begin with this epoch; with None or 0 as its caller says."""
    model._initial_epoch = epoch


@contextmanager
def watch_epochs() -> Iterator[list[Callable[[int], None]]]:
    """Inside, for each kind of data that loops of Keras go through there is a function that begins and ends an epoch of
    it without drawing a batch: the next epoch is shuffled as the one behind that would have been.

    It is told how many batches an epoch has. Keras asks for an iterator more where it knows that by itself.
    """
    original = trainer.TFEpochIterator
    found: list[Callable[[int], None]] = []

    class Watched(original):  # type: ignore[misc, valid-type]
        _num_batches: int | None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

            def begin(length: int) -> None:
                if self._num_batches:
                    for _ in self._enumerate_iterator():
                        pass
                    return
                self.data_adapter.on_epoch_begin()
                iter(self._get_iterator())
                self.data_adapter.on_epoch_end()
                self._num_batches = length

            found.append(begin)

    trainer.TFEpochIterator = Watched
    try:
        yield found
    finally:
        trainer.TFEpochIterator = original


def trained_by(optimizer: Any) -> list[Any]:
    """The variables that an optimizer of Keras was built for, in their order; nothing for those of tf_keras."""
    return list(getattr(optimizer, "_trainable_variables", ()))


def build_optimizer(optimizer: Any, variables: Iterable[Any]) -> None:
    """Make an optimizer's own variables for these, with the names that they have after ``apply_gradients``."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        optimizer.build(list(variables))
        return
    build = (
        getattr(optimizer, "_create_all_weights", None) or optimizer.build
    )  # the older kind of tf_keras has the first
    with tf.name_scope(getattr(optimizer, "name", None) or optimizer._name):
        build([underlying(each) for each in variables])
