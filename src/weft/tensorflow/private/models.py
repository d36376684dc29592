"""Layers, models and optimizers of Keras 3 and of ``tf_keras``."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope as in_scope
from keras.src.backend.tensorflow import trainer
from keras.src.losses import loss as losses
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


@contextmanager
def layers_evaluate() -> Iterator[None]:
    """Inside, layers that are asked to train do not: they are called with ``training=False``."""
    with ExitStack() as stack:
        for each in layer_classes():
            original = each.__call__

            @functools.wraps(original)
            def call(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if kwargs.get("training") is not None:
                    kwargs["training"] = False
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
    """True if Keras only asks for the shapes of results."""
    return bool(in_scope())


def set_untracked(model: Any, name: str, value: Any) -> None:
    """Set an attribute of a Keras model that is none of its parts."""
    model.__dict__[name] = value


def mask_of(tensor: Any) -> Any:
    """The mask that Keras has set on a tensor; None without one."""
    return getattr(tensor, "_keras_mask", None)


def with_mask(tensor: Any, mask: Any) -> Any:
    """The tensor, with this mask of Keras; as it is for None."""
    if mask is not None:
        tensor._keras_mask = mask
    return tensor


def has_own(model: Any, name: str) -> bool:
    """True if the class of a model has a method other than that of Keras's models; None has none."""
    if model is None:
        return False
    base = keras_two_model() if is_of_keras_two(model) else keras.Model
    return getattr(type(model), name) is not getattr(base, name)


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
    """The loss of a model of Keras 3, whose own method may be an older one that does not take ``training``."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


def compiled_with(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call a model's own ``compile``: the arguments that it hands on to Keras's; None if it calls that not at all.

    Keras's does nothing meanwhile for this model; others may be compiled inside.
    """
    base: Any = keras_two_model() if is_of_keras_two(model) else keras.Model
    original, handed_on = base.compile, []

    @functools.wraps(original)
    def compile_other(self: Any, *given: Any, **named: Any) -> Any:
        return handed_on.append((given, named)) if self is model else original(self, *given, **named)

    base.compile = compile_other
    try:
        model.compile(*args, **kwargs)
    finally:
        base.compile = original
    return handed_on[-1] if handed_on else None


def share_compiled(model: Any, other: Any) -> None:
    """Let another model have what ``compile`` gave a model."""
    three = "optimizer", "loss", "compiled", "_compile_loss", "_compile_metrics", "_loss_tracker"
    two = "optimizer", "loss", "_is_compiled", "compiled_loss", "compiled_metrics"
    for name in two if is_of_keras_two(other) else three:
        set_untracked(other, name, getattr(model, name))


def means_of_losses(model: Any) -> list[Any]:
    """The metrics in which a compiled model of Keras 3 keeps the mean loss of each output, if there are several."""
    return list(getattr(getattr(model, "_compile_loss", None), "metrics", ()))


