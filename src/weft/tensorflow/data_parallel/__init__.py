"""Data parallelism for scripts with a training loop of their own: every process has a whole model and its own batches.

    import weft.tensorflow.data_parallel as dp

    dp.init()
    with tf.GradientTape() as tape:
        loss = loss_of(model(images), labels)
    tape = dp.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

The names are those of ``smdistributed.dataparallel.tensorflow``. Where a model is split, its copies are the replicas.
"""

from weft.tensorflow.data_parallel import keras as keras
from weft.tensorflow.data_parallel.optimizer import DistributedOptimizer
from weft.tensorflow.data_parallel.ranks import init, local_rank, local_size, rank, shutdown, size
from weft.tensorflow.data_parallel.reduction import Compression, ReduceOp, allreduce, oob_allreduce, overlap
from weft.tensorflow.data_parallel.tape import DistributedGradientTape
from weft.tensorflow.data_parallel.variables import (
    BroadcastGlobalVariablesHook,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
)

__all__ = [
    "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape", "DistributedOptimizer", "ReduceOp",
    "allreduce", "broadcast", "broadcast_global_variables", "broadcast_variables", "init", "keras", "local_rank",
    "local_size", "oob_allreduce", "overlap", "rank", "shutdown", "size",
]  # fmt: skip
