"""``torch.nn.SyncBatchNorm`` on a machine without CUDA, where PyTorch's own does not run: weft's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.torch.replicas.sync_batch_norm import BatchNorm, convert_sync_batchnorm
from weft.torch.replicas.sync_batch_norm import SyncBatchNorm as WeftSyncBatchNorm
from weft.torch.session import current


class SyncBatchNorm(WeftSyncBatchNorm):
    """Statistics in training are those of all processes of ``process_group``."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **others)
        self.process_group = process_group

    def exchange(self) -> Any:
        if (
            not dist.is_available()
            or not dist.is_initialized()
            or dist.get_world_size(self.process_group) == 1
        ):
            return None
        return self._gather

    def _gather(self, mine: Tensor, phase: int) -> Tensor:
        everything = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.process_group))]
        dist.all_gather(everything, mine.detach(), group=self.process_group)
        return torch.stack(everything)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replace every BatchNorm in ``module``, which is returned, or its replacement if it is one itself."""
        if current.is_initialized():
            return convert_sync_batchnorm(module)
        result = module
        if isinstance(module, BatchNorm) and not isinstance(module, WeftSyncBatchNorm):
            result = cls(
                module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats,
                process_group,
            )  # fmt: skip
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "training"):
                setattr(result, name, getattr(module, name))
        for name, child in module.named_children():
            result.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return result


def install() -> None:
    """PyTorch's own stays where its DistributedDataParallel looks for it, to refuse it on a CPU."""
    nn.SyncBatchNorm = SyncBatchNorm  # type: ignore[misc,assignment]
