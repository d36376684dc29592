"""Data parallelism for scripts with a training loop of their own: every process has a whole model and its own batches.

    import weft.tensorflow.data_parallel as dp

    dp.init()
    with tf.GradientTape() as tape:
        loss = loss_of(model(images), labels)
    tape = dp.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

The names are those of ``smdistributed.dataparallel.tensorflow``. Where a model is split, its copies are the replicas.
"""

from weft.session.ranks import local_rank, local_size
from weft.session.ranks import rdp_rank as rank
from weft.session.ranks import rdp_size as size
from weft.tensorflow.data_parallel import keras as keras
from weft.tensorflow.data_parallel.collectives import (
    BroadcastGlobalVariablesHook,
    Compression,
    ReduceOp,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    init,
    oob_allreduce,
    overlap,
)
from weft.tensorflow.data_parallel.gradients import DistributedGradientTape, DistributedOptimizer
from weft.tensorflow.join import shutdown

__all__ = [
    "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape", "DistributedOptimizer", "ReduceOp",
    "allreduce", "broadcast", "broadcast_global_variables", "broadcast_variables", "init", "keras", "local_rank",
    "local_size", "oob_allreduce", "overlap", "rank", "shutdown", "size",
]  # fmt: skip
