"""Data parallelism without a pipeline, for scripts written for PyTorch's ``DistributedDataParallel``.

Importing this registers the ``torch.distributed`` backends "weft" and "smddp".
"""

from __future__ import annotations

from weft.torch.data_parallel.backend import WeftGroup, register
from weft.torch.data_parallel.ddp import DistributedDataParallel, hook
from weft.torch.data_parallel.ranks import (
    find_ranks,
    is_available,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
)
from weft.torch.replicas.large_batch import (
    WarmUp,
    correct_momentum,
    decay_groups,
    global_batch_weight,
    scale_lr,
    shared_sampler,
)

register()
find_ranks()

__all__ = [
    "DistributedDataParallel",
    "WarmUp",
    "WeftGroup",
    "correct_momentum",
    "decay_groups",
    "global_batch_weight",
    "hook",
    "is_available",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "scale_lr",
    "shared_sampler",
    "size",
]
