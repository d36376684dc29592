"""Around code whose activations wait outside of the device, if the settings say so; see ``weft.torch.offload``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from weft.torch.session import current


def offloading() -> AbstractContextManager[object]:
    """Around code of a microbatch: what autograd keeps is offloaded while the microbatch waits."""
    if not current.is_initialized():
        return nullcontext()
    activations = current.session().activations
    return nullcontext() if activations is None else activations.waiting()
