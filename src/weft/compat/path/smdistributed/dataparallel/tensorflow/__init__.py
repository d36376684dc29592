"""``import smdistributed.dataparallel.tensorflow as sdp``."""

from weft.compat.refused import need_tensorflow

need_tensorflow(__name__)

from smdistributed.dataparallel.tensorflow import keras as keras  # noqa: E402
from weft.compat.tensorflow.optimizers import install as _install  # noqa: E402
from weft.tensorflow.data_parallel import (  # noqa: E402
    BroadcastGlobalVariablesHook,
    Compression,
    DistributedGradientTape,
    DistributedOptimizer,
    ReduceOp,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    init,
    local_rank,
    local_size,
    oob_allreduce,
    overlap,
    rank,
    shutdown,
    size,
)

_install()

__all__ = [
    "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape", "DistributedOptimizer", "ReduceOp",
    "allreduce", "broadcast", "broadcast_global_variables", "broadcast_variables", "init", "keras", "local_rank",
    "local_size", "oob_allreduce", "overlap", "rank", "shutdown", "size",
]  # fmt: skip
