"""TensorFlow's tensors to and from the network, which moves torch tensors: the same memory under two names.

See ``docs/design/messages.md``. TensorFlow ends the process when memory that it takes over
is not aligned to 64 bytes; what arrives by a channel is (``weft.transport.channel.ALIGNMENT``), and is looked at here.
Objects that go to other ranks have tensors of TensorFlow on both sides. Norms and flags are small sums over ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import torch
import torch.distributed as dist

from weft.communication.serialise import MAX_DEPTH
from weft.errors import TransportError
from weft.session.travel import Travel
from weft.tensorflow import private
from weft.tensorflow.session.session import Session
from weft.transport.channel import ALIGNMENT

BYTES = {tf.bool: torch.bool}
"""Types that DLPack does not carry everywhere: their bytes go as uint8."""
_TORCH = {
    tf.float32: torch.float32, tf.float64: torch.float64, tf.float16: torch.float16, tf.bfloat16: torch.bfloat16,
    tf.int64: torch.int64, tf.int32: torch.int32, tf.int16: torch.int16, tf.int8: torch.int8, tf.uint8: torch.uint8,
    tf.bool: torch.bool, tf.complex64: torch.complex64, tf.complex128: torch.complex128,
    tf.uint16: torch.uint16, tf.uint32: torch.uint32, tf.uint64: torch.uint64,
}  # fmt: skip


def to_torch(tensor: Any) -> torch.Tensor:
    """A tensor of TensorFlow as one of torch, in the same memory: do not write into it.

    Raises:
        TransportError: Tensors of that type are not sent.
    """
    if tensor.dtype not in _TORCH:
        names = ", ".join(dtype.name for dtype in _TORCH)
        raise TransportError(
            f"a tensor of {tensor.dtype.name} cannot be sent between ranks; weft sends {names}"
        )
    if not tensor.shape.num_elements():
        return torch.empty(tuple(tensor.shape), dtype=_TORCH[tensor.dtype])
    if tensor.dtype == tf.bool:
        return torch.from_dlpack(tf.experimental.dlpack.to_dlpack(tf.cast(tensor, tf.uint8))).view(torch.bool)
    return torch.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def from_torch(tensor: torch.Tensor) -> Any:
    """A tensor of torch as one of TensorFlow, in the same memory, which nobody else may write into from now on."""
    if tensor.dtype == torch.bool:
        return tf.cast(from_torch(tensor.view(torch.uint8)), tf.bool)
    tensor = tensor.detach().contiguous()
    if tensor.numel() and tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone()
    return tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))


def outgoing(value: Any) -> Any:
    """The object with tensors of torch in place of tensors and variables of TensorFlow and Keras.

    What no message can hold stays as it is: whoever writes the message says where it lies.
    """
    return _mapped(value, lambda leaf: to_torch(tf.convert_to_tensor(leaf)) if _is_tensor(leaf) else leaf)


def incoming(value: Any) -> Any:
    """The object with tensors of TensorFlow in place of those of torch."""
    return _mapped(value, lambda leaf: from_torch(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def _mapped(value: Any, change: Callable[[Any], Any], above: frozenset[int] = frozenset()) -> Any:
    """The object with other leaves. ``tf.nest`` would sort keys, which may be of types that have no order."""
    if len(above) > MAX_DEPTH or id(value) in above:
        return value
    inside = above | {id(value)}
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _mapped(item, change, inside)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change, inside) for item in value)
    return change(value)


def _in_graph() -> bool:
    return not tf.executing_eagerly()


def _is_tensor(leaf: Any) -> bool:
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
        return False
    return tf.is_tensor(leaf) or isinstance(leaf, tf.Variable) or hasattr(leaf, "__tf_tensor__")


TRAVEL = Travel(
    _in_graph,
    "while a graph is traced: call it outside of weft.step and tf.function",
    outgoing=outgoing,
    incoming=incoming,
)
"""Travel for the session of a TensorFlow process."""


def sum_over(session: Session, axis: str, numbers: Any, what: str) -> Any:
    """The sum of the ranks' numbers (float64 or float32, [n]) along an axis, on each of them.

    Every rank of the axis calls this in the same order. ``what``: what this is for, as reports of waits have it.
    """
    if len(session.peers(axis)) == 1:
        return numbers

    def all_reduce(given: Any) -> Any:
        with session.guarded(), session.doing(what):
            total = to_torch(given).to(torch.float64).clone()
            dist.all_reduce(total, group=session.group(axis))
            return tf.constant(total.tolist(), given.dtype)

    if tf.executing_eagerly():
        return all_reduce(numbers)
    found = private.call_in_order(all_reduce, [numbers], numbers.dtype)
    found.set_shape(numbers.shape)
    return found
