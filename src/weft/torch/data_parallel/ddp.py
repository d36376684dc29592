"""PyTorch's ``DistributedDataParallel`` with what SageMaker's scripts ask of it besides."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from weft.errors import UsageError
from weft.torch.data_parallel.hooks import hook


class DistributedDataParallel(TorchDDP):
    """PyTorch's own, with the same arguments and methods, and these more:

    Args:
        module: The model; on its device already.
        device_ids: As PyTorch's.
        compression: How gradients travel: ``"int8"``, ``"fp16"``, ... as :func:`weft.torch.data_parallel.hook` takes
            it; None: as they are. It takes the place of the model's communication hook.
        algorithm: How they are added up, by name; likewise. None: as PyTorch does, or measured with a compression.
        overlapping_allreduce: False: gradients travel in one bucket when the backward pass has ended.
        backward_passes_per_step: So many backward passes add up before gradients are averaged; each forward pass is
            taken to have one.
        bucket_cap_mb: MiB of gradients that travel together.
        **options: PyTorch's other arguments (``broadcast_buffers``, ``find_unused_parameters``, ...).
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        *args: Any,
        compression: str | None = None,
        algorithm: str | None = None,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        bucket_cap_mb: float | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
            raise UsageError(
                f"backward_passes_per_step is {backward_passes_per_step!r}: give a whole number of at least 1"
            )
        if bucket_cap_mb is not None and not bucket_cap_mb > 0:
            raise UsageError(
                f"bucket_cap_mb is {bucket_cap_mb!r}: give a number of MiB above 0, for example 25"
            )
        own = hook(compression, algorithm or "auto") if compression or algorithm else None
        if not overlapping_allreduce:
            size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
            bucket_cap_mb = size // (1 << 20) + 1
        if bucket_cap_mb is not None:
            options["bucket_cap_mb"] = bucket_cap_mb
        super().__init__(module, device_ids, *args, **options)
        self._passes_per_step = backward_passes_per_step
        self._passes = 0
        if own is not None:
            self.register_comm_hook(self.process_group, own)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's; gradients of the backward pass that follows are averaged unless more passes are to come."""
        if self._passes_per_step == 1 or not torch.is_grad_enabled() or not self.require_backward_grad_sync:
            return super().forward(*inputs, **kwargs)
        self._passes += 1
        if self._passes % self._passes_per_step:
            with self.no_sync():
                return super().forward(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)
