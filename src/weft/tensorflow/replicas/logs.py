"""The logs that callbacks get: the numbers of one process, the same on every rank.

A replica's own numbers are those of its data. A callback that stops, saves or slows down by them would do so on one
replica and not on another. So the states of metrics are merged as Keras merges them over devices: each variable says
how, and most are sums. What is no metric's result is averaged. A metric of a layer has its states on the layer's
partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist

from weft.tensorflow import private
from weft.tensorflow.replicas.average import Check
from weft.tensorflow.session.session import Session, session


def watch_logs() -> None:
    """From now on models that are split, and models that hold such ones, give callbacks the numbers of all ranks."""
    private.watch_logs(lambda model, parts, logs: logs_of_all(model, parts, logs, session()))


def logs_of_all(model: Any, parts: Sequence[Any], logs: Any, joined: Session) -> Any:
    """The logs of a batch, or of an epoch or an evaluation at its end; every rank calls this, outside of graphs.

    ``model``: a model of any Keras, whose metrics have seen this replica's data. ``parts``: the models of weft that it
    is, or holds.
    """
    states = list({id(each): each for metric in model.metrics for each in metric.variables}.values())
    owners = [_owner(each, parts) if joined.mesh.pp > 1 else None for each in states]
    if not isinstance(logs, Mapping) or (
        joined.mesh.rdp == 1 and not any(owner is not None for owner in owners)
    ):
        return logs
    numbers = {name: np.asarray(value) for name, value in logs.items()}
    numbers = {name: value for name, value in numbers.items() if value.dtype.kind in "fiub"}
    with joined.guarded(), joined.doing("the logs of all ranks"):
        check = Check(joined, "world", [f"{len(states)} states of metrics", *numbers])
        replicas, here, first = joined.mesh.rdp, joined.position("pp"), joined.position("rdp") == 0
        own = [np.array(each) for each in states]
        results = model.get_metrics_result()
        counted = [
            _counted(value, _weight(each, replicas, first) if (owner or 0) == here else 0)
            for each, owner, value in zip(states, owners, own, strict=True)
        ]
        counted += [_counted(value, 0 if here else 1.0 / replicas) for value in numbers.values()]
        check.finish()
        sums = _sums(counted, joined.group("world"))
    for each, before, value in zip(states, own, sums, strict=False):
        each.assign(value.astype(before.dtype))
    try:
        merged = model.get_metrics_result()
    finally:
        for each, value in zip(states, own, strict=True):
            each.assign(value)
    found = dict(logs)
    for (name, value), mean in zip(numbers.items(), sums[len(states) :], strict=True):
        is_result = name in results and _same(results[name], value)
        found[name] = (
            merged[name] if is_result else tf.constant(mean, value.dtype if value.dtype.kind == "f" else None)
        )
    return found


def _owner(variable: Any, parts: Sequence[Any]) -> int | None:
    """The partition of a variable; None if every rank has it."""
    found = (each.owner_of(variable) for each in parts)
    return next((owner for owner in found if owner is not None), None)


def _counted(value: Any, weight: Any) -> Any:
    """A rank's part of a sum; what does not count may be no number."""
    return value * weight if weight else np.zeros(value.shape)


def _sums(parts: list[Any], group: Any) -> list[Any]:
    """Arrays, each summed over the ranks of a group, in double precision on the way."""
    flat = torch.from_numpy(
        np.concatenate([np.zeros(0), *(each.ravel().astype("float64") for each in parts)])
    )
    dist.all_reduce(flat, group=group)
    ends = np.cumsum([each.size for each in parts])
    pieces = np.split(flat.numpy(), ends[:-1])
    return [piece.reshape(each.shape) for piece, each in zip(pieces, parts, strict=True)]


def _weight(variable: Any, replicas: int, first: bool) -> Any:
    """The weight of a replica's state in the sum of all; Keras 2 has its own names for it."""
    kind = getattr(variable, "aggregation", "sum")
    kind = kind.name.lower() if isinstance(kind, tf.VariableAggregation) else kind
    if kind == "only_first_replica":
        return int(first)
    return 1 if kind == "sum" else 1.0 / replicas


def _same(one: Any, other: Any) -> bool:
    """True if two numbers are equal but for rounding, in which graphs differ, or both are none."""
    a, b = np.asarray(one), np.asarray(other)
    return a.shape == b.shape and np.allclose(a, b, 1e-5, 0.0, equal_nan=True)
