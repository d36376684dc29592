"""Means, sums and copies of TensorFlow's tensors over ranks, called eagerly or written into a graph.

In a graph each call is one operation that calls Python when the graph runs. TensorFlow runs those of a ``tf.function``
in the order of their making, so that the ranks meet in the same call. Gradients of embeddings are no tensors that could
be summed: the rows of all ranks come after one another.

Tensors travel as one flat tensor for each type, because what is sent over a network goes faster in one piece.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch
import torch.distributed as dist

from weft.errors import DivergenceError, UsageError
from weft.reduce.all_reduce_queue import AllReduceQueue
from weft.reduce.choice import choose
from weft.reduce.compression import make
from weft.reduce.exchange import all_reduce_extreme
from weft.session.collectives import gather_texts
from weft.session.recording import record
from weft.tensorflow import private
from weft.tensorflow.session.session import Session
from weft.tensorflow.session.wire import from_torch, to_torch
from weft.tensorflow.trace import capture
from weft.transport.channel import ALIGNMENT


class Flat:
    """Tensors of TensorFlow, copied into one torch tensor for each type.

    ``scale``: what they are multiplied by on the way.

    Attributes:
        parts: The flat tensors, in the order in which their types come up.
    """

    def __init__(self, tensors: Sequence[Any], scale: float = 1.0) -> None:
        given = [to_torch(tensor) for tensor in tensors]
        self._places: list[tuple[torch.dtype, int, tuple[int, ...]]] = []
        sizes: dict[torch.dtype, int] = {}
        for tensor in given:
            begin = sizes.get(tensor.dtype, 0)
            self._places.append((tensor.dtype, begin, tuple(tensor.shape)))
            step = ALIGNMENT // tensor.itemsize
            sizes[tensor.dtype] = begin + -(-tensor.numel() // step) * step
        self._flats = {dtype: torch.empty(size, dtype=dtype) for dtype, size in sizes.items()}
        for tensor, (dtype, begin, _) in zip(given, self._places, strict=True):
            flat, end = self._flats[dtype], begin + tensor.numel()
            if scale == 1.0:
                flat[begin:end].copy_(tensor.reshape(-1))
            else:
                torch.mul(tensor.reshape(-1), scale, out=flat[begin:end])
            flat[end : end + -tensor.numel() % (ALIGNMENT // tensor.itemsize)].zero_()

    @property
    def parts(self) -> list[torch.Tensor]:
        return list(self._flats.values())

    def tensors(self) -> list[Any]:
        """The tensors again, as TensorFlow's, in the memory of the flat ones: nobody writes there from now on."""
        return [
            from_torch(self._flats[dtype][begin : begin + _numel(shape)].view(shape))
            for dtype, begin, shape in self._places
        ]


