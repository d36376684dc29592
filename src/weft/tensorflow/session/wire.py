"""TensorFlow's tensors to and from the network, which moves torch tensors: the same memory under two names.

See ``docs/design/messages.md``. TensorFlow ends the process when memory that it takes over
is not aligned to 64 bytes; what arrives by a channel is (``weft.transport.channel.ALIGNMENT``), and is looked at here.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch

from weft.errors import TransportError
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
