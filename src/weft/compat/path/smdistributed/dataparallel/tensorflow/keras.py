"""``import smdistributed.dataparallel.tensorflow.keras as sdp``: what a script with Keras's ``fit`` uses."""

from weft.tensorflow.data_parallel import (
    Compression,
    DistributedOptimizer,
    ReduceOp,
    allreduce,
    broadcast,
    init,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from weft.tensorflow.data_parallel import keras as callbacks

__all__ = [
    "Compression", "DistributedOptimizer", "ReduceOp", "allreduce", "broadcast", "callbacks", "init", "local_rank",
    "local_size", "rank", "shutdown", "size",
]  # fmt: skip
