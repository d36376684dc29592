"""A gradient tape whose gradients are those of all replicas."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from weft.tensorflow.data_parallel.reduction import Compression, ReduceOp, average_gradients, check_gradients


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
