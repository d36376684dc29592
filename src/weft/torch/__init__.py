"""weft for PyTorch. ``import weft.torch as weft`` is how scripts use it."""

from __future__ import annotations

from weft.torch import amp, placement
from weft.torch.batch_norm import SyncBatchNorm, convert_sync_batchnorm
from weft.torch.checkpoint import finish_checkpoint, resume_from_checkpoint, save_checkpoint
from weft.torch.data_check import check_batch, check_loader
from weft.torch.delayed import delay_param_initialization
from weft.torch.exports import export_checkpoint, read_model
from weft.torch.files import load, save
from weft.torch.large_batch import (
    WarmUp,
    correct_momentum,
    decay_groups,
    global_batch_weight,
    scale_lr,
    shared_sampler,
)
from weft.torch.model import DistributedModel
from weft.torch.norms import clip_grad_norm_
from weft.torch.objects import (
    DP_GROUP,
    MP_GROUP,
    PP_GROUP,
    RDP_GROUP,
    TP_GROUP,
    WORLD,
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    recv_from,
    send,
)
from weft.torch.optimizer import DistributedOptimizer
from weft.torch.output import StepOutput
from weft.torch.placement import set_partition
from weft.torch.ranks import (
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
    get_world_group,
    get_world_process_group,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from weft.torch.reports import partition_report, recorded_timeline
from weft.torch.state import init, is_initialized, is_tracing, shutdown
from weft.torch.step import step
from weft.torch.watching import log, progress

partition = placement.partition  # after the imports, one of which binds the submodule of this name

__all__ = [
    "CommGroup",
    "DP_GROUP",
    "DistributedModel",
    "DistributedOptimizer",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "RankType",
    "StepOutput",
    "SyncBatchNorm",
    "TP_GROUP",
    "WORLD",
    "WarmUp",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "check_batch",
    "check_loader",
    "clip_grad_norm_",
    "convert_sync_batchnorm",
    "correct_momentum",
    "decay_groups",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "export_checkpoint",
    "finish_checkpoint",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_group",
    "get_world_process_group",
    "global_batch_weight",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "log",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "partition",
    "partition_report",
    "pp_rank",
    "pp_size",
    "progress",
    "rank",
    "rdp_rank",
    "rdp_size",
    "read_model",
    "recorded_timeline",
    "recv_from",
    "scale_lr",
    "send",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "set_partition",
    "shared_sampler",
    "shutdown",
    "size",
    "step",
    "tp_rank",
    "tp_size",
]
