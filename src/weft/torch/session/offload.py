"""Around code whose activations wait outside of the device, if the settings say so; see ``weft.torch.offload``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from weft.torch.session import current


def offloading() -> AbstractContextManager[object]:
    """Around code of a microbatch: what autograd keeps is offloaded while the microbatch waits.

    Without partitions none waits, and all of it is offloaded.
    """
    if not current.is_initialized():
        return nullcontext()
    session = current.session()
    if session.activations is None:
        return nullcontext()
    alone = session.settings.offload_weights and session.settings.partitions == 1
    found: AbstractContextManager[object] = (
        session.activations.all() if alone else session.activations.waiting()
    )
    return found
