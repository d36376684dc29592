"""The names of ``import smdistributed.modelparallel.tensorflow as smp``."""

from __future__ import annotations

from typing import Any

from weft.compat.state import State
from weft.tensorflow import (
    CommGroup,
    RankType,
    StepOutput,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    dp_rank,
    dp_size,
    get_dp_group,
    get_mp_group,
    get_pp_group,
    get_rdp_group,
    get_tp_group,
    is_initialized,
    is_tracing,
    join,
    local_rank,
    local_size,
    mp_barrier,
    mp_rank,
    mp_size,
    partition,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    recv_from,
    register_post_partition_hook,
    send,
    shutdown,
    size,
    step,
    tp_rank,
    tp_size,
)
from weft.tensorflow import DistributedModel as WeftModel

state = State(join)
init = state.init


WORLD, MP_GROUP, DP_GROUP, TP_GROUP, PP_GROUP, RDP_GROUP = CommGroup
WORLD_RANK, MP_RANK, DP_RANK, TP_RANK, PP_RANK, RDP_RANK = RankType


class DistributedModel(WeftModel):
    """A Keras model that is split: derive from it as from ``keras.Model``, and write ``call``."""

    def profile(self, *inputs: Any, **also_inputs: Any) -> None:
        """Change nothing: the first step measures what the split needs."""


__all__ = [
    "CommGroup", "DP_GROUP", "DP_RANK", "DistributedModel", "MP_GROUP", "MP_RANK", "PP_GROUP", "PP_RANK", "RDP_GROUP",
    "RDP_RANK", "RankType", "StepOutput", "TP_GROUP", "TP_RANK", "WORLD", "WORLD_RANK", "allgather", "barrier",
    "broadcast", "dp_barrier", "dp_rank", "dp_size", "get_dp_group", "get_mp_group", "get_pp_group", "get_rdp_group",
    "get_tp_group", "init", "is_initialized", "is_tracing", "local_rank", "local_size", "mp_barrier", "mp_rank",
    "mp_size", "partition", "pp_rank", "pp_size", "rank", "rdp_rank", "rdp_size", "recv_from",
    "register_post_partition_hook", "send", "shutdown", "size", "state", "step", "tp_rank", "tp_size",
]  # fmt: skip
