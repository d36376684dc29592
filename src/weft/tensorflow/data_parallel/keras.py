"""Callbacks for Keras's ``fit``. With ``DistributedOptimizer``, compile the model with ``jit_compile=False``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from weft.tensorflow.data_parallel.collectives import broadcast_variables, oob_allreduce


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):
    """Gives all replicas the variables of replica ``root_rank`` after the first batch, the optimizer's included."""

    def __init__(self, root_rank: int = 0, device: str = "", *, axis: str = "rdp") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._axis = axis
        self._done = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Do it, once."""
        if self._done:
            return
        self._done = True
        optimizer = self.model.optimizer.variables
        known = [*self.model.variables, *(optimizer() if callable(optimizer) else optimizer)]
        once = list({id(variable): variable for variable in known}.values())
        broadcast_variables(once, self._root_rank, axis=self._axis)


class MetricAverageCallback(tf.keras.callbacks.Callback):
    """Averages an epoch's metrics over the replicas, for the callbacks after it."""

    def __init__(self, device: str = "", *, axis: str = "rdp") -> None:
        super().__init__()
        self._axis = axis

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the averages in the place of this replica's."""
        for name in sorted(logs or {}):
            value = tf.constant(float(logs[name]), tf.float64)
            logs[name] = float(oob_allreduce(value, axis=self._axis))


__all__ = ["BroadcastGlobalVariablesCallback", "MetricAverageCallback"]
