"""PyTorch's private names for ``DTensor``: all that weft uses of them. The others: ``private``.

Whoever imports this file loads ``DTensor`` and what its first tensor would load (``torch._dynamo``): more than a
second of processor time. ``import weft.torch`` does without. What splits tensors, or shards parameters by FSDP2, loads
it before it looks at a module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.distributed.tensor
from torch import Tensor

from weft.errors import UsageError
from weft.torch.pytorch.private import entering_thread
from weft.transport.private_c10d import Names

NAMES = Names(torch=torch)
_find = NAMES.find

_SHARDED = "tensor parallelism"
_dispatcher = _find("torch.distributed.tensor.DTensor._op_dispatcher", _SHARDED, "it is refused")
_find(
    "torch.distributed.tensor.DTensor._op_dispatcher._allow_implicit_replication", _SHARDED, "it is refused"
)


def take_plain_as_replicated() -> None:
    """From now on an operation on a ``DTensor`` takes plain tensors beside it for whole ones, backwards as well.

    Raises:
        UsageError: PyTorch does not allow it.
    """
    if _dispatcher is None or not hasattr(_dispatcher, "_allow_implicit_replication"):
        raise UsageError(f"axis tp: this does not work with PyTorch {torch.__version__}")
    if take_plain_as_replicated_here not in entering_thread:
        entering_thread.append(take_plain_as_replicated_here)
    take_plain_as_replicated_here()
    _bound_tries()


def take_plain_as_replicated_here() -> None:
    """The same on this thread: PyTorch keeps that for each thread from 2.13 on."""
    _dispatcher._allow_implicit_replication = True


_TRIES = "a bound on what PyTorch tries for an operator without a rule", "it tries all, or nothing"
_tries = _find("torch.distributed.tensor._decompositions.DecompShardingStrategy", *_TRIES)
_ways = _find(
    "torch.distributed.tensor._decompositions.DecompShardingStrategy._get_candidate_placements", *_TRIES
)
MOST_WAYS = 32
"""In how many ways PyTorch may cut the arguments of an operator that it has no rule for, to see what comes of each: two
tensors of four dimensions have 25. Three have 125, which takes a minute for attention."""


def _bound_tries() -> None:
    """An operator whose arguments can be cut in more ways is one that cannot be done on shards."""
    if _ways is None or getattr(_tries._get_candidate_placements, "__wrapped__", None) is _ways:
        return

    @functools.wraps(_ways)
    def ways(schema: Any) -> list[Any]:
        found: list[Any] = _ways(schema)
        if len(found) > MOST_WAYS:
            raise NotImplementedError(f"{schema.op}: its arguments can be cut in {len(found)} ways")
        return found

    _tries._get_candidate_placements = staticmethod(ways)


_READ = "values read out of shared parameters are those of the whole", "each replica reads its share's"
_handlers = _find("torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers", *_READ)


def read_whole(everybody: Callable[[], bool]) -> None:
    """From now on a value that is read out of a ``DTensor`` (``item()``, ``float(...)``, ``if``) is of the full tensor.

    PyTorch reads what this rank has, a part of a sum say. All ranks of the tensor's mesh have to read together.

    Args:
        everybody: Says whether they do. Where nobody knows, reading a part of a sum is a `UsageError`, since a rank
            that reads alone would wait for the others.
    """

    def read(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        (tensor,) = args
        if any(placement.is_partial() for placement in tensor.placements) and not everybody():
            raise UsageError(
                "a number is read out of parameters of which each replica has a share (sharded_data_parallel_degree), "
                "where weft does not know that all replicas read it: read it inside of the step, out of "
                "model.state_dict(), or out of tensor.full_tensor(), which every rank calls"
            )
        return tensor.full_tensor().item()

    if _handlers is not None:
        _handlers[torch.ops.aten._local_scalar_dense.default] = read


_ORDER = "causal attention takes all ranks as long", "each rank has one block of positions"
_redistribute = _find("torch.distributed.tensor._redistribute.redistribute_local_tensor", *_ORDER)
_redistributing = [
    _find(f"torch.distributed.tensor.{name}", *_ORDER) for name in ("_redistribute", "_dispatch", "_api")
]
redistributes = _redistribute is not None and all(
    getattr(module, "redistribute_local_tensor", None) is not None for module in _redistributing
)
"""True if :func:`redistribute_by` takes a function."""


def redistribute_by(other: Callable[[Callable[..., Tensor], Tensor, Any, Any], Tensor]) -> None:
    """From now on ``other`` takes a rank's part of a ``DTensor`` from one kind of parts to another.

    It gets PyTorch's own function, the part, and the two specifications: PyTorch's rules for operators give them.
    """

    @functools.wraps(_redistribute)
    def redistribute(local: Tensor, before: Any, after: Any, **how: Any) -> Tensor:
        return other(functools.partial(_redistribute, **how), local, before, after)

    for module in _redistributing:
        module.redistribute_local_tensor = redistribute
