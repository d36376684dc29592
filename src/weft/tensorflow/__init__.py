"""weft for TensorFlow and Keras. ``import weft.tensorflow as weft`` is how scripts use it."""

from types import ModuleType as _Module

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
from weft.launch.running.notebook import notebook_run as notebook_run
from weft.session.current import is_initialized as is_initialized
from weft.session.current import is_tracing as is_tracing
from weft.session.findings import on_finding as on_finding
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
from weft.tensorflow.checkpoint.manager import CheckpointManager as CheckpointManager
from weft.tensorflow.checkpoint.run import checkpoints as checkpoints
from weft.tensorflow.checkpoint.save import finish_checkpoint as finish_checkpoint
from weft.tensorflow.checkpoint.save import resume_from_checkpoint as resume_from_checkpoint
from weft.tensorflow.checkpoint.save import save_checkpoint as save_checkpoint
from weft.tensorflow.clip import clip_by_global_norm as clip_by_global_norm
from weft.tensorflow.clip import global_norm as global_norm
from weft.tensorflow.delayed_parameters import delay_param_initialization as delay_param_initialization
from weft.tensorflow.join import init as init
from weft.tensorflow.join import shutdown as shutdown
from weft.tensorflow.model import DistributedModel as DistributedModel
from weft.tensorflow.model import register_post_partition_hook as register_post_partition_hook
from weft.tensorflow.output import StepOutput as StepOutput
from weft.tensorflow.report import partition_report as partition_report
from weft.tensorflow.split.by_hand import partition as partition
from weft.tensorflow.step import step as step
from weft.tensorflow.watching import log as log

__all__ = [  # pyright: ignore
    name for name, thing in vars().copy().items() if name[0] != "_" and not isinstance(thing, _Module)
]
"""Every name above; rooms and files of this package are no names of it."""
