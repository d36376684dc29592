"""A mark of a tensor's writes, to see later if it has been written since."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from weft.torch.pytorch.private import version


def unwritten(tensor: Tensor) -> Callable[[], bool]:
    """A question for later: has the tensor not been written since this call?

    Writes into inference tensors are not counted by PyTorch, so their content is compared.
    """
    if tensor.is_inference() and tensor.device.type != "meta" and tensor.layout == torch.strided:
        content = tensor.clone()
        return lambda: (
            content.shape == tensor.shape and bool(((content == tensor) | (content != content)).all())
        )
    count = version(tensor)
    return lambda: version(tensor) == count


def noted(module: nn.Module) -> dict[str, tuple[Tensor, int, Tensor]]:
    """The buffers of a module by name, each as :func:`is_new` asks for it later."""
    return {name: (b, version(b), b.detach().clone()) for name, b in module.named_buffers()}


def is_new(buffer: Tensor, old: Tensor, old_version: int, content: Tensor) -> bool:
    """True if a buffer was replaced or written; batch norm's kernels do not count their writes as versions."""
    if buffer is not old or version(buffer) != old_version:
        return True
    return buffer.device.type != "meta" and not torch.equal(buffer, content)
