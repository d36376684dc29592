"""The module that scripts import as ``horovod.tensorflow``, where Horovod is not installed.

In a job of ``smp`` with the setting ``horovod`` the ranks are the replicas, as in the original; else all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.compat.tensorflow.interface import state
from weft.errors import UsageError
from weft.session.current import is_initialized
from weft.session.ranks import local_rank, local_size
from weft.tensorflow import data_parallel, join
from weft.tensorflow.data_parallel import Compression, ReduceOp
from weft.tensorflow.join import shutdown
from weft.tensorflow.session.session import session

Average, Sum, Min, Max = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX


def axis() -> str:
    """The ranks that Horovod's functions mean, along an axis of the mesh."""
    return "world" if state.is_used and not state.cfg.horovod else "rdp"


def init(*ignored: Any, **also_ignored: Any) -> None:
    """Join the job, unless ``smp.init`` has done so."""
    if not is_initialized():
        join.init()


def rank() -> int:
    """This process's number."""
    return session().position(axis())


def size() -> int:
    """The number of processes."""
    return len(session().peers(axis()))


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    **ignored: Any,
) -> Any:
    """A tensor over all processes, averaged unless ``op`` or ``average`` says otherwise: same shape and type.

    Raises:
        UsageError: Both of them are given.
    """
    if average is not None and op is not None:
        raise UsageError("allreduce was given average and op: leave average out")
    chosen = op if op is not None else Sum if average is False else Average
    return data_parallel.oob_allreduce(tensor, compression, chosen, axis=axis())


def broadcast(tensor: Any, root_rank: int, name: str | None = None, **ignored: Any) -> Any:
    """The tensor of process ``root_rank`` on all of them."""
    return data_parallel.broadcast(tensor, root_rank, axis=axis())


def broadcast_variables(variables: Iterable[Any], root_rank: int, **ignored: Any) -> Any:
    """Give variables the values that they have in process ``root_rank``."""
    return data_parallel.broadcast_variables(variables, root_rank, axis=axis())


def broadcast_global_variables(root_rank: int) -> Any:
    """The same with all variables of a graph of TensorFlow 1."""
    return data_parallel.broadcast_global_variables(root_rank, axis=axis())


class BroadcastGlobalVariablesHook(data_parallel.BroadcastGlobalVariablesHook):
    """The same when a session of TensorFlow 1 has begun."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__(root_rank, device, axis=axis())


class DistributedGradientTape(data_parallel.DistributedGradientTape):
    """A tape whose gradients are averaged over all processes."""

    def __init__(
        self,
        gradtape: Any,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: Any = Average,
        **ignored: Any,
    ) -> None:
        super().__init__(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, axis=axis())


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    **ignored: Any,
) -> Any:
    """An optimizer whose gradients are averaged over all processes.

    Raises:
        UsageError: ``backward_passes_per_step`` is not 1.
    """
    if backward_passes_per_step != 1:
        raise UsageError(
            f"backward_passes_per_step is {backward_passes_per_step}: leave it out, and give Keras's optimizer "
            "gradient_accumulation_steps"
        )
    return data_parallel.DistributedOptimizer(
        optimizer,
        name,
        use_locking,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        axis=axis(),
    )


__all__ = [
    "Average", "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape", "DistributedOptimizer", "Max",
    "Min", "Sum", "allreduce", "broadcast", "broadcast_global_variables", "broadcast_variables", "init",
    "is_initialized", "local_rank", "local_size", "rank", "shutdown", "size",
]  # fmt: skip
