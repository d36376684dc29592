"""Objects between ranks, as ``weft.torch`` sends them; tensors among them are TensorFlow's on both sides."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch

from weft.errors import UsageError
from weft.tensorflow.session.wire import from_torch, to_torch
from weft.tensorflow.trace import capture
from weft.torch.communication import objects
from weft.torch.communication.objects import CommGroup, RankType


def send(
    obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK, *, allow_pickle: bool = False
) -> None:
    """Send an object to one rank, which calls :func:`recv_from`; returns when that rank has taken it."""
    objects.send(_packed(obj, "send"), dest_rank, rank_type, allow_pickle=allow_pickle)


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD, *, allow_pickle: bool = False) -> None:
    """Send an object to all other ranks of a group, which call :func:`recv_from`; only the sender calls this."""
    objects.broadcast(_packed(obj, "broadcast"), group, allow_pickle=allow_pickle)


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK, *, allow_pickle: bool = False) -> Any:
    """The object that another rank sends with :func:`send` or :func:`broadcast`; waits for it."""
    _check("recv_from")
    return _unpacked(objects.recv_from(src_rank, rank_type, allow_pickle=allow_pickle))


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD, *, allow_pickle: bool = False) -> list[Any]:
    """Every rank's object, in the order of the group's ranks; every rank of the group calls it."""
    found: list[Any] = objects.allgather(_packed(obj, "allgather"), group, allow_pickle=allow_pickle)
    return [_unpacked(each) for each in found]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait until every rank of a group has come here."""
    _check("barrier")
    objects.barrier(group)


def dp_barrier() -> None:
    """:func:`barrier` for the ranks with the same partition."""
    barrier(CommGroup.DP_GROUP)


def mp_barrier() -> None:
    """:func:`barrier` for the ranks that hold one copy of the model."""
    barrier(CommGroup.MP_GROUP)


def _check(name: str) -> None:
    if capture.tracing() is not None or not tf.executing_eagerly():
        raise UsageError(
            f"{name}() was called while a graph is traced: call it outside of smp.step and tf.function"
        )


def _packed(obj: Any, name: str) -> Any:
    _check(name)
    return tf.nest.map_structure(
        lambda leaf: to_torch(tf.convert_to_tensor(leaf)) if _is_tensor(leaf) else leaf, obj
    )


def _is_tensor(leaf: Any) -> bool:
    return tf.is_tensor(leaf) or isinstance(leaf, tf.Variable) or hasattr(leaf, "__tf_tensor__")


def _unpacked(obj: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: from_torch(leaf) if isinstance(leaf, torch.Tensor) else leaf, obj
    )


__all__ = [
    "CommGroup", "RankType", "allgather", "barrier", "broadcast", "dp_barrier", "mp_barrier", "recv_from", "send",
]  # fmt: skip
