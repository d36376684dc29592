"""``fit`` of a split model that saves itself: what ``weft.checkpoints(...)`` does as one of its callbacks.

begin    the newest whole save comes back, and Keras begins with its epoch; used batches are drawn, and not trained
batch    is a step of the loop: all is saved after every so many, and when the job is asked to end
end      the last step is saved, and whether another callback has stopped the training
"""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from weft.checkpoint.loop import Loop
from weft.errors import CheckpointError, UsageError
from weft.tensorflow import private
from weft.tensorflow.checkpoint.position import Position

Callback: Any = keras.callbacks.Callback


class InFit(Loop, Callback, ABC):
    """A loop of steps that is Keras's."""

    _position: Position
    _fitted: Any = None
    _epochs: list[Callable[[int], None]] = []
    _per_epoch: int | None = None
    _fits = _skip = _before = _first = 0
    _skipping = False

    @contextmanager
    def fitting(self, model: Any, data: Any, steps_per_epoch: int | None, first: int) -> Iterator[None]:
        """Inside, ``model.fit`` runs, with this as a callback. ``first``: its ``initial_epoch``.

        Raises:
            UsageError: Such a call cannot go on in the middle.
        """
        if self._fits:
            raise UsageError(
                "weft.checkpoints was in a call of fit already: make another one, with a folder of its own, for each"
            )
        endless = isinstance(data, tf.data.Dataset) and int(data.cardinality()) < 0
        if steps_per_epoch is not None and not endless:
            raise UsageError(
                f"fit(steps_per_epoch={steps_per_epoch}) with weft.checkpoints takes a tf.data.Dataset that does not "
                "end: leave it out, or write .repeat()"
            )
        self._fits, self._first, self._per_epoch, self._fitted = 1, first, steps_per_epoch, model
        try:
            with private.watch_epochs() as self._epochs:
                yield
        except BaseException:
            if self._entered:
                self.__exit__(*sys.exc_info())
            raise
        finally:
            private.begin_fit(model, None)
            self._epochs = []

    def on_train_begin(self, logs: Any = None) -> None:
        if not self._fits:
            raise UsageError("weft.checkpoints saves fit of a DistributedModel: hand the model over to one")
        self.__enter__()
        place = self._position
        private.begin_fit(self._fitted, self.params["epochs"] if place.over else place.epoch)
        self._skip = place.batch
        over = max(place.epoch - self._first, 0)
        if self._per_epoch is not None:
            self._before = over * self._per_epoch
        else:
            for _ in range(over):
                self._epochs[0](place.length)
        train = self._fitted.train_function
        self._fitted.train_function = lambda batches: self._draw(batches) or train(batches)

    def _draw(self, batches: Any) -> Any:
        """Draw a batch that was used before the restart; None if there is no such batch any more."""
        while self._before:
            self._before -= 1
            next(batches)
        if not self._skip:
            return None
        batch = next(batches)
        self._skip -= 1
        if not self._skip:
            self._catch_up(batch)
        return {"": 0.0}  # Keras shows what its metrics say

    def _catch_up(self, batch: Any) -> None:
        """All used batches were drawn: metrics and random states are those of the save."""
        saved = self._position.metrics or []
        if len(saved) != len(_metrics(self._fitted)):  # Keras makes them when it traces the first step
            tf.function(self._fitted.train_step, autograph=False).get_concrete_function(batch)
        kept = _metrics(self._fitted)
        if len(saved) != len(kept):
            raise CheckpointError(
                f"the save holds {len(saved)} values of metrics, this model has {len(kept)}: compile it as before"
            )
        for value, variable in zip(saved, kept, strict=True):
            plain = private.underlying(variable)
            variable.assign(np.frombuffer(value, plain.dtype.as_numpy_dtype).reshape(plain.shape))
        self._position.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._position.epoch = epoch
        if self._skip:
            self._position.reopen()
        else:
            self._position.begin()
            self._position.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._skipping = self._skip > 0
        if not self._skipping:
            self._reach(self.step + 1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._skipping:
            return
        self._begin_step()
        self._position.batch += 1
        self._end_step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._skip:
            raise UsageError(
                f"{self._position.batch} batches of the epoch were used before the restart, and the data gave "
                f"{self._position.batch - self._skip}: go on with the same data"
            )
        self._position.end_epoch()
        if epoch + 1 >= self.params["epochs"]:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        if self._fitted.stop_training and not self._position.over:
            self._position.over = True
            self._saved = -1
        self.__exit__(None, None, None)

    def _note_metrics(self) -> None:
        """Puts what the metrics have counted in this epoch into the next save."""
        if self._fits:
            self._position.metrics = [
                tf.convert_to_tensor(each).numpy().tobytes() for each in _metrics(self._fitted)
            ]


def _metrics(model: Any) -> list[Any]:
    """The variables of a model's metrics."""
    return [variable for metric in model.metrics for variable in metric.variables]
