"""Keras's own loops over data, ``fit``, ``evaluate`` and ``predict``, for a model that is split."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import tensorflow as tf

from weft.errors import UsageError
from weft.session.cut import Cut
from weft.tensorflow import private
from weft.tensorflow.checkpoint.run import Run
from weft.tensorflow.session.session import session
from weft.tensorflow.step import Step

Mixin: Any = object  # beside a class of Keras


class Training(Mixin):
    """What a Keras model does with a batch, by steps of weft where there is more than one rank."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        cut = Cut(uneven=True)
        made = {
            name: Step(getattr(self, f"_{name}_microbatch"), cut) for name in ("train", "test", "predict")
        }
        private.set_untracked(self, "_weft_steps", made)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As Keras has it. With more than one rank there is one step for each call, and ``jit_compile=True`` means that

        XLA compiles what each rank computes between messages; ``"auto"`` is without XLA.
        """
        if session().place.world_size > 1:
            if kwargs.get("steps_per_execution") not in (None, 1):
                raise UsageError(
                    f"compile(steps_per_execution={kwargs['steps_per_execution']!r}): a model that is split takes one "
                    "step for each call, leave it out"
                )
            for step in self._weft_steps.values():
                step.jit_compile = kwargs.get("jit_compile") is True
            kwargs["jit_compile"] = False
        super().compile(*args, **kwargs)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras has it. With ``weft.checkpoints(...)`` among the callbacks it saves itself, and goes on where it was
        when the script starts again."""
        given = inspect.signature(super().fit).bind(*args, **kwargs).arguments
        callbacks = given.get("callbacks") or ()
        run = next(
            (each for each in getattr(callbacks, "callbacks", callbacks) if isinstance(each, Run)), None
        )
        if run is None:
            return super().fit(*args, **kwargs)
        self._check_saved()
        with run.fitting(self, given.get("x"), given.get("steps_per_epoch"), given.get("initial_epoch", 0)):
            return super().fit(*args, **kwargs)

    def _check_saved(self) -> None:
        """An error if ``fit`` cannot save itself."""

    # --- one microbatch -------------------------------------------------------------------------------------

    def _train_microbatch(self, x: Any, y: Any, sample_weight: Any) -> Any:
        with tf.GradientTape() as tape:
            predictions, loss = self._predict_and_compare(x, y, sample_weight, True)
            scaled = self._scale(loss)
        return tape.gradient(scaled, self.trainable_variables), loss, predictions

    def _test_microbatch(self, x: Any, y: Any, sample_weight: Any) -> Any:
        predictions, loss = self._predict_and_compare(x, y, sample_weight, False)
        return loss, predictions

    def _predict_microbatch(self, x: Any) -> Any:
        return self(x, training=False)

    def _predict_and_compare(self, x: Any, y: Any, sample_weight: Any, training: bool) -> tuple[Any, Any]:
        predictions = self(x, training=training)
        return predictions, self._compare(x, y, predictions, sample_weight, training)

    def _compare(self, x: Any, y: Any, predictions: Any, sample_weight: Any, training: bool) -> Any:
        return self.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight, training=training)

    def _scale(self, loss: Any) -> Any:
        return loss if self.optimizer is None else self.optimizer.scale_loss(loss)

    # --- one batch ------------------------------------------------------------------------------------------

    def train_step(self, data: Any) -> Any:
        if session().place.world_size == 1:
            return super().train_step(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        gradients, loss, predictions = self._weft_steps["train"](x, y, sample_weight)
        means = [None if each is None else each.accumulate() for each in gradients]
        self.optimizer.apply_gradients(zip(means, self.trainable_variables, strict=True))
        return self._update_metrics(x, y, sample_weight, loss, predictions)

    def test_step(self, data: Any) -> Any:
        if session().place.world_size == 1:
            return super().test_step(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, predictions = self._weft_steps["test"](x, y, sample_weight)
        return self._update_metrics(x, y, sample_weight, loss, predictions)

    def predict_step(self, data: Any) -> Any:
        if session().place.world_size == 1:
            return super().predict_step(data)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return tf.nest.map_structure(lambda each: each.merge(), self._weft_steps["predict"](x))

    def _update_metrics(self, x: Any, y: Any, sample_weight: Any, loss: Any, predictions: Any) -> Any:
        rows = tf.shape(next(each for each in tf.nest.flatten(x) if each is not None))[0]
        private.loss_tracker(self).update_state(loss.reduce_mean(), sample_weight=rows)
        merged = tf.nest.map_structure(lambda each: each.merge(), predictions)
        return self.compute_metrics(x, y, merged, sample_weight=sample_weight)


class TrainingOfKerasTwo(Training):
    """The same for models of ``tf_keras``, whose losses keep their own means: microbatch by microbatch."""

    def _check_saved(self) -> None:
        raise UsageError(
            "fit of tf_keras does not save itself: use Keras 3, or write a loop over weft.checkpoints(...).batches"
        )

    def _compare(self, x: Any, y: Any, predictions: Any, sample_weight: Any, training: bool) -> Any:
        return self.compute_loss(x, y, predictions, sample_weight)

    def _scale(self, loss: Any) -> Any:
        if hasattr(self.optimizer, "get_scaled_loss"):
            raise UsageError(
                "fit() of tf_keras scales no losses of a model that is split (LossScaleOptimizer, mixed_float16): use "
                "Keras 3, or mixed_bfloat16"
            )
        return loss

    def _update_metrics(self, x: Any, y: Any, sample_weight: Any, loss: Any, predictions: Any) -> Any:
        merged = tf.nest.map_structure(lambda each: each.merge(), predictions)
        return self.compute_metrics(x, y, merged, sample_weight)
