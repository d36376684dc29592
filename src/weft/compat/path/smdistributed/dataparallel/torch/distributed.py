"""The older style: ``import smdistributed.dataparallel.torch.distributed as dist``."""

from weft.compat.dataparallel.data_parallel import (
    ReduceOp,
    all_gather,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    get_local_rank,
    get_rank,
    get_world_size,
    group,
    init_process_group,
    is_available,
    is_initialized,
)

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
]
