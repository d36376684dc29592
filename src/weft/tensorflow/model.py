"""``DistributedModel``: a Keras model whose operations are split over the ranks of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from weft.errors import UsageError
from weft.tensorflow import private
from weft.tensorflow.delayed_parameters import make_values
from weft.tensorflow.optimizers import watch_optimizers
from weft.tensorflow.replicas.logs import watch_logs
from weft.tensorflow.session.session import session
from weft.tensorflow.trace import capture
from weft.tensorflow.training import Mixin, Training, TrainingOfKerasTwo


class SplitModel(Mixin):
    """The parts of a split model beside a Keras model, of Keras 3 or of ``tf_keras``."""

    autograph_info__ = None
    """Called as it is, as AutoGraph calls Keras: it would return a copy of the result, without its mask."""
    _owners: dict[int, int]
    _waiting: list[Callable[[], Any]]
    placement: Any

    def __init__(self, model: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, value in (("_owners", {}), ("_waiting", [])):
            private.set_untracked(self, name, value)
        self.partitioned = self._whole = False
        private.set_untracked(self, "placement", None)
        self._wrapped = model
        if model is not None:
            self.built = True
            private.set_untracked(self, "compute_mask", _as_the_model_has_it)
        session().add_model(self)
        watch_optimizers()  # and models: those of a Keras that was imported since
        watch_logs()

    @property
    def module(self) -> Any:
        return self if self._wrapped is None else self._wrapped

    def __dir__(self) -> list[str]:
        """All but ``module``: Keras looks for parts there when it loads weights, and one's own self is none."""
        return [name for name in super().__dir__() if name != "module"]

    @tf.autograph.experimental.do_not_convert
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        marks = capture.tracing()
        if marks is None:
            symbolic = private.in_symbolic_scope()
            if not self._whole and session().settings.partitions > 1 and not symbolic:
                raise UsageError(
                    "a model that is split is called inside of a function that @weft.step decorates"
                )
            if not symbolic:
                make_values([self], (), {})
            result = super().__call__(*args, **kwargs)
            if not self.partitioned and not symbolic:
                self.finish_partition({})
            return result
        with capture.noted(lambda first, end: marks.models.append((self, first, end))):
            return super().__call__(*args, **kwargs)

    def call(self, *args: Any, training: Any = None, **kwargs: Any) -> Any:
        if self._wrapped is None:
            raise UsageError(f"{type(self).__name__} has no call method: write one, or hand a model over")
        if training is not None:  # Keras hands it on to layers that name it only
            kwargs["training"] = training
        return self._wrapped(*args, **kwargs)

    # --- variables ------------------------------------------------------------------------------------------

    def _local(self, variables: list[Any]) -> list[Any]:
        if not self.partitioned or self._whole or capture.tracing() is not None:
            return variables
        own = session().position("pp")
        return [
            each
            for each in variables
            if self._owners.get(private.key_of(private.handle_of(each)), own) == own
        ]

    @property
    def trainable_variables(self) -> list[Any]:
        return self._local(super().trainable_variables)

    @property
    def trainable_weights(self) -> list[Any]:
        return self._local(super().trainable_weights)

    @property
    def non_trainable_variables(self) -> list[Any]:
        return self._local(super().non_trainable_variables)

    @property
    def non_trainable_weights(self) -> list[Any]:
        return self._local(super().non_trainable_weights)

    @property
    def variables(self) -> list[Any]:
        return self._local(super().variables)

    @property
    def weights(self) -> list[Any]:
        return self._local(super().weights)

    def all_variables(self) -> list[Any]:
        """The variables of all partitions; those of others have no values here."""
        with (
            self.whole()
        ):  # the variables of a model of tf_keras are its weights, which are those of this rank else
            return super().variables

    def owner_of(self, variable: Any) -> int | None:
        """The partition of a variable; None for one that no step has used yet."""
        return self._owners.get(private.key_of(private.handle_of(variable)))

    @property
    def owners(self) -> dict[int, int]:
        """The partition of each variable that a step has used, by its key."""
        return dict(self._owners)

    def finish_partition(self, owners: dict[int, int], placement: Any = None) -> None:
        """Know the partition of each variable, by its key; the first time, do what had to wait for that.

        Only the model's own count, those of its metrics among them: the key of a variable that is gone may become that
        of another one.
        """
        metrics = [variable for metric in self.metrics for variable in metric.variables]
        own = (private.key_of(private.handle_of(each)) for each in (*self.all_variables(), *metrics))
        self._owners.update({key: owners[key] for key in own if key in owners})
        if self.placement is None:
            private.set_untracked(self, "placement", placement)
        if self.partitioned:
            return
        self.partitioned = True
        waiting = [*self._waiting, *session().after_partition]
        self._waiting.clear()
        session().after_partition.clear()
        with tf.init_scope():  # eagerly, also where a graph is being traced
            for act in waiting:
                act()

    def when_partitioned(self, act: Callable[[], Any]) -> None:
        """Run ``act()`` once the variables' partitions are known: now, or in the first step, before it computes."""
        if self.partitioned or session().settings.partitions == 1:
            act()
        else:
            self._waiting.append(act)

    @property
    def waits(self) -> bool:
        """True if something waits for the first step."""
        return bool(self._waiting)

    def follow(self, former: int, key: int) -> None:
        """A variable has another key now."""
        if former in self._owners:
            self._owners[key] = self._owners.pop(former)

    # --- values and files -----------------------------------------------------------------------------------

    def get_weights(self) -> list[Any]:
        """The values of the whole model; every rank of a pipeline calls this, outside of a step."""
        from weft.tensorflow.checkpoint import keras_files

        return keras_files.values(self)

    def set_weights(self, weights: list[Any]) -> None:
        """Give the whole model values, as :meth:`get_weights` gives them; every rank takes its own."""
        from weft.tensorflow.checkpoint import keras_files

        keras_files.set_values(self, weights)

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Write the whole model and its optimizer as Keras has it; every rank calls this, the first one writes."""
        from weft.tensorflow.checkpoint import keras_files

        keras_files.save(self, filepath, *args, **kwargs)

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Write the weights of the whole model as Keras has it; every rank calls this, the first one writes."""
        from weft.tensorflow.checkpoint import keras_files

        keras_files.write(
            self,
            filepath,
            "save_weights",
            lambda net, path: _plain(net).save_weights(net, path, *args, **kwargs),
        )

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Take weights from a file of Keras; every rank calls this, and keeps its own part.

        Where the file cannot be read on a rank, or does not fit, all ranks end with an error, and nothing has changed.
        """
        from weft.tensorflow.checkpoint import keras_files

        keras_files.read(
            self,
            filepath,
            "load_weights",
            lambda net, path: _plain(net).load_weights(net, path, *args, **kwargs),
        )

    def count_params(self) -> int:
        """The number of parameters of the whole model."""
        with self.whole():
            return int(super().count_params())

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Show the whole model, as Keras has it; without ``print_fn`` the first rank does."""
        if session().rank == 0 or kwargs.get("print_fn") is not None:
            with self.whole():
                _plain(self.module).summary(self.module, *args, **kwargs)

    def save_model(self, save_path: str = "/opt/ml/model") -> None:
        """Write the whole model, as plain TensorFlow loads it; every rank calls this, outside of a step.

        ``save_path``: a folder, which becomes a SavedModel; or a file that ends in ``.keras``.
        """
        from weft.tensorflow.checkpoint.export import save_model

        save_model(self, save_path)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model is as it was before it was split: all its variables are here."""
        before, self._whole = self._whole, True
        try:
            yield
        finally:
            self._whole = before


def _plain(net: Any) -> Any:
    """The class of Keras whose methods write and show a model."""
    base: type = private.keras_two_model() if private.is_of_keras_two(net) else keras.Model
    return base if isinstance(net, SplitModel) else type(net)


def _as_the_model_has_it(inputs: Any, previous_mask: Any = None) -> None:
    """No mask beside those that the wrapped model gives its outputs."""


class DistributedModel(SplitModel, Training, keras.Model):
    """A Keras model that is split over the partitions at its first step.

    ``DistributedModel(model)`` takes any Keras model, one of ``tf_keras`` too. Or derive a class from it, as from
    ``keras.Model``, and write ``call``. Call it inside of a ``weft.step`` function; what it returns is there on all
    ranks.

    After the first step ``trainable_variables``, ``variables`` and ``weights`` are those of this rank's partition;
    inside of a step they are all.

    Attributes:
        partitioned: Whether the first step has split the model.
        placement: Where its parts lie, for people; None before the first step.
        module: The model that was handed over; the model itself for a class of its own.
    """

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is DistributedModel and private.is_of_keras_two(model):
            return _of_keras_two()(model, *args, **kwargs)
        if model is not None and not isinstance(model, keras.Model) and cls is DistributedModel:
            raise UsageError(
                f"DistributedModel takes a Keras model, not {type(model).__name__}; or derive a class from it and "
                "write its call method"
            )
        return super().__new__(cls)


@functools.cache
def _of_keras_two() -> type:
    """The same for models of ``tf_keras``."""
    base: Any = private.keras_two_model()

    class KerasTwoModel(SplitModel, TrainingOfKerasTwo, base):
        """A model of ``tf_keras`` that is split over the partitions at its first step."""

    return KerasTwoModel


def register_post_partition_hook(hook: Callable[[], Any]) -> Callable[[], Any]:
    """Call ``hook()`` eagerly, once, when the first step has split the model, before its first forward pass.

    Returns the hook: it is written as a decorator, after ``init`` and before the first step.

    Raises:
        UsageError: All models are split already.
    """
    joined = session()
    if joined.models and all(model.partitioned for model in joined.models):
        raise UsageError(
            "register_post_partition_hook was called when the model was split already: call it before the first step"
        )
    joined.after_partition.append(hook)
    return hook
