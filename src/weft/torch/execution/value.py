"""Values: what stands on every rank for a tensor that has a place; and the segments that they were computed in.

A tensor has a place if one rank alone has its data: a parameter, what a unit has returned, and whatever was computed
from these. All other tensors are *replicated*: every rank has computed them for itself.

A replicated tensor gets a place when one rank alone writes into its memory, and so does all that shares the memory:

    every rank            out = zeros   part = out[:, 0]
    rank 1                part += h     out is rank 1's, too
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import GradientEdge

from weft.errors import UsageError
from weft.torch.pytorch.private import LEAF_NODE
from weft.torch.session.pipeline import Pipeline
from weft.torch.tensors.cut_weights import refuse_part
from weft.torch.tensors.deferred_logits import Deferred

FREED = (
    "backward() reaches what an earlier backward pass of this microbatch has gone through, and which was freed then: "
    "give the earlier one retain_graph=True (model.backward(loss, retain_graph=True)), or give both losses to one "
    "call: model.backward([loss, other])"
)


class Alias:
    """Values that share memory. ``version`` grows with every write, so that copies sent before count as old.

    ``views``: the tensors that may share the memory, if there are several. ``apart``: tensors that would share it in
    one process, and do not because they lie on other ranks: a call there got a copy, and returned a view of that.
    """

    __slots__ = ("apart", "version", "views")

    def __init__(self) -> None:
        self.version = 0
        self.views: list[weakref.ref[Tensor]] = []
        self.apart: list[weakref.ref[Tensor]] = []


class Batch:
    """The identity of a microbatch of one step: its ``index`` in the step, and whether it still ``runs``."""

    __slots__ = ("index", "runs")

    def __init__(self, index: int) -> None:
        self.index = index
        self.runs = True


class Value:
    """A tensor of the microbatch ``batch`` that has a place: ``owner`` (pipeline rank) computed it.

    ``number`` is the same on every rank. On the owner ``segment`` is where the tensor was computed, and the tensor
    itself is the data unless ``actual`` replaces it (written in place in a way the tensor object could not follow).
    Elsewhere the tensor is a placeholder without data. There ``actual`` is a placeholder of another shape if the shape
    was changed in place, and ``copy`` is the data that was received.

    ``sent``: by rank the version that the rank has; ``~version``: the rank had it, and let go of it after a backward
    pass. ``stale``: another rank has written into the memory, which this rank's data do not show.
    """

    __slots__ = (
        "owner", "number", "segment", "actual", "copy", "copy_version", "needs_grad", "sent", "alias", "edge", "grad",
        "leaf", "leaf_segment", "batch", "stale",
    )  # fmt: skip

    def __init__(
        self, owner: int, number: int, batch: Batch, segment: Segment | None, alias: Alias | None
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
        """``tensor``, which has this value, after writes in place; mostly ``tensor`` itself."""
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

    ``leaves``: what autograd's graph begins at, with the values that get the leaves' gradients. ``faded``: leaves that
    an earlier backward pass has seen; they live as long as a graph leads to them. ``received``: values of other ranks,
    which wait for their gradients. ``roots``: values whose gradient has come. ``sends``: value, rank and version of
    what was sent at the segment's end.
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


@dataclass
class TakenMemory:
    """Memory that every rank had filled, until ``owner`` alone wrote into it, in a ``segment``.

    ``apart``: the owner wrote into a copy, since what was there had a graph of every rank's, or one of an earlier
    segment. ``module``: whose code wrote.
    """

    storage: UntypedStorage
    first: int
    end: int
    owner: int
    alias: Alias
    segment: Segment | None
    apart: bool
    module: str


class PlacedTensors:
    """The placed tensors of a microbatch, each with its owner. All others are replicated.

    ``segments``: those of the microbatch's tape on this rank, which grow; the last one is the present one. All ranks
    make values in the order of the program, so a value has the same number everywhere.
    """

    def __init__(self, pipeline: Pipeline, segments: list[Segment], index: int) -> None:
        self.rank = pipeline.rank
        self.batch = Batch(index)
        self._pipeline = pipeline
        self._segments = segments
        self._numbers = 0
        self._adopted: dict[int, tuple[Tensor, Value]] = {}
        """By id the tensors that this microbatch has not computed, and their values."""
        self._taken: list[TakenMemory] = []

    def value_of(self, tensor: Tensor) -> Value | None:
        """The tensor's value in this microbatch; ``None`` for a replicated tensor.

        Parameters, and tensors that an earlier microbatch computed, get a value when they are first used.
        """
        value: Value | None = tensor._weft_value  # type: ignore[attr-defined]
        if value is not None and value.batch is self.batch:
            return value
        if value is not None and value.batch.runs:
            self._refuse_other(tensor, value)
        owner = tensor._weft_owner if value is None else value.owner  # type: ignore[attr-defined]
        if owner is None:
            return self._value_in_taken(tensor) if self._taken else None
        return self._adopt(tensor, owner, value)

    def _refuse_other(self, tensor: Tensor, value: Value) -> NoReturn:
        raise UsageError(
            f"microbatch {self.batch.index} uses a tensor of shape {list(tensor.shape)} that microbatch "
            f"{value.batch.index} has computed, which still runs: something that both reach (a global, a "
            "closure, an object of the script's own) holds it. Hand it on as an argument or a result, or keep it in an "
            "attribute of a module"
        )

    def _adopt(self, tensor: Tensor, owner: int, earlier: Value | None) -> Value:
        """The value of a parameter, or of a tensor that had the value ``earlier`` in another microbatch."""
        if id(tensor) in self._pipeline.buffers:
            self._pipeline.buffers[id(tensor)].use(self.batch.index)
        adopted = self._adopted.get(id(tensor))
        if adopted is not None:
            return adopted[1]
        if tensor._weft_cut is not None or tensor._weft_away is not None:  # type: ignore[attr-defined]
            refuse_part(tensor)
        value = self.new_value(owner)
        value.segment = self._segments[0] if owner == self.rank else None
        if earlier is not None:
            value.actual = earlier.actual
        self._adopted[id(tensor)] = tensor, value
        return value

    def new_value(self, owner: int, alias: Alias | None = None) -> Value:
        """The value of a tensor that ``owner`` computes now."""
        self._numbers += 1
        segment = self._segments[-1] if owner == self.rank else None
        return Value(owner, self._numbers, self.batch, segment, alias)

    def place(self, tensor: Tensor, owner: int, alias: Alias | None = None) -> None:
        """Give a tensor that ``owner`` has computed its value."""
        self._numbers += 1  # as new_value, without another call: every result of every call comes here
        segment = self._segments[-1] if owner == self.rank else None
        tensor._weft_value = Value(owner, self._numbers, self.batch, segment, alias)  # type: ignore[attr-defined]

    def replace_value(self, tensor: Tensor, value: Value) -> None:
        """Let ``value`` be the tensor's value in this microbatch from now on; see :meth:`value_of`."""
        if id(tensor) in self._adopted:
            self._adopted[id(tensor)] = (tensor, value)
        else:
            tensor._weft_value = value  # type: ignore[attr-defined]

    def newest_owner(self, values: Sequence[tuple[Tensor, Value]]) -> int:
        """The rank that runs glue on these: where a parameter lives, else where the newest of them was made."""
        for tensor, value in reversed(values):
            if tensor._weft_owner is not None:  # type: ignore[attr-defined]
                return value.owner
        return max(values, key=lambda pair: pair[1].number)[1].owner

    def take_memory(
        self, tensor: Tensor, value: Value, replicated: bool, actual: Tensor | None, module: str
    ) -> None:
        """Note that the owner of ``value``, the new value of ``tensor``, has just written into its memory.

        ``replicated``: the tensor was, until then. ``actual``: the tensor on its owner. ``module``: whose code wrote.
        """
        for taken in self._taken:
            if taken.alias is value.alias:
                taken.segment = value.segment
        span = span_of(tensor) if replicated else None
        if span is None:
            return
        wrote_here = self.rank == value.owner and torch.is_grad_enabled()
        apart = actual is not tensor if wrote_here else tensor.requires_grad
        storage = tensor.untyped_storage()
        self._taken.append(
            TakenMemory(storage, *span, value.owner, value.alias, value.segment, apart, module)
        )

    def note_copy(self, alias: Alias) -> None:
        """Note that what is written next into the memory of ``alias`` is written into a copy."""
        for taken in self._taken:
            taken.apart = taken.apart or taken.alias is alias

    def _value_in_taken(self, tensor: Tensor) -> Value | None:
        """The value of a tensor that lies in memory which one rank has taken; None for any other.

        Raises:
            UsageError: A copy was written, and this tensor should show that.
        """
        span = span_of(tensor)
        taken = None if span is None else self._find_taken(tensor, *span)
        if taken is None:
            return None
        if taken.apart:
            raise UsageError(
                f"a tensor of shape {list(tensor.shape)} that every rank has shares memory with one that "
                f"{taken.module or 'the step'} has written into on one rank alone, and does not show that: use the "
                "tensor that was written, or make the view anew from it"
            )
        value = self.new_value(taken.owner, taken.alias)
        value.segment = taken.segment
        taken.alias.views.append(weakref.ref(tensor))
        tensor._weft_value = value  # type: ignore[attr-defined]
        return value

    def _find_taken(self, tensor: Tensor, first: int, end: int) -> TakenMemory | None:
        storage = tensor.untyped_storage().data_ptr()
        for taken in self._taken:
            if taken.storage.data_ptr() == storage and first < taken.end and taken.first < end:
                return taken
        return None

    def close(self) -> None:
        """The microbatch has ended: let go of everything."""
        self._adopted.clear()
        self._taken.clear()
        self.batch.runs = False


def span_of(tensor: Tensor) -> tuple[int, int] | None:
    """The addresses between which a tensor's data lie, the second one exclusive; None if it has no data."""
    if memory_of(tensor) is None or not tensor.numel():
        return None
    ends = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (ends + 1) * tensor.element_size()


def memory_of(tensor: Tensor) -> tuple[torch.device, int] | None:
    """Device and address of a tensor's memory; None if the tensor has none of its own."""
    if isinstance(tensor, Deferred):
        tensor = tensor.with_memory()
    if (
        tensor.layout != torch.strided
        or tensor.device.type == "meta"
        or tensor._weft_spread  # type: ignore[attr-defined]
        or not tensor.untyped_storage().nbytes()
    ):
        return None
    return tensor.device, tensor.untyped_storage().data_ptr()