@contextmanager
def held_means(model: Any) -> Iterator[dict[str, Any]]:
    """Inside, such means are not changed: what they would be given is found by their names."""
    found: dict[str, Any] = {}
    original = keras.metrics.Mean.update_state

    @functools.wraps(original)
    def update(self: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(each is self for each in means_of_losses(model)):
            return original(self, values, *args, **kwargs)
        found[self.name] = tf.convert_to_tensor(values)
        return None

    keras.metrics.Mean.update_state = update
    try:
        yield found
    finally:
        keras.metrics.Mean.update_state = original


@contextmanager
def watch_reductions(reduced: Callable[[Any, str | None, Any, Any, bool], None]) -> Iterator[None]:
    """Report each loss of Keras 3 that is computed inside.

    ``reduced(loss, reduction, weights, mask, scalar)``: the loss, how it was reduced, the weights of its values with
    the mask in them, the mask, and whether there was a single value.
    """
    original = losses.reduce_weighted_values

    @functools.wraps(original)
    def reduce(
        values: Any, sample_weight: Any = None, mask: Any = None, reduction: Any = "mean", dtype: Any = None
    ) -> Any:
        found = original(values, sample_weight, mask, reduction, dtype)
        weights = losses.apply_mask(sample_weight, mask, found.dtype, reduction)
        if tf.is_tensor(found):
            reduced(found, reduction, weights, mask, len(values.shape) == 0)
        return found

    losses.reduce_weighted_values = reduce
    try:
        yield
    finally:
        losses.reduce_weighted_values = original


def model_classes() -> list[Any]:
    """The classes that models derive from, of every Keras that is imported."""
    return [sys.modules[name].Model for name in ("keras", "tf_keras") if name in sys.modules]


def plain_models() -> list[Any]:
    """The models of every Keras that is imported that exist, but for those of weft, and for those that they wrap."""
    kinds = tuple(model_classes())
    found = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    split = [each for each in found if hasattr(each, "all_variables")]
    hidden = {id(model) for each in split for model in (each, each.module)}
    return [each for each in found if id(each) not in hidden and getattr(each, "built", False)]


def is_of_keras_two(model: Any) -> bool:
    """True if this is a model of ``tf_keras``."""
    return "tf_keras" in sys.modules and isinstance(model, sys.modules["tf_keras"].Model)


def keras_two_model() -> type:
    """The class of models of ``tf_keras``."""
    found: type = sys.modules["tf_keras"].Model
    return found


def _split_models_in(model: Any) -> list[Any]:
    """The models of weft among the parts of a Keras model; the model itself if it is one."""
    if hasattr(model, "all_variables"):
        return [model]
    return [each for each in model._flatten_layers() if hasattr(each, "all_variables")]


def watch_logs(changed: Callable[[Any, Sequence[Any], Any], Any]) -> None:
    """Let models of every Keras that is imported that are split, or hold such ones, give callbacks other logs.

    ``changed(model, parts, logs)``: the logs to give, from those of a batch that was trained on, of an epoch, or of an
    evaluation; ``parts`` are the models of weft.
    """
    for kind in model_classes():
        if "_weft_logs" not in vars(kind):
            kind._weft_logs = True
            _watch_logs(kind, changed)


def _watch_logs(kind: Any, changed: Callable[[Any, Sequence[Any], Any], Any]) -> None:
    make_train_function = kind.make_train_function

    @functools.wraps(make_train_function)
    def make(self: Any, force: bool = False) -> Any:
        made = make_train_function(self, force)
        if not isinstance(self.train_function, _WithLogs) and _split_models_in(self):
            self.__dict__["train_function"] = _WithLogs(self, self.train_function, changed)
        return made if made is None else self.train_function

    kind.make_train_function = make
    two = hasattr(kind, "_validate_and_get_metrics_result")
    of_epoch = "_validate_and_get_metrics_result" if two else "_get_metrics_result_or_logs"
    original = getattr(kind, of_epoch)

    @functools.wraps(original)
    def logs_of(self: Any, logs: Any) -> Any:
        found, parts = original(self, logs), _split_models_in(self)
        return changed(self, parts, found) if parts else found

    setattr(kind, of_epoch, logs_of)


class _WithLogs:
    """A function that trains on a batch."""

    def __init__(self, model: Any, function: Any, changed: Callable[[Any, Sequence[Any], Any], Any]) -> None:
        self._model, self._function, self._changed = weakref.ref(model), function, changed
        self._parts = weakref.WeakSet(_split_models_in(model))

    def __call__(self, *args: Any) -> Any:
        logs, model = self._function(*args), self._model()
        return logs if model is None else self._changed(model, list(self._parts), logs)


def calls_of(optimizer: Any) -> Any:
    """The variable that counts an optimizer's calls; of those that it accumulates, ``iterations`` counts one."""
    return optimizer._iterations


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

    It gets the number of batches of an epoch. Keras asks for an iterator more where it knows that by itself.
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


def listed_by(optimizer: Any) -> dict[int, tuple[Any, str]]:
    """By the id of an optimizer's variable, the trained variable that it is kept for, and the name of its list.

    Optimizers of Keras keep their slots in lists with one entry for each trained variable, in the same order.
    """
    found: dict[int, tuple[Any, str]] = {}
    trained = trained_by(optimizer)
    for name, kept in vars(optimizer).items():
        if name.startswith(("_trainable_variables", "_variables")) or not isinstance(kept, (list, tuple)):
            continue
        if trained and len(kept) == len(trained):
            found |= {id(each): (of, name.strip("_")) for each, of in zip(kept, trained, strict=True)}
    inner = getattr(optimizer, "inner_optimizer", None)
    return found if inner is None else found | listed_by(inner)


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
