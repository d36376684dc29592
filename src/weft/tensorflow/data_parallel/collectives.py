"""Functions that a script calls on every replica: ``init``, averages and sums, and values of one replica for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NoReturn

import tensorflow as tf

from weft.errors import UsageError
from weft.session.current import is_initialized
from weft.tensorflow import join
from weft.tensorflow.output import with_values
from weft.tensorflow.replicas import average
from weft.tensorflow.session.session import session


def init() -> None:
    """Join the job. Every process calls this first, before TensorFlow computes anything.

    Raises:
        UsageError: This process is in a job already.
    """
    if is_initialized():
        raise UsageError(
            "init() called more than once: this process has joined its job, leave the second call out"
        )
    join.init()


class ReduceOp(Enum):
    """The reductions of tensors over replicas."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


class _AsItIs:
    """Tensors travel in their own type."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """(what travels, what ``decompress`` needs to know)."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, known: Any) -> Any:
        """The tensor that has travelled, in the type that it had before."""
        return tensor


class _Half(_AsItIs):
    """Floating-point tensors travel in float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        given = tensor if isinstance(tensor, tf.IndexedSlices) else tf.convert_to_tensor(tensor)
        return (_cast(given, tf.float16) if given.dtype.is_floating else given), given.dtype

    @staticmethod
    def decompress(tensor: Any, known: Any) -> Any:
        return _cast(tensor, known)


def _cast(tensor: Any, kind: Any) -> Any:
    return with_values(tensor, lambda values: tf.cast(values, kind))


class Compression:
    """In which type tensors travel; the setting ``compression`` of weft knows more ways."""

    none = _AsItIs
    fp16 = _Half


@tf.autograph.experimental.do_not_convert
def allreduce(
    tensor: Any = None,
    param_index: int = 0,
    num_params: int = 1,
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    grad: Any = None,
) -> Any:
    """A gradient, averaged over the replicas: same shape and type. Every replica calls it for the same gradients.

    One by rows (``tf.IndexedSlices``) has the rows of all replicas.

    ``tensor``, or ``grad``: the gradient. ``param_index``: its number among the ``num_params`` gradients of the model.

    Raises:
        UsageError: There is no gradient or there are two, or no such number.
    """
    if (tensor is None) == (grad is None):
        raise UsageError("allreduce takes one gradient: allreduce(gradient, param_index, num_params)")
    given = grad if tensor is None else tensor
    if not 0 <= param_index < num_params:
        raise UsageError(
            f"param_index is {param_index} and num_params is {num_params}: parameters are numbered from 0 to "
            "num_params - 1"
        )
    if check_operation(op) is not ReduceOp.AVERAGE:
        return oob_allreduce(given, compression, op)
    sent, known = compression.compress(given)
    return compression.decompress(average.average([sent], session(), param_index)[0], known)


@tf.autograph.experimental.do_not_convert
def oob_allreduce(
    tensor: Any, compression: Any = Compression.none, op: ReduceOp = ReduceOp.AVERAGE, *, axis: str = "rdp"
) -> Any:
    """Any other tensor, a metric say, over the replicas: same shape and type.

    ``axis``: the ranks that take part, along an axis of the mesh.
    """
    sent, known = compression.compress(tensor)
    return compression.decompress(average.all_reduce(sent, check_operation(op).value, session(), axis), known)


def overlap(tensor: Any) -> Any:
    """The tensor itself. It marks gradients for XLA in the original; here they need no mark."""
    return tensor


def average_gradients(
    gradients: Sequence[Any],
    compression: Any = Compression.none,
    axis: str = "rdp",
    sparse_as_dense: bool = False,
) -> list[Any]:
    """Gradients, averaged over the replicas together; None stays None.

    ``sparse_as_dense``: gradients by rows become dense before.
    """
    there = [number for number, gradient in enumerate(gradients) if gradient is not None]
    given = [gradients[number] for number in there]
    if sparse_as_dense:
        given = list(map(tf.convert_to_tensor, given))
    pairs = list(map(compression.compress, given))
    found = average.average([sent for sent, _ in pairs], session(), axis=axis)
    result: list[Any] = [None] * len(gradients)
    for number, tensor, (_, known) in zip(there, found, pairs, strict=True):
        result[number] = compression.decompress(tensor, known)
    return result


def check_operation(op: Any) -> ReduceOp:
    """The operation, if it is one.

    Raises:
        UsageError: It is none.
    """
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op is {op!r}: write one of {', '.join(map(str, ReduceOp))}")
    return op


def check_gradients(what: str, device_dense: str, device_sparse: str, op: Any) -> None:
    """Refuse arguments that gradients cannot go by.

    Raises:
        UsageError: A device is given, or an operation that is not the average.
    """
    if device_dense or device_sparse:
        _refuse(what, "device_dense and device_sparse are not supported: leave them out")
    if check_operation(op) is not ReduceOp.AVERAGE:
        _refuse(what, f"gradients are averaged, op {op} is not supported: leave it out")


def _refuse(what: str, text: str) -> NoReturn:
    raise UsageError(f"{what}: {text}")


@tf.autograph.experimental.do_not_convert
def broadcast(tensor: Any, root_rank: int = 0, *, axis: str = "rdp") -> Any:
    """The tensor of replica ``root_rank`` on all of them; every replica calls it, with one of that shape and type."""
    return average.broadcast([tensor], root_rank, session(), axis)[0]


@tf.autograph.experimental.do_not_convert
def broadcast_variables(variables: Iterable[Any], root_rank: int = 0, *, axis: str = "rdp") -> Any:
    """Give variables the values that they have on replica ``root_rank``; every replica calls it with the same ones.

    Call it when the variables are there, for those of an optimizer after the first batch.
    """
    return average.broadcast_variables(list(variables), root_rank, session(), axis)


def broadcast_global_variables(root_rank: int = 0, *, axis: str = "rdp") -> Any:
    """The operation that gives all variables of a graph of TensorFlow 1 their values on replica ``root_rank``.

    Raises:
        UsageError: There is no such graph.
    """
    if tf.executing_eagerly():
        raise UsageError(
            "broadcast_global_variables is for graphs of TensorFlow 1: call broadcast_variables(model.variables, "
            "root_rank=0), and the same with the optimizer's, after the first batch"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank, axis=axis)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Runs :func:`broadcast_global_variables` when a session of TensorFlow 1 has begun."""

    def __init__(self, root_rank: int = 0, device: str = "", *, axis: str = "rdp") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._axis = axis
        self._operation: Any = None

    def begin(self) -> None:
        """Make the operation, before the graph is closed."""
        self._operation = broadcast_global_variables(self._root_rank, axis=self._axis)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        session.run(self._operation)
