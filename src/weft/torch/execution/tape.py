"""The tape of one microbatch: what it really did on this rank, and how the backward pass walks it.

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

A step may go backward several times. Each pass walks all segments, and its messages have its number, so the argument
above holds for each. Without ``retain_graph`` a pass frees what it goes through: graphs, and what was received. What it
does not reach stays for those that follow. Gradients for chosen tensors (``torch.autograd.grad``) are a pass that frees
nothing and touches no ``.grad``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weft.errors import UsageError
from weft.runtime.microbatch import Microbatch
from weft.torch.backward.autograd import capture_gradients, run_autograd
from weft.torch.backward.weight_gradients import Task, run_by_layer, take_weights
from weft.torch.execution.replicated import EVERYWHERE, Replicated
from weft.torch.execution.value import Segment, Value
from weft.torch.pytorch.private import base_of
from weft.torch.session.pipeline import Pipeline
from weft.torch.tensors.deferred_logits import Deferred, settled
from weft.torch.tensors.shards import gathered, stays_sharded
from weft.transport.channel import GRADIENT, PASS_BIT, VALUE, VERSION_BIT, Key, Message


class Tape:
    """The segments of one microbatch on one rank, its sends and receives.

    ``splits``: the stages whose weight gradients come later (see ``backward.weight_gradients``).
    """

    def __init__(
        self, pipeline: Pipeline, microbatch: Microbatch, step: int, splits: frozenset[int] = frozenset()
    ) -> None:
        self.rank = pipeline.rank
        self.channel = pipeline.channel
        self.microbatch = microbatch
        self.step = step
        self._pipeline = pipeline
        self._splits = splits
        self.current = Segment(microbatch.stage)
        self.segments = [self.current]
        self.passes = 0
        """Backward passes so far."""
        self.replicated: Replicated | None = None
        """The replicated tensors that need a gradient, once there are any."""
        self.unseen: Callable[[], AbstractContextManager[None]] = nullcontext
        """Inside, glue does not look at what is computed."""
        self.entered: dict[int, weakref.ref[Tensor]] = {}
        """What each leaf of the segments stands for, by the leaf's id."""

    def need_replicated(self) -> Replicated:
        """The replicated tensors that need a gradient; from now on there are some."""
        if self.replicated is None:
            self.replicated = Replicated(self, self._pipeline.others(), self._pipeline.replicas > 1)
        return self.replicated

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

    def grad_key(self, value: Value, version: int) -> Key:
        """Of the message with the gradient of a value in the present backward pass."""
        return self.key(GRADIENT, value.number + (self.passes << PASS_BIT), version)

    def send(self, value: Value, tensor: Tensor, peer: int, name: str) -> None:
        """Send a value of this rank, once for each version; closes the segment if it needs a gradient (1)."""
        version = value.alias.version
        sent = value.sent.get(peer)
        if sent == version:
            return
        check_stale(value, name)
        value.sent[peer] = version
        tensor = self.whole(value, tensor)
        needs_grad = goes_back(tensor)
        key = self.key(VALUE, value.number, version)
        self.channel.send(peer, Message(key, tensor.detach(), flag=needs_grad))
        if needs_grad:
            self.remember(value, tensor)
            if sent != ~version:
                self.current.sends.append((value, peer, version))
                self._next_segment()

    def receive(self, value: Value, name: str) -> Tensor:
        """The data of another rank's value, as a tensor of the current segment."""
        if value.copy is None or value.copy_version != value.alias.version:
            again = value.copy_version == value.alias.version
            key = self.key(VALUE, value.number, value.alias.version)
            message = self.microbatch.receive(value.owner, key, name)
            value.copy, value.copy_version, value.needs_grad = (
                message.payload,
                value.alias.version,
                message.flag,
            )
            value.leaf_segment = None
            if value.needs_grad and not again:
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
        data = value.data(tensor)
        tensor = data if isinstance(data, Deferred) else self.whole(value, tensor)
        if value.segment is self.current or isinstance(tensor, nn.Parameter) or not goes_back(tensor):
            return tensor
        self.remember(value, tensor)
        return self.enter(value, tensor)

    def whole(self, value: Value, tensor: Tensor) -> Tensor:
        """The data of a value of this rank, for others: deferred logits are computed, and a shard that a unit has left,
        in a cache say, is all-gathered."""
        tensor = value.data(tensor)
        if isinstance(tensor, Deferred):
            with self.unseen():
                value.actual = tensor = settled(tensor)
        if stays_sharded(tensor):
            with self.unseen():
                value.actual = tensor = gathered(tensor)
        return tensor

    def remember(self, value: Value, tensor: Tensor) -> None:
        """Keep where the value's gradient enters autograd's graph, but not its data."""
        if value.edge is None:
            with torch.enable_grad():  # for a leaf it makes a view
                value.edge = get_gradient_edge(tensor)

    def walk_back(self, keep: bool = False) -> None:
        """A backward pass: walk the segments in reverse, see the module's diagram. ``keep``: nothing is freed."""
        tasks: list[Task] = []
        for segment in reversed(self.segments):
            if segment.stage != self.microbatch.stage:
                self._completed(tasks)
                tasks = []
                self.microbatch.enter(segment.stage)
            self._await(segment, keep)
            leaves = list(segment.living())  # those that only the graph holds go with it
            self._run(segment, tasks, keep)
            for leaf, value in leaves:  # (5)
                value.add_grad(leaf.grad)
                leaf.grad = None
            leaves.clear()
            self._answer(segment, keep)
        if not keep:
            self.entered.clear()
        self._completed(tasks)
        if self.replicated is not None:
            self.microbatch.let_go()
            edges, grads = self.replicated.gradients()
            self.microbatch.follow_whole()
            run_autograd(edges, grads, keep=keep)
        self.passes += 1
        self._next_segment()

    def gradients(self, wanted: Sequence[tuple[Value, Tensor]]) -> list[Tensor | None]:
        """The gradients of ``wanted``, values of this rank or replicated ones, in a pass that adds to no ``.grad``."""
        found: list[Tensor | None] = [None] * len(wanted)
        own = [number for number, (value, _) in enumerate(wanted) if value.owner == self.rank]
        for segment in reversed(self.segments):
            self._await(segment, True)
            here = [n for n in own if wanted[n][0].segment is segment or wanted[n][1].is_leaf]
            self._capture(segment.take_roots(True), list(segment.living()), wanted, here, found)
            self._answer(segment, True)
        if self.replicated is not None:
            others = [number for number, (value, _) in enumerate(wanted) if value.owner == EVERYWHERE]
            self._capture(self.replicated.gradients(), [], wanted, others, found)
        self.passes += 1
        return found

    def _capture(
        self, roots: tuple[list[GradientEdge], list[Tensor]], leaves: list[tuple[Tensor, Value]],
        wanted: Sequence[tuple[Value, Tensor]], numbers: Sequence[int], found: list[Tensor | None],
    ) -> None:  # fmt: skip
        """Autograd from ``roots``: gradients of leaves go to their values, those of wanted tensors to ``found``."""
        edges = [get_gradient_edge(leaf) for leaf, _ in leaves]
        edges += [get_gradient_edge(wanted[number][1]) for number in numbers]
        if not edges or not roots[0]:
            return
        with self._pipeline.backward():
            grads = capture_gradients(*roots, edges)
        for (_, value), grad in zip(leaves, grads[: len(leaves)], strict=True):
            value.add_grad(grad)
        for number, grad in zip(numbers, grads[len(leaves) :], strict=True):
            before = found[number]
            found[number] = grad if before is None else before if grad is None else before + grad

    def _await(self, segment: Segment, keep: bool) -> None:
        """Wait for the gradients of what was sent at the segment's end (3)."""
        for value, peer, version in reversed(segment.sends):
            grad = self.microbatch.receive(peer, self.grad_key(value, version), "its gradient").payload
            value.add_grad(grad)
            if not keep and grad is not None and value.sent[peer] == version:
                value.sent[peer] = ~version

    def _answer(self, segment: Segment, keep: bool) -> None:
        """Send the gradients of what the segment had received (6), after all that it held is free: the answer may be
        another tensor."""
        messages = [
            (value.owner, Message(self.grad_key(value, value.copy_version), value.grad))
            for value in reversed(segment.received)
        ]
        for value in segment.received:
            if not keep and value.grad is not None:
                value.copy = None
            value.grad = None
        if not keep:
            segment.fade()
        for owner, message in messages:
            self.channel.send(owner, message)

    def _completed(self, tasks: list[Task]) -> None:
        """The backward pass of a stage is done, but for ``tasks``."""
        gathering = self._pipeline.gathering
        if not tasks:
            for each in gathering:
                each.take_all_gradients()
            self.microbatch.completed([])
        else:
            self.microbatch.completed([functools.partial(run_by_layer, gathering, tasks)])

    def clear(self) -> None:
        """Forget what was recorded; for a microbatch without a backward pass."""
        self.entered.clear()
        self.replicated = None
        for segment in self.segments:
            segment.clear()

    def _run(self, segment: Segment, tasks: list[Task], keep: bool) -> None:
        """Run autograd from every tensor of the segment that got a gradient (4)."""
        if not segment.roots:
            return
        edges, grads = segment.take_roots(keep)
        inputs: tuple[GradientEdge, ...] = ()
        if keep:  # tasks would stay with the nodes, and these run again
            pass
        elif segment.stage in self._splits:
            inputs = take_weights(edges, tasks.append)
        elif self._pipeline.fuses:
            inputs = take_weights(edges, Task.at_once, at_once=True)
        if self._pipeline.gathering or self._pipeline.own:
            with self._pipeline.backward(later=bool(inputs) and segment.stage in self._splits):
                run_autograd(edges, grads, inputs, keep)
        else:
            run_autograd(edges, grads, inputs, keep)


def goes_back(tensor: Tensor) -> bool:
    """True if a gradient of the tensor goes anywhere. Views made without grad mode say they need one, and drop it."""
    if not tensor.requires_grad or base_of(tensor) is None:
        return tensor.requires_grad
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # and what it shows was written since
        return False


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
