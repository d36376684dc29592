"""Keras's own loops over data, ``fit``, ``evaluate`` and ``predict``, for a model that is split."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from weft.errors import UsageError
from weft.session.cut import Cut, Joined
from weft.tensorflow import private
from weft.tensorflow.checkpoint.export import gathered
from weft.tensorflow.checkpoint.run import Run
from weft.tensorflow.session.session import session
from weft.tensorflow.step import Step
from weft.tensorflow.trace.denominators import SAMPLES, SeveralDenominators, watch_losses

log = logging.getLogger("weft")


Mixin: Any = object  # beside a class of Keras, which is not known here


class Training(Mixin):
    """The training loop of a Keras model, by steps of weft where there is more than one rank."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._make_steps()

    def _make_steps(self) -> None:
        """Steps that were not traced yet: what ``compile`` was given is part of a trace."""
        cut = Cut(uneven=True)
        made = {
            name: Step(getattr(self, f"_{name}_microbatch"), cut, autograph=False)
            for name in ("train", "test", "predict")
        }
        for name, title in (("train", "fit"), ("test", "evaluate"), ("predict", "predict")):
            made[name].title = title
        private.set_untracked(self, "_weft_steps", made)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As Keras has it. With more than one rank there is one step for each call, and ``jit_compile=True`` means that

        XLA compiles what each rank computes between messages; ``"auto"`` is without XLA. A ``compile`` of the wrapped
        model's own is called, and what that hands on to Keras counts.
        """
        self._make_steps()
        if private.has_own(self._wrapped, "compile"):
            handed_on = private.compiled_with(self._wrapped, args, kwargs)
            if handed_on is None:
                return  # as in plain Keras the model is not compiled, and fit says so
            args, kwargs = handed_on
        if session().place.world_size > 1:
            if kwargs.get("steps_per_execution") not in (None, 1):
                raise UsageError(
                    f"compile(steps_per_execution={kwargs['steps_per_execution']!r}): a model that is split takes one "
                    "step for each call, leave it out"
                )
            for step in self._weft_steps.values():
                step.jit_compile = kwargs.get("jit_compile") is True
            kwargs["jit_compile"] = False
        self._check_methods("train_step", "test_step")
        names = getattr(self._wrapped, "output_names", None)
        if names is not None:
            private.set_untracked(self, "output_names", names)
        super().compile(*args, **kwargs)
        if self._asks_wrapped():
            private.share_compiled(self, self._wrapped)

    def _check_methods(self, *names: str) -> None:
        """Refuse what a wrapped model would do otherwise than Keras, and is not asked for.

        Raises:
            UsageError: It has one of these methods; the first is named.
        """
        for name in names:
            if private.has_own(self._wrapped, name):
                kind = type(self._wrapped).__name__
                raise UsageError(
                    f"{kind} has a {name} of its own, which a model that is wrapped is not asked for: derive {kind} "
                    f"from weft.DistributedModel, and let its {name} call functions that @weft.step decorates"
                )

    def _asks_wrapped(self) -> bool:
        """True if the wrapped model has methods of its own for losses or metrics."""
        return any(private.has_own(self._wrapped, name) for name in ("compute_loss", "compute_metrics"))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: Any = True,
    ) -> Any:
        """As Keras has it, or as the wrapped model does."""
        if private.has_own(self._wrapped, "compute_loss"):
            return private.compute_loss(self._wrapped, x, y, y_pred, sample_weight, training)
        return super().compute_loss(x, y, y_pred, sample_weight, training)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """As Keras has it, or as the wrapped model does."""
        if private.has_own(self._wrapped, "compute_metrics"):
            return self._wrapped.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return super().compute_metrics(x, y, y_pred, sample_weight)

    @property
    def metrics(self) -> Any:
        """As Keras has it, or as the wrapped model does."""
        return self._wrapped.metrics if self._asks_wrapped() else super().metrics

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras has it. With ``weft.checkpoints(...)`` among the callbacks it saves itself, and goes on where it was
        when the script starts again."""
        call = inspect.signature(super().fit).bind(*args, **kwargs)
        given = call.arguments
        callbacks = given.get("callbacks") or ()
        listed = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else callbacks
        if isinstance(listed, (list, tuple)) and session().place.world_size > 1:
            given["callbacks"] = listed = self._written_once(listed)
        run = next((each for each in getattr(listed, "callbacks", listed) if isinstance(each, Run)), None)
        if run is None:
            return super().fit(*call.args, **call.kwargs)
        self._check_saved()
        with run.fitting(self, given.get("x"), given.get("steps_per_epoch"), given.get("initial_epoch", 0)):
            return super().fit(*call.args, **call.kwargs)

    def _written_once(self, callbacks: Any) -> list[Any]:
        """The callbacks of this rank: files are written by the first one."""
        joined = session()

        @contextmanager
        def gather() -> Iterator[None]:
            with joined.doing("histograms of TensorBoard"), gathered(joined, self), self.whole():
                yield

        return private.written_once(callbacks, joined.rank == 0, self.module, gather)

    def _check_saved(self) -> None:
        """An error if ``fit`` cannot save itself."""

    # --- one microbatch -------------------------------------------------------------------------------------

    def _train_microbatch(self, x: Any, y: Any, sample_weight: Any) -> Any:
        with tf.GradientTape() as tape:
            predictions, loss, parts = self._predict_and_compare(x, y, sample_weight, True)
            scaled = self._scale(loss)
        return tape.gradient(scaled, self.trainable_variables), loss, parts, predictions

    def _test_microbatch(self, x: Any, y: Any, sample_weight: Any) -> Any:
        predictions, loss, parts = self._predict_and_compare(x, y, sample_weight, False)
        return loss, parts, predictions

    def _predict_microbatch(self, x: Any) -> Any:
        return self(x, training=False)

    def _predict_and_compare(
        self, x: Any, y: Any, sample_weight: Any, training: bool
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Predictions, their loss, and the losses of single outputs, of which Keras keeps the means."""
        predictions = self(x, training=training)
        with watch_losses() as losses, private.held_means(self) as parts:
            loss = self._compare(x, y, predictions, sample_weight, training)
        cut = self._weft_steps["train"].cut.joined.rows > 0
        if cut and self.losses and any(each.kind != SAMPLES for each in losses.noted):
            raise SeveralDenominators("there are losses of layers beside a loss that is no mean over samples")
        return predictions, loss, parts

    def _compare(self, x: Any, y: Any, predictions: Any, sample_weight: Any, training: bool) -> Any:
        return private.compute_loss(self, x, y, predictions, sample_weight, training)

    def _scale(self, loss: Any) -> Any:
        return loss if self.optimizer is None else self.optimizer.scale_loss(loss)

    # --- one batch ------------------------------------------------------------------------------------------

    def train_step(self, data: Any) -> Any:
        if session().place.world_size == 1:
            return super().train_step(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        gradients, loss, parts, predictions = self._step("train", x, y, sample_weight)
        means = [None if each is None else each.accumulate() for each in gradients]
        self.optimizer.apply_gradients(zip(means, self.trainable_variables, strict=True))
        return self._update_metrics(x, y, sample_weight, loss, parts, predictions)

    def test_step(self, data: Any) -> Any:
        if session().place.world_size == 1:
            return super().test_step(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, parts, predictions = self._step("test", x, y, sample_weight)
        return self._update_metrics(x, y, sample_weight, loss, parts, predictions)

    def predict_step(self, data: Any) -> Any:
        self._check_methods("predict_step")
        if session().place.world_size == 1:
            return super().predict_step(data)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return tf.nest.map_structure(lambda each: each.merge(), self._step("predict", x))

    def _step(self, name: str, *arguments: Any) -> Any:
        """The result of a step; where its microbatches cannot be summed to its batch, that is one microbatch."""
        try:
            return self._weft_steps[name](*arguments)
        except SeveralDenominators as reason:
            for step in self._weft_steps.values():
                step.cut = replace(step.cut, joined=Joined(rows=0))
            if session().rank == 0:
                log.warning(
                    "fit and evaluate: %s. So a batch is one microbatch, and ranks wait for each other",
                    reason,
                )
            return self._weft_steps[name](*arguments)

    def _update_metrics(
        self, x: Any, y: Any, sample_weight: Any, loss: Any, parts: dict[str, Any], predictions: Any
    ) -> Any:
        first = next(each for each in tf.nest.flatten(x) if each is not None)
        private.loss_tracker(self).update_state(loss.reduce_mean(), sample_weight=tf.shape(first)[0])
        for metric in private.means_of_losses(self):
            if metric.name in parts:
                metric.update_state(parts[metric.name].reduce_mean(), sample_weight=first.shape[0])
        merged = tf.nest.map_structure(lambda each: each.merge(), predictions)
        return self.compute_metrics(x, y, merged, sample_weight=sample_weight)


class TrainingOfKerasTwo(Training):
    """The same for models of ``tf_keras``, whose losses keep their own means: microbatch by microbatch."""

    def _check_saved(self) -> None:
        raise UsageError(
            "fit of tf_keras does not save itself: use Keras 3, or write a loop over weft.checkpoints(...).batches"
        )

    def compute_loss(  # type: ignore[override]
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        """As Keras has it, or as the wrapped model does."""
        if private.has_own(self._wrapped, "compute_loss"):
            return self._wrapped.compute_loss(x, y, y_pred, sample_weight)
        return super(Training, self).compute_loss(x, y, y_pred, sample_weight)

    def _compare(self, x: Any, y: Any, predictions: Any, sample_weight: Any, training: bool) -> Any:
        return self.compute_loss(x, y, predictions, sample_weight)

    def _scale(self, loss: Any) -> Any:
        if hasattr(self.optimizer, "get_scaled_loss"):
            raise UsageError(
                "fit() of tf_keras scales no losses of a model that is split (LossScaleOptimizer, mixed_float16): use "
                "Keras 3, or mixed_bfloat16"
            )
        return loss

    def _update_metrics(
        self, x: Any, y: Any, sample_weight: Any, loss: Any, parts: dict[str, Any], predictions: Any
    ) -> Any:
        merged = tf.nest.map_structure(lambda each: each.merge(), predictions)
        return self.compute_metrics(x, y, merged, sample_weight)
