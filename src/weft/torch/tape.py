"""What one microbatch really did on this rank, and how the backward pass walks it.

The forward pass is cut into *segments* at every send of a tensor that needs a gradient:

    segment 0   units and glue, one autograd graph          leaves: received tensors
       | send a -> q                                        (1) closes the segment
    segment 1   what ran after it                           leaves: a (made anew), received tensors
       | send b -> r
    segment 2   ... loss

Inside a segment PyTorch's autograd does all the work, in one call. A tensor of an earlier segment
enters a later one as a detached leaf (2). The backward pass takes the segments in reverse: it waits for the
gradients of what was sent at the segment's end (3), runs autograd from every tensor of the segment that got a
gradient (4), passes the leaves' gradients to the values they stand for (5), and sends the gradients of what
the segment had received (6). No wait inside a segment depends on a gradient that the segment itself has yet to
give: everything it waits for comes later in program order. So two ranks never wait for each other, however
often a microbatch visits them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weft.errors import UsageError
from weft.runtime.microbatch import Microbatch
from weft.torch.deferred import Task, run_all, take_weights
from weft.torch.private import run_engine
from weft.transport.channel import GRADIENT, VALUE, VERSION_BIT, Channel, Key, Message


class Alias:
    """Values that share memory. ``version`` grows with every write, so that copies sent before count as old.

    ``views``: the tensors that may share it, if there are several. ``apart``: those of other ranks that would share it
    in one process: what a call there got and what it returned of that, a copy.
    """

    __slots__ = ("apart", "version", "views")

    def __init__(self) -> None:
        self.version = 0
        self.views: list[weakref.ref[Tensor]] = []
        self.apart: list[weakref.ref[Tensor]] = []


class Value:
    """A tensor of this microbatch that has a place: ``owner`` (pipeline rank) computed it.

    ``number`` is the same on every rank. On the owner ``segment`` is where it was computed, and the tensor itself
    is the data unless ``actual`` replaces it (written in place in a way the tensor object could not follow).
    Elsewhere the tensor is a stand-in without data, ``actual`` one of another shape if that was changed in place, and
    ``copy`` what was received.
    """

    __slots__ = (
        "owner", "number", "segment", "actual", "copy", "copy_version", "needs_grad", "sent", "alias", "edge", "grad",
        "leaf", "leaf_segment", "batch", "stale",
    )  # fmt: skip

    def __init__(
        self, owner: int, number: int, batch: Any, segment: Segment | None, alias: Alias | None
    ) -> None:
        self.owner = owner
        self.number = number
        self.batch = batch
        self.segment = segment
        self.alias = alias or Alias()
        self.stale = False
        self.actual: Tensor | None = None
        self.copy: Tensor | None = None
        self.copy_version = -1
        self.needs_grad = False
        self.sent: dict[int, int] = {}
        self.edge: GradientEdge | None = None
        self.grad: Tensor | None = None
        self.leaf: Tensor | None = None
        self.leaf_segment: Segment | None = None

    def data(self, tensor: Tensor) -> Tensor:
        """What ``tensor``, whose value this is, has become by writing in place; itself mostly."""
        return tensor if self.actual is None else self.actual

    def add_grad(self, grad: Tensor | None) -> None:
        """Add to the gradient that this rank knows of the value."""
        if grad is None:
            return
        if self.grad is None:
            self.grad = grad
            if self.segment is not None:
                self.segment.roots.append(self)
        else:
            self.grad = self.grad + grad


class Segment:
    """A stretch of the forward pass between two sends: one autograd graph."""

    __slots__ = ("leaves", "received", "roots", "sends", "stage")

    def __init__(self, stage: int = 0) -> None:
        self.stage = stage
        self.leaves: list[tuple[Tensor, Value]] = []
        self.received: list[Value] = []
        self.roots: list[Value] = []
        self.sends: list[tuple[Value, int, int]] = []

    def clear(self) -> None:
        for value in self.roots:
            value.edge = value.grad = None
        for items in (self.leaves, self.received, self.roots, self.sends):
            items.clear()


class Tape:
    """The segments of one microbatch on one rank, its sends and receives."""

    def __init__(
        self,
        rank: int,
        step: int,
        microbatch: Microbatch,
        channel: Channel,
        splits: frozenset[int] = frozenset(),
        fuses: bool = False,
    ) -> None:
        self.rank = rank
        self.step = step
        self.microbatch = microbatch
        self.channel = channel
        self.splits = splits
        self.fuses = fuses
        self.current = Segment(microbatch.stage)
        self.segments = [self.current]
        self.entered: dict[int, weakref.ref[Tensor]] = {}
        """What each leaf of the segments stands for, by the leaf's id."""

    def enter_stage(self, stage: int) -> None:
        """A later stage of this rank begins: it has segments of its own."""
        if stage > self.microbatch.stage:
            self.microbatch.enter(stage)
            self._next_segment()

    def _next_segment(self) -> None:
        self.current = Segment(self.microbatch.stage)
        self.segments.append(self.current)

    def key(self, kind: int, number: int, version: int = 0) -> Key:
        """Of a message on the value ``number``, as it is after so many writes."""
        return Key(kind, self.step, self.microbatch.index, number + (version << VERSION_BIT))

    def send(self, value: Value, tensor: Tensor, peer: int, name: str) -> None:
        """Send a value of this rank, once for each version; closes the segment if it needs a gradient (1)."""
        version = value.alias.version
        if value.sent.get(peer) == version:
            return
        check_stale(value, name)
        value.sent[peer] = version
        tensor = value.data(tensor)
        needs_grad = tensor.requires_grad
        key = self.key(VALUE, value.number, version)
        self.channel.send(peer, Message(key, tensor.detach(), flag=needs_grad))
        if needs_grad:
            self.remember(value, tensor)
            self.current.sends.append((value, peer, version))
            self._next_segment()

    def receive(self, value: Value, name: str) -> Tensor:
        """The data of another rank's value, as a tensor of the current segment."""
        if value.copy is None or value.copy_version != value.alias.version:
            key = self.key(VALUE, value.number, value.alias.version)
            message = self.microbatch.receive(value.owner, key, name)
            value.copy, value.copy_version, value.needs_grad = (
                message.payload,
                value.alias.version,
                message.flag,
            )
            value.leaf_segment = None
            if value.needs_grad:
                self.current.received.append(value)
        assert value.copy is not None
        return self.enter(value, value.copy) if value.needs_grad else value.copy

    def enter(self, value: Value, data: Tensor) -> Tensor:
        """``data`` as a detached leaf of the current segment (2); the data itself without grad mode."""
        if not torch.is_grad_enabled():
            return data.detach()
        if value.leaf is None or value.leaf_segment is not self.current:
            return self._leaf(value, data, data.detach())
        return value.leaf

    def enter_anew(self, value: Value, data: Tensor, written: Tensor) -> Tensor:
        """``written``, without a graph, as what ``data`` is in the current segment."""
        self.remember(value, data)
        return self._leaf(value, data, written)

    def _leaf(self, value: Value, data: Tensor, leaf: Tensor) -> Tensor:
        value.leaf = leaf.requires_grad_()
        self.entered[id(leaf)] = weakref.ref(data)
        value.leaf_segment = self.current
        self.current.leaves.append((leaf, value))
        return leaf

    def local(self, value: Value, tensor: Tensor) -> Tensor:
        """A value of this rank as a tensor that the current segment may use."""
        tensor = value.data(tensor)
        if value.segment is self.current or not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return tensor
        self.remember(value, tensor)
        return self.enter(value, tensor)

    def remember(self, value: Value, tensor: Tensor) -> None:
        """Keep where the value's gradient enters autograd's graph, but not its data."""
        if value.edge is None:
            value.edge = get_gradient_edge(tensor)

    def backward(self) -> None:
        """Walk the tape in reverse; see the module's diagram. The tape is empty afterwards."""
        segments = self.segments
        self.segments = []
        self.entered.clear()
        self._next_segment()
        tasks: list[Task] = []
        while segments:
            segment = segments.pop()
            if segment.stage != self.microbatch.stage:
                self._completed(tasks)
                tasks = []
                self.microbatch.enter(segment.stage)
            for value, peer, version in reversed(segment.sends):  # (3)
                key = self.key(GRADIENT, value.number, version)
                value.add_grad(self.microbatch.receive(peer, key, "its gradient").payload)
            self._run(segment, tasks)
            messages = [  # (6), after all that the segment held is free: the answer may be another tensor
                (value.owner, Message(self.key(GRADIENT, value.number, value.copy_version), value.grad))
                for value in reversed(segment.received)
            ]
            for value in segment.received:
                value.grad = value.copy = value.leaf = None
            segment.clear()
            for owner, message in messages:
                self.channel.send(owner, message)
        self._completed(tasks)

    def _completed(self, tasks: list[Task]) -> None:
        self.microbatch.completed([functools.partial(run_all, tasks)] if tasks else [])

    def clear(self) -> None:
        """Forget what was recorded; for a microbatch without a backward pass."""
        self.entered.clear()
        for segment in self.segments:
            segment.clear()

    def _run(self, segment: Segment, tasks: list[Task]) -> None:
        roots = segment.roots
        if roots:
            edges = [value.edge for value in roots if value.edge is not None]
            grads = [value.grad for value in roots if value.grad is not None]
            for value in roots:
                value.grad = value.edge = None
            inputs: tuple[GradientEdge, ...] = ()
            if segment.stage in self.splits:
                inputs = take_weights(edges, tasks.append)
            elif self.fuses:
                inputs = take_weights(edges, Task.at_once, at_once=True)
            run_autograd(edges, grads, inputs)  # (4)
        for leaf, value in segment.leaves:  # (5)
            value.add_grad(leaf.grad)
            leaf.grad = None
            if value.leaf is leaf:
                value.leaf = value.leaf_segment = None