def _numel(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def is_by_rows(tensor: Any) -> bool:
    """True if a gradient is one by rows."""
    return isinstance(tensor, tf.IndexedSlices)


def gather_rows(tensors: Sequence[Any], group: Any) -> list[Any]:
    """Each tensor with the rows of all ranks along dim 0, in the order of ranks, which may have any number of them."""
    given = [to_torch(each) for each in tensors]
    counts = [torch.empty(len(given), dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([len(each) for each in given]), group=group)
    rows = torch.stack(counts).T.tolist()
    return [from_torch(_gathered(each, of_ranks, group)) for each, of_ranks in zip(given, rows, strict=True)]


def _gathered(tensor: torch.Tensor, rows: list[int], group: Any) -> torch.Tensor:
    """All ranks send as many rows as the longest one has: a collective moves tensors of one size."""
    padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in rows]
    if padded.numel():
        sent = [each.view(-1).view(torch.uint8) for each in parts]
        dist.all_gather(sent, padded.view(-1).view(torch.uint8), group=group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


AVERAGED = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
OPERATIONS = {"average": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN,
              "max": dist.ReduceOp.MAX}  # fmt: skip

Run = Callable[[Sequence[Any]], list[Any]]


@tf.autograph.experimental.do_not_convert
def average(tensors: Sequence[Any], session: Session, number: int = 0, axis: str = "rdp") -> list[Any]:
    """The mean of each tensor over the replicas, in its shape and type. Every replica calls it, in the same order.

    They travel as the settings ``all_reduce`` and ``compression`` say. A gradient by rows (``tf.IndexedSlices``) has
    the rows of all replicas, as one process has those of the whole batch; they travel as they are.

    ``number``: differs between calls with different tensors, for a compression that makes up for its errors in the next
    call. ``axis``: the ranks that average, along an axis of the mesh.

    Raises:
        UsageError: A tensor is not one of float16, bfloat16, float32 and float64.
        DivergenceError: The replicas' tensors differ in shape or type.
    """
    given = [each if is_by_rows(each) else tf.convert_to_tensor(each) for each in tensors]
    for place, tensor in enumerate(given):
        if tensor.dtype not in AVERAGED:
            raise UsageError(
                f"tensor {place} of those to average is of {tensor.dtype.name}: cast it to one of "
                f"{', '.join(each.name for each in AVERAGED)}, or add it up with all_reduce"
            )
    if len(session.peers(axis)) == 1:
        return given
    dense = iter(_means([each for each in given if not is_by_rows(each)], session, number, axis))
    by_rows = iter(_of_all([each for each in given if is_by_rows(each)], "average", session, axis))
    return [next(by_rows if is_by_rows(each) else dense) for each in given]


def _means(tensors: list[Any], session: Session, number: int, axis: str) -> list[Any]:
    if not tensors:
        return []

    def run(given: Sequence[Any]) -> list[Any]:
        queue = _queue(session, axis)
        check = Check(session, axis, [f"{each.dtype.name}{each.shape.as_list()}" for each in given])
        flat = Flat(given, queue.scale)
        check.finish()
        works = [queue.launch(number, part) for part in flat.parts]
        for work in works:
            work.wait()
        return flat.tensors()

    return _called(session, run, tensors, "the gradients")


def _of_all(gradients: list[Any], op: str, session: Session, axis: str) -> list[Any]:
    """Gradients by rows with the rows of all ranks: their sum, or, divided by the number of ranks, their average."""
    if not gradients:
        return []

    def run(given: Sequence[Any]) -> list[Any]:
        text = [
            f"rows of {values.dtype.name}{values.shape.as_list()[1:]} by {indices.dtype.name}"
            for values, indices in zip(given[::2], given[1::2], strict=True)
        ]
        Check(session, axis, text).finish()
        return gather_rows(given, session.group(axis))

    parts = [part for each in gradients for part in (each.values, each.indices)]
    shapes = [tf.TensorShape([None]).concatenate(each.shape[1:]) for each in parts]
    found = _called(session, run, parts, "the gradients", shapes)
    size = len(session.peers(axis))
    return [
        tf.IndexedSlices(values / size if op == "average" else values, indices, each.dense_shape)
        for each, values, indices in zip(gradients, found[::2], found[1::2], strict=True)
    ]


@tf.autograph.experimental.do_not_convert
def all_reduce(tensor: Any, op: str, session: Session, axis: str = "rdp") -> Any:
    """One tensor over the ranks of an axis, in its shape and type: ``op`` is "average", "sum", "min" or "max".

    The sum and the average of a gradient by rows have the rows of all ranks.

    Raises:
        UsageError: There is no such ``op``, or it is the average of whole numbers.
    """
    if op not in OPERATIONS:
        raise UsageError(f"all_reduce has the operations {', '.join(OPERATIONS)}, not {op!r}")
    by_rows = is_by_rows(tensor) and op in ("average", "sum")
    dense = tensor if by_rows else tf.convert_to_tensor(tensor)
    if op == "average" and dense.dtype not in AVERAGED:
        raise UsageError(
            f"the average of a tensor of {dense.dtype.name} is no {dense.dtype.name}: cast it first"
        )
    ranks = session.peers(axis)
    if len(ranks) == 1:
        return dense
    if by_rows:
        return _of_all([dense], op, session, axis)[0]

    def run(given: Sequence[Any]) -> list[Any]:
        flat = Flat(given, 1.0 / len(ranks) if op == "average" else 1.0)
        for part in flat.parts:
            reduce = all_reduce_extreme if op in ("min", "max") else dist.all_reduce
            reduce(part, OPERATIONS[op], session.group(axis))
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


class Check:
    """A check that the ranks of an axis average tensors described alike; it runs while these are made ready."""

    def __init__(self, session: Session, axis: str, described: Sequence[str]) -> None:
        self._text = ", ".join(described)
        self._session, self._axis = session, axis
        number = zlib.crc32(self._text.encode())
        self._ends = torch.tensor([number, -number])
        self._work = dist.all_reduce(self._ends, dist.ReduceOp.MAX, group=session.group(axis), async_op=True)

    def finish(self) -> None:
        """Wait for the answer.

        Raises:
            DivergenceError: They differ.
        """
        assert self._work is not None
        self._work.wait()
        most, least = self._ends.tolist()
        if most == -least:
            return
        found = gather_texts(self._text, self._session.port(self._axis))
        place, other = next((place, text) for place, text in enumerate(found) if text != self._text)
        raise DivergenceError(
            f"the replicas average different tensors: {self._text} here, {other} on replica {place}. Every replica "
            "averages the gradients of the same variables, in the same order"
        )


def _queue(session: Session, axis: str) -> AllReduceQueue:
    """The queue of all-reduces over an axis; its ranks make theirs at once. A repeated ``init`` may ask for another."""
    settings = session.settings
    key = (
        AllReduceQueue,
        session.peers(axis),
        settings.all_reduce,
        settings.compression,
        settings.deterministic,
    )
    if key not in session.kept:
        session.kept[key] = _make_lane(session, axis)
    found = session.kept[key]
    assert isinstance(found, AllReduceQueue)
    return found


def _make_lane(session: Session, axis: str) -> AllReduceQueue:
    settings = session.settings
    compression = make(settings.compression) if settings.compression else None
    # A group of its own, so that its sums never mix with those of a script.
    group = dist.new_group(session.peers(axis), session.timeout, "gloo", use_local_synchronization=True)
    algorithm = settings.all_reduce
    if settings.deterministic and algorithm == "auto":  # which would measure
        algorithm = "direct"
    return AllReduceQueue(
        choose(group, algorithm, compressed=compression is not None, timeout=session.timeout), compression
    )


def _called(session: Session, run: Run, tensors: list[Any], what: str, shapes: Any = None) -> list[Any]:
    """The results of ``run``, of its tensors' types and shapes, or of ``shapes``: now, or when the graph runs."""
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
    found = private.call_in_order(guarded, tensors, [tensor.dtype for tensor in tensors])
    for each, shape in zip(found, shapes or [tensor.shape for tensor in tensors], strict=True):
        each.set_shape(shape)
    return list(found)
