"""The names of ``import smdistributed.modelparallel.torch as smp``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from weft.compat.modelparallel.model import DistributedModel
from weft.compat.modelparallel.optimizer import DistributedOptimizer
from weft.compat.modelparallel.session import init, state
from weft.compat.modelparallel.tensor_parallel import (
    set_tensor_parallelism,
    tensor_parallelism,
    tp_register,
    tp_register_with_module,
)
from weft.compat.modelparallel.tensor_parallel import tensor_parallelism as split_tensors
from weft.torch import (
    StepOutput,
    delay_param_initialization,
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    is_initialized,
    is_tracing,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    partition,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    set_partition,
    shutdown,
    size,
    step,
    tp_rank,
    tp_size,
)
from weft.torch.activation_checkpointing import set_activation_checkpointing


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tp_config: Any
) -> Iterator[None]:
    """Modules built inside take no memory until the partition, and their parameters are of ``dtype``.

    ``tensor_parallelism``: as in :func:`tensor_parallelism` with ``tp_config``; without it that changes nothing.
    """
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        if dtype is not None:
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, before)
        stack.enter_context(delay_param_initialization())
        if tensor_parallelism:
            stack.enter_context(split_tensors(**tp_config))
        yield


__all__ = [
    "DistributedModel", "DistributedOptimizer", "StepOutput", "delay_param_initialization", "dp_rank", "dp_size",
    "get_dp_group", "get_dp_process_group", "get_mp_group", "get_mp_process_group", "get_pp_group",
    "get_pp_process_group", "get_rdp_group", "get_rdp_process_group", "get_tp_group", "get_tp_process_group",
    "get_world_process_group", "init", "is_initialized", "is_tracing", "local_rank", "local_size", "model_creation",
    "mp_rank", "mp_size", "partition", "pp_rank", "pp_size", "rank", "rdp_rank", "rdp_size",
    "set_activation_checkpointing", "set_partition", "set_tensor_parallelism", "shutdown", "size", "state", "step",
    "tensor_parallelism", "tp_rank", "tp_register", "tp_register_with_module", "tp_size",
]  # fmt: skip
