"""Activations that activation checkpoints keep, in host memory between the forward and the backward pass.

PyTorch's own ``torch.autograd.graph.save_on_cpu`` copies them; a checkpoint keeps the inputs of what it wraps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd.graph import save_on_cpu

from weft.torch.session import current


def offloading() -> AbstractContextManager[object]:
    """Around a call of ``torch.utils.checkpoint.checkpoint``: what it keeps is offloaded, if the settings say so."""
    if not current.is_initialized() or not current.session().settings.offload_activations:
        return nullcontext()
    return save_on_cpu(pin_memory=current.session().device.type == "cuda")
