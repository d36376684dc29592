"""Hugging Face's accelerate sees the replicas of a split model: as many processes as there are different batches.

Its own detection counts every rank, so that ranks of one pipeline would read different batches, or none, so that
replicas would all read the same.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch

from weft.communication import objects
from weft.compat.hf import steps
from weft.compat.modelparallel.session import state
from weft.session.ranks import local_rank, rank, rdp_rank, rdp_size
from weft.torch.model import DistributedModel
from weft.torch.session.current import session
from weft.torch.tensors.pytree import map_tensors


def install(accelerator: ModuleType) -> None:
    """Change ``accelerate.accelerator``, as far as ``smp.init()`` has been called when it is used."""
    from accelerate.state import PartialState  # type: ignore[import-not-found,import-untyped,unused-ignore]

    prepare_backend = PartialState._prepare_backend

    def backend_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, kind = prepare_backend(self, *args, **kwargs)
        if state.initialized:
            return None, accelerator.DistributedType.NO
        if backend == "smddp" and not torch.cuda.is_available():
            kind = accelerator.DistributedType.MULTI_CPU  # it takes smddp for a matter of GPUs
        return backend, kind

    PartialState._prepare_backend = backend_of
    made = PartialState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        hidden = os.environ.pop("LOCAL_RANK", None) if state.initialized else None
        try:
            made(self, *args, **kwargs)
        finally:
            if hidden is not None:
                os.environ["LOCAL_RANK"] = hidden

    PartialState.__init__ = init
    cls = accelerator.Accelerator
    for name, ours in (
        ("num_processes", rdp_size), ("process_index", rdp_rank),
        ("is_main_process", lambda: rank() == 0), ("is_local_main_process", lambda: local_rank() == 0),
    ):  # fmt: skip
        setattr(cls, name, property(_either(ours, getattr(cls, name).fget)))
    gather, for_metrics, unwrap = cls.gather, cls.gather_for_metrics, cls.unwrap_model
    reduce = cls.reduce

    def gather_replicas(self: Any, tensor: Any) -> Any:
        if not state.initialized or rdp_size() == 1:
            return gather(self, tensor)
        return gather_over_replicas(tensor)

    def gather_for_metrics(self: Any, input_data: Any, *args: Any, **kwargs: Any) -> Any:
        """Leave tensors of a microbatch as they are: replicas are at different microbatches, so nothing is gathered."""
        return input_data if steps.inside() else for_metrics(self, input_data, *args, **kwargs)

    def unwrap_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """accelerate finds the user's module in wrappers of its own and PyTorch's only."""
        own = model.module if isinstance(model, DistributedModel) else model
        return unwrap(self, own, *args, **kwargs)

    def reduce_replicas(self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if not state.initialized or rdp_size() == 1 or reduction not in ("sum", "mean"):
            return reduce(self, tensor, reduction, scale)
        return reduce_over_replicas(tensor, reduction == "mean", scale)

    cls.gather, cls.gather_for_metrics, cls.unwrap_model = gather_replicas, gather_for_metrics, unwrap_model
    cls.reduce = reduce_replicas
    wait = PartialState.wait_for_everyone

    def wait_for_everyone(self: Any) -> None:

        objects.barrier() if state.initialized and not steps.inside() else wait(self)

    PartialState.wait_for_everyone = wait_for_everyone


def _either(ours: Any, theirs: Any) -> Any:
    def get(self: Any) -> Any:
        return ours() if state.initialized else theirs(self)

    return get


def gather_over_replicas(tree: Any) -> Any:
    """The tensors of all replicas after one another along dim 0, in a structure of the same form; a number is a row."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        return torch.cat([part.to(tensor.device) for part in objects.allgather(own, objects.RDP_GROUP)])

    return map_tensors(tree, one, attributes=True)


def reduce_over_replicas(tree: Any, mean: bool, scale: float) -> Any:
    """The sum over all replicas, or their mean, times ``scale``, in a structure of the same form."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().to("cpu", copy=True)
        with session().doing("Accelerator.reduce()"):
            torch.distributed.all_reduce(total, group=session().group("rdp"))
        return (total / rdp_size() if mean else total).to(tensor.device) * scale

    return map_tensors(tree, one, attributes=True)
