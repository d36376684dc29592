"""Values with places: what stands for a tensor of a microbatch on every rank, and the segments that make the tape."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from weft.errors import UsageError
from weft.torch.pytorch.private import LEAF_NODE

FREED = (
    "backward() reaches what an earlier backward pass of this microbatch has gone through, and which was freed then: "
    "give the earlier one retain_graph=True (model.backward(loss, retain_graph=True)), or give both losses to one "
    "call: model.backward([loss, other])"
)


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

    ``sent``: by rank the version that it has; ``~version``: had, and let go of after a backward pass.
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
    """A stretch of the forward pass between two sends: one autograd graph.

    ``faded``: leaves that an earlier backward pass has seen. They live as long as a graph leads to them.
    """

    __slots__ = ("faded", "leaves", "received", "roots", "sends", "stage")

    def __init__(self, stage: int = 0) -> None:
        self.stage = stage
        self.leaves: list[tuple[Tensor, Value]] = []
        self.faded: list[tuple[weakref.ref[Tensor], Value]] = []
        self.received: list[Value] = []
        self.roots: list[Value] = []
        self.sends: list[tuple[Value, int, int]] = []

    def living(self) -> Iterator[tuple[Tensor, Value]]:
        """The leaves that a backward pass may reach."""
        yield from self.leaves
        for reference, value in self.faded:
            leaf = reference()
            if leaf is not None:
                yield leaf, value

    def take_roots(self, keep: bool) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the gradients that have come enter the graph, and the gradients; ``keep``: the graph stays."""
        edges, grads = [], []
        for value in self.roots:
            if value.edge is None:
                raise UsageError(FREED)
            edges.append(value.edge)
            grads.append(value.grad)
            value.grad = None
            if not keep and type(value.edge.node) is not LEAF_NODE:
                value.edge = None
        self.roots.clear()
        return edges, grads  # type: ignore[return-value]

    def fade(self) -> None:
        """A backward pass has freed what it went through."""
        for leaf, value in self.leaves:
            self.faded.append((weakref.ref(leaf), value))
            if value.leaf is leaf:
                value.leaf = value.leaf_segment = None
        self.leaves.clear()

    def clear(self) -> None:
        for value in self.roots:
            value.edge = value.grad = None
        for items in (self.leaves, self.faded, self.received, self.roots, self.sends):
            items.clear()
