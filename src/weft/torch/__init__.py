"""weft for PyTorch. ``import weft.torch as weft`` is how scripts use it."""

from importlib import import_module as _import_module
from types import ModuleType as _Module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from weft.communication.objects import DP_GROUP as DP_GROUP
from weft.communication.objects import MP_GROUP as MP_GROUP
from weft.communication.objects import PP_GROUP as PP_GROUP
from weft.communication.objects import RDP_GROUP as RDP_GROUP
from weft.communication.objects import TP_GROUP as TP_GROUP
from weft.communication.objects import WORLD as WORLD
from weft.communication.objects import CommGroup as CommGroup
from weft.communication.objects import RankType as RankType
from weft.communication.objects import allgather as allgather
from weft.communication.objects import barrier as barrier
from weft.communication.objects import broadcast as broadcast
from weft.communication.objects import dp_barrier as dp_barrier
from weft.communication.objects import mp_barrier as mp_barrier
from weft.communication.objects import recv_from as recv_from
from weft.communication.objects import send as send
from weft.session.ranks import dp_rank as dp_rank
from weft.session.ranks import dp_size as dp_size
from weft.session.ranks import get_dp_group as get_dp_group
from weft.session.ranks import get_mp_group as get_mp_group
from weft.session.ranks import get_pp_group as get_pp_group
from weft.session.ranks import get_rdp_group as get_rdp_group
from weft.session.ranks import get_tp_group as get_tp_group
from weft.session.ranks import get_world_group as get_world_group
from weft.session.ranks import local_rank as local_rank
from weft.session.ranks import local_size as local_size
from weft.session.ranks import mp_rank as mp_rank
from weft.session.ranks import mp_size as mp_size
from weft.session.ranks import pp_rank as pp_rank
from weft.session.ranks import pp_size as pp_size
from weft.session.ranks import rank as rank
from weft.session.ranks import rdp_rank as rdp_rank
from weft.session.ranks import rdp_size as rdp_size
from weft.session.ranks import size as size
from weft.session.ranks import tp_rank as tp_rank
from weft.session.ranks import tp_size as tp_size
from weft.session.watching import progress as progress
from weft.torch import amp as amp
from weft.torch.clip import clip_grad_norm_ as clip_grad_norm_
from weft.torch.delayed_parameters import delay_param_initialization as delay_param_initialization
from weft.torch.join import init as init
from weft.torch.join import shutdown as shutdown
from weft.torch.model import DistributedModel as DistributedModel
from weft.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from weft.torch.output import StepOutput as StepOutput
from weft.torch.replicas.large_batch import WarmUp as WarmUp
from weft.torch.replicas.large_batch import correct_momentum as correct_momentum
from weft.torch.replicas.large_batch import decay_groups as decay_groups
from weft.torch.replicas.large_batch import global_batch_weight as global_batch_weight
from weft.torch.replicas.large_batch import scale_lr as scale_lr
from weft.torch.replicas.large_batch import shared_sampler as shared_sampler
from weft.torch.replicas.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from weft.torch.replicas.sync_batch_norm import convert_sync_batchnorm as convert_sync_batchnorm
from weft.torch.session.current import get_dp_process_group as get_dp_process_group
from weft.torch.session.current import get_mp_process_group as get_mp_process_group
from weft.torch.session.current import get_pp_process_group as get_pp_process_group
from weft.torch.session.current import get_rdp_process_group as get_rdp_process_group
from weft.torch.session.current import get_tp_process_group as get_tp_process_group
from weft.torch.session.current import get_world_process_group as get_world_process_group
from weft.torch.session.current import is_initialized as is_initialized
from weft.torch.session.current import is_tracing as is_tracing
from weft.torch.split.by_hand import partition as partition
from weft.torch.split.by_hand import set_partition as set_partition
from weft.torch.split.by_hand import set_tensor_parallelism as set_tensor_parallelism
from weft.torch.split.by_hand import tensor_parallelism as tensor_parallelism
from weft.torch.split.report import partition_report as partition_report
from weft.torch.split.report import recorded_timeline as recorded_timeline
from weft.torch.step import step as step
from weft.torch.watching import log as log

if _TYPE_CHECKING:
    from weft.launch.running.notebook import notebook_run as notebook_run
    from weft.session.findings import on_finding as on_finding
    from weft.torch.activation_checkpointing import (
        set_activation_checkpointing as set_activation_checkpointing,
    )
    from weft.torch.checkpoint.export import export_checkpoint as export_checkpoint
    from weft.torch.checkpoint.export import read_model as read_model
    from weft.torch.checkpoint.rank_files import load as load
    from weft.torch.checkpoint.rank_files import save as save
    from weft.torch.checkpoint.resume import resume_from_checkpoint as resume_from_checkpoint
    from weft.torch.checkpoint.run import checkpoints as checkpoints
    from weft.torch.checkpoint.save import finish_checkpoint as finish_checkpoint
    from weft.torch.checkpoint.save import save_checkpoint as save_checkpoint
    from weft.torch.checkpoint.stream import stream_weights as stream_weights
    from weft.torch.replicas.data_check import check_batch as check_batch
    from weft.torch.replicas.data_check import check_loader as check_loader

_LATE = {
    "notebook_run": "weft.launch.running.notebook",
    "on_finding": "weft.session.findings",
    "set_activation_checkpointing": "weft.torch.activation_checkpointing",
    "export_checkpoint": "weft.torch.checkpoint.export",
    "read_model": "weft.torch.checkpoint.export",
    "load": "weft.torch.checkpoint.rank_files",
    "save": "weft.torch.checkpoint.rank_files",
    "resume_from_checkpoint": "weft.torch.checkpoint.resume",
    "checkpoints": "weft.torch.checkpoint.run",
    "finish_checkpoint": "weft.torch.checkpoint.save",
    "save_checkpoint": "weft.torch.checkpoint.save",
    "stream_weights": "weft.torch.checkpoint.stream",
    "check_batch": "weft.torch.replicas.data_check",
    "check_loader": "weft.torch.replicas.data_check",
}
"""Names whose files are loaded when a script first asks for them, so that the import is quick."""


def __getattr__(name: str) -> _Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(_import_module(_LATE[name]), name))


__all__ = [  # pyright: ignore
    name
    for name, thing in {**vars(), **_LATE}.items()
    if name[0] != "_" and (name == "amp" or not isinstance(thing, _Module))
]
"""Every name above; rooms and files of this package are no names of it."""