def check_stale(value: Value, name: str) -> None:
    """Refuse a value whose memory another rank has written since.

    Raises:
        UsageError: Only that rank has what was written.
    """
    if value.stale:
        raise UsageError(
            f"{name or 'the step'} uses a tensor that shares memory with one which another rank has "
            "written into, and does not see that here: let the module return a new tensor, or keep both modules in one "
            "piece: weft.set_partition(module, index)"
        )


_has_gpu = functools.cache(torch.cuda.is_available)


def run_autograd(
    roots: Sequence[Any], grads: Sequence[Tensor], inputs: tuple[GradientEdge, ...] = ()
) -> None:
    """The backward pass, on this thread, which knows its microbatch.

    For a GPU autograd would take a thread of its own, the same for all microbatches.

    ``roots``: tensors or gradient edges; ``grads``: their gradients, of their shapes; ``inputs``: what it has to reach,
    everything if empty.
    """
    with torch.autograd.set_multithreading_enabled(False) if _has_gpu() else nullcontext():
        run_engine(roots, grads, inputs)


def graph_nodes(tensors: list[Tensor]) -> list[Any]:
    """Every node of the graph that ``tensors`` were computed by."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    found: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting.extend(following for following, _ in node.next_functions if following is not None)
    return list(found)


def root_gradient(tensor: Tensor, grad: Tensor | None, scale: float) -> Tensor:
    """The gradient that the backward pass starts with at ``tensor``: ``scale`` times ``grad`` (1 for a scalar)."""
    if not tensor.requires_grad:
        raise UsageError("backward() got a tensor that needs no gradient: nothing it was computed from does")
    if grad is None:
        if tensor.numel() != 1:
            raise UsageError(
                f"backward() got a tensor of shape {list(tensor.shape)}; give a scalar (reduce it with .mean() or "
                ".sum()) or its gradient as grad_tensors"
            )
        return torch.full_like(tensor, scale)
    if grad.shape != tensor.shape:
        raise UsageError(
            f"backward() got a gradient of shape {list(grad.shape)} for a tensor of shape {list(tensor.shape)}"
        )
    return grad * scale if scale != 1.0 else grad
