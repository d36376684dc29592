"""A gradient tape and an optimizer whose gradients are those of all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from weft.errors import UsageError
from weft.tensorflow.data_parallel.collectives import (
    Compression,
    ReduceOp,
    average_gradients,
    check_gradients,
)


class DistributedGradientTape:
    """Wraps a ``tf.GradientTape``: what :meth:`gradient` returns is averaged over the replicas.

    Works eagerly and in a ``tf.function``. ``compression``: ``Compression.none`` or ``Compression.fp16``.
    ``sparse_as_dense``: gradients of embeddings become dense tensors, instead of having the rows of all replicas:
    less to send where most rows are used, and another update by Adam and its like of Keras than in one process.
    ``axis``: the ranks that average.

    Raises:
        UsageError: ``device_dense`` or ``device_sparse`` is given, or an ``op`` that is not ``ReduceOp.AVERAGE``.
    """

    def __init__(
        self,
        tape: Any = None,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: Any = ReduceOp.AVERAGE,
        *,
        axis: str = "rdp",
        persistent: bool = False,
        watch_accessed_variables: bool = True,
    ) -> None:
        check_gradients(type(self).__name__, device_dense, device_sparse, op)
        self._tape = tape if tape is not None else tf.GradientTape(persistent, watch_accessed_variables)
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._axis = axis

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As that of ``tf.GradientTape``, averaged; every replica calls it, with alike sources."""
        found = self._tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(found, expand_composites=False)
        means = average_gradients(flat, self._compression, self._axis, self._sparse_as_dense)
        return tf.nest.pack_sequence_as(found, means)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        if name == "_tape":
            raise AttributeError(name)
        return getattr(self._tape, name)


_MARK = "_weft_averages"

Average = Callable[[list[Any]], list[Any]]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = ReduceOp.AVERAGE,
    bucket_cap_mb: int = 25,
    *,
    axis: str = "rdp",
) -> Any:
    """The optimizer itself, which from now on averages gradients over the replicas before it applies them.

    Optimizers of Keras 3 and ``tf_keras``, and of TensorFlow 1, which averages when it computes them. In Keras's
    ``fit`` it needs ``model.compile(..., jit_compile=False)``: XLA has no messages.
    ``compression``, ``sparse_as_dense``, ``axis``: as for :class:`DistributedGradientTape`.

    Raises:
        UsageError: It is no optimizer; ``device_dense`` or ``device_sparse`` is given, or an ``op`` that is not
            ``ReduceOp.AVERAGE``.
    """
    check_gradients("DistributedOptimizer", device_dense, device_sparse, op)
    kind = type(optimizer)
    if not hasattr(optimizer, "apply_gradients"):
        raise UsageError(
            f"DistributedOptimizer takes an optimizer of Keras or TensorFlow, not {kind.__name__}"
        )
    if getattr(kind, _MARK, False):
        return optimizer

    def averaged(gradients: list[Any]) -> list[Any]:
        return average_gradients(gradients, compression, axis, sparse_as_dense)

    methods = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        _MARK: True,
        **_methods(optimizer, averaged),
    }
    # The same name, so that Keras's files name the class that one process would have.
    object.__setattr__(optimizer, "__class__", type(kind.__name__, (kind,), methods))
    return optimizer


def _methods(optimizer: Any, averaged: Average) -> dict[str, Any]:
    """The method of an optimizer's class that all gradients go through, with the averages in it."""
    kind = type(optimizer)
    unconverted = tf.autograph.experimental.do_not_convert

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        return kind.apply(self, averaged(list(grads)), trainable_variables)

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.apply_gradients(self, _pairs(list(grads_and_vars)), *args, **kwargs)

    def compute_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _pairs(kind.compute_gradients(self, *args, **kwargs))

    def _pairs(pairs: list[Any]) -> list[Any]:
        gradients = averaged([gradient for gradient, _ in pairs])
        return [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs, strict=True)]

    if isinstance(optimizer, keras.optimizers.Optimizer):
        return {"apply": unconverted(apply)}
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return {"compute_gradients": unconverted(compute_gradients)}
    return {"apply_gradients": unconverted(apply_gradients)}
