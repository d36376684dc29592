"""Means, sums and copies of TensorFlow's tensors over ranks, called eagerly or written into a graph.

In a graph each call is one operation that calls Python when the graph runs. TensorFlow runs those of a ``tf.function``
in the order of their making, so that the ranks meet in the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch
import torch.distributed as dist

from weft.errors import DivergenceError, UsageError
from weft.reduce.choice import choose
from weft.reduce.compression import make
from weft.reduce.lane import Lane
from weft.session.collectives import gather_texts
from weft.session.recording import record
from weft.tensorflow.replicas.flat import Flat
from weft.tensorflow.session.session import Session
from weft.tensorflow.trace import capture

AVERAGED = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
OPERATIONS = {"average": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN,
              "max": dist.ReduceOp.MAX}  # fmt: skip

Run = Callable[[Sequence[Any]], list[Any]]


@tf.autograph.experimental.do_not_convert
def average(tensors: Sequence[Any], session: Session, number: int = 0, axis: str = "rdp") -> list[Any]:
    """The mean of each tensor over the replicas, in its shape and type. Every replica calls it, in the same order.

    They travel as the settings ``all_reduce`` and ``compression`` say. Gradients by rows become dense.

    ``number``: tells calls with different tensors apart, for a compression that makes up for its errors in the next
    call. ``axis``: the ranks that average, along an axis of the mesh.

    Raises:
        UsageError: A tensor is not one of float16, bfloat16, float32 and float64.
        DivergenceError: The replicas' tensors differ in shape or type.
    """
    dense = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for place, tensor in enumerate(dense):
        if tensor.dtype not in AVERAGED:
            raise UsageError(
                f"tensor {place} of those to average is of {tensor.dtype.name}: cast it to one of "
                f"{', '.join(each.name for each in AVERAGED)}, or add it up with all_reduce"
            )
    if len(session.peers(axis)) == 1 or not dense:
        return dense

    def run(given: Sequence[Any]) -> list[Any]:
        lanes = _lanes(session, axis)
        lanes.check_alike(given)
        flat = Flat(given, lanes.lane.scale)
        works = [lanes.lane.launch(number, part) for part in flat.parts]
        for work in works:
            work.wait()
        return flat.tensors()

    return _called(session, run, dense, "the gradients")


@tf.autograph.experimental.do_not_convert
def all_reduce(tensor: Any, op: str, session: Session, axis: str = "rdp") -> Any:
    """One tensor over the ranks of an axis, in its shape and type: ``op`` is "average", "sum", "min" or "max".

    Raises:
        UsageError: There is no such ``op``, or it is the average of whole numbers.
    """
    if op not in OPERATIONS:
        raise UsageError(f"all_reduce has the operations {', '.join(OPERATIONS)}, not {op!r}")
    dense = tf.convert_to_tensor(tensor)
    if op == "average" and dense.dtype not in AVERAGED:
        raise UsageError(
            f"the average of a tensor of {dense.dtype.name} is no {dense.dtype.name}: cast it first"
        )
    ranks = session.peers(axis)
    if len(ranks) == 1:
        return dense

    def run(given: Sequence[Any]) -> list[Any]:
        flat = Flat(given, 1.0 / len(ranks) if op == "average" else 1.0)
        for part in flat.parts:
            dist.all_reduce(part, OPERATIONS[op], group=session.group(axis))
        return flat.tensors()

    @tf.custom_gradient
    def reduced(value: Any) -> tuple[Any, Any]:
        def gradient(following: Any) -> Any:
            if op in ("min", "max"):
                raise UsageError(f"the {op} over replicas has no gradient: use tf.stop_gradient on it")
            return all_reduce(following, op, session, axis)

        return _called(session, run, [value], "all_reduce()")[0], gradient

    return reduced(dense)


@tf.autograph.experimental.do_not_convert
def broadcast(tensors: Sequence[Any], root: int, session: Session, axis: str = "rdp") -> list[Any]:
    """The tensors of the rank at position ``root`` of an axis, on all ranks of it. Shapes and types are alike.

    Raises:
        UsageError: There is no such position.
    """
    ranks = session.peers(axis)
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < len(ranks):
        raise UsageError(f"there is no rank {root!r} to broadcast from: the ranks are 0 to {len(ranks) - 1}")
    dense = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if len(ranks) == 1 or not dense:
        return dense

    def run(given: Sequence[Any]) -> list[Any]:
        flat = Flat(given)
        for part in flat.parts:
            dist.broadcast(part.view(torch.uint8), ranks[root], group=session.group(axis))
        return flat.tensors()

    return _called(session, run, dense, "broadcast()")


@tf.autograph.experimental.do_not_convert
def broadcast_variables(variables: Sequence[Any], root: int, session: Session, axis: str = "rdp") -> Any:
    """Give variables the values that they have on the rank at position ``root``.

    In a graph of TensorFlow 1 it returns the operation that does it.
    """
    known = list(variables)
    values = broadcast(known, root, session, axis)
    if len(session.peers(axis)) == 1:
        return tf.no_op()
    done = [variable.assign(value) for variable, value in zip(known, values, strict=True)]
    return tf.group(*done) if done and all(tf.is_tensor(each) for each in done) else tf.no_op()


def broadcast_from_first(variables: Sequence[Any], session: Session) -> None:
    """Give variables the values that they have on the first replica: all begin with the same ones."""
    broadcast_variables(variables, 0, session)


class Lanes:
    """The way of averages over the ranks of one axis, and what was found to be alike on them. All make theirs at once.

    Attributes:
        lane: Through it flat tensors are averaged.
    """

    def __init__(self, session: Session, axis: str) -> None:
        settings = session.settings
        compression = make(settings.compression) if settings.compression else None
        group = dist.new_group(
            session.peers(axis), session.timeout, "gloo", use_local_synchronization=True
        )  # of its own, so that its sums never mix with those of a script
        algorithm = settings.all_reduce
        if settings.deterministic and algorithm == "auto":  # which would measure
            algorithm = "direct"
        collective = choose(group, algorithm, compressed=compression is not None, timeout=session.timeout)
        self.lane = Lane(collective, compression)
        self._port = session.port(axis)
        self._alike: set[str] = set()

    def check_alike(self, tensors: Sequence[Any]) -> None:
        """Refuse tensors that differ between the ranks, when such ones come up for the first time.

        Raises:
            DivergenceError: They differ.
        """
        own = ", ".join(f"{tensor.dtype.name}{tensor.shape.as_list()}" for tensor in tensors)
        if own in self._alike:
            return
        for place, other in enumerate(gather_texts(own, self._port)):
            if other != own:
                raise DivergenceError(
                    f"the replicas average different tensors: {own} here, {other} on replica {place}"
                )
        self._alike.add(own)

    def close(self) -> None:
        """End its threads; nothing is in flight."""
        self.lane.close()


def _lanes(session: Session, axis: str) -> Lanes:
    settings = session.settings  # a repeated init may have changed them
    key = Lanes, session.peers(axis), settings.all_reduce, settings.compression, settings.deterministic
    if key not in session.kept:
        session.kept[key] = Lanes(session, axis)
    found = session.kept[key]
    assert isinstance(found, Lanes)
    return found


def _called(session: Session, run: Run, tensors: list[Any], what: str) -> list[Any]:
    """What ``run`` makes of tensors, each of the same shape and type: now, or when the graph runs."""
    if capture.tracing() is not None:
        raise UsageError(
            f"{what} cannot go over the replicas inside of a weft.step function, where microbatches are in flight "
            "together: average what the step returns"
        )

    def guarded(*given: Any) -> list[Any]:
        session.check_whole()
        with session.guarded(), session.doing(what), record(session, "reduce"):
            return run(given)

    if tf.executing_eagerly():
        return guarded(*tensors)
    found = tf.py_function(guarded, tensors, [tensor.dtype for tensor in tensors])
    for each, tensor in zip(found, tensors, strict=True):
        each.set_shape(tensor.shape)
    return list(found)
