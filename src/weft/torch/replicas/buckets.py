"""Buckets: the gradients that travel together, how they get in, are averaged, and get out again.

    take    gradient -> its place in the flat tensor, divided by the number of ranks
    launch  the flat tensor is summed over the ranks; gradients that this rank lacks count as zero
    give    its place in the flat tensor -> gradient

Nobody can hold the tensor of a gradient that began in this step. Such a gradient becomes its place in the flat tensor,
and the bucket lets the flat tensor go. Any other gradient keeps its tensor and gets a copy.

With ``as_view`` a gradient *is* its place in the flat tensor, from its arrival on and in every step: there is no second
copy in memory, and nothing to give. A sparse gradient has a bucket of its own and stays sparse.

Where the collective can sum tensors where they are (shared memory can), there is no flat tensor: gradients are averaged
in place, see :class:`InPlace`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.reduce.collective import SumsPieces, Work
from weft.torch.backward.autograd import unwatched
from weft.torch.pytorch.private import users_of_memory


class AllReduceQueue(Protocol):
    """The queue of the buckets; see :class:`weft.reduce.all_reduce_queue.AllReduceQueue`."""

    @property
    def scale(self) -> float: ...

    def launch(self, number: int, flat: Tensor) -> Work: ...

    def in_place(self, size_bytes: int) -> SumsPieces | None: ...

    def forget(self) -> None: ...


class Bucket(ABC):
    """Gradients that travel together.

    ``members``: their parameters' numbers. ``pending``: how many gradients the bucket still waits for.
    """

    def __init__(self, number: int, members: tuple[int, ...], parameters: list[nn.Parameter]) -> None:
        self.number = number
        self.members = members
        self.parameters = parameters
        self.pending = 0
        self._work: Work | None = None

    def may_leave(self) -> bool:
        """True if a full bucket can leave before the step ends."""
        return True

    def missing_gradients(self) -> Sequence[int]:
        """The numbers of the parameters that have no gradient between launch and give, though they had one."""
        return ()

    @abstractmethod
    def launch(self, queue: AllReduceQueue, fresh: list[bool]) -> None:
        """Start to average, with the gradients that are there now.

        ``fresh``: for each parameter's number, whether it had no gradient when the step began.
        """

    def wait(self) -> None:
        """Wait for the averages."""
        assert self._work is not None
        self._work.wait()
        self._work = None

    @abstractmethod
    def give(self, present: list[int], factor: float) -> None:
        """Give parameters their averages, times ``factor``.

        ``present``: for each parameter's number, how many ranks had a gradient. With 0 the parameter gets none.
        """


class Fused(Bucket):
    """A flat tensor with a place for each gradient."""

    def __init__(
        self, number: int, members: tuple[int, ...], parameters: list[nn.Parameter], as_view: bool
    ) -> None:
        super().__init__(number, members, parameters)
        self.as_view = as_view
        self._taken = [False] * len(parameters)
        self._fresh: list[bool] = []
        self._made: tuple[Tensor, list[Tensor]] | None = None

    @property
    def flat(self) -> Tensor:
        """The flat tensor with all gradients, [elements]; a new one after the last was given away."""
        return self._make()[0]

    @property
    def views(self) -> list[Tensor]:
        """The places in ``flat``, one for each parameter."""
        return self._make()[1]

    def _make(self) -> tuple[Tensor, list[Tensor]]:
        if self._made is None:
            sizes = [parameter.numel() for parameter in self.parameters]
            first = self.parameters[0]
            flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
            self._made = flat, list(map(shaped_like, flat.split(sizes), self.parameters))
        return self._made

    @torch.no_grad()
    def take(self, place: int, scale: float) -> None:
        """Copy the gradient at ``place``, which has arrived, into the flat tensor."""
        self._taken[place] = True
        parameter, view = self.parameters[place], self.views[place]
        grad = parameter.grad
        if grad is None:
            view.zero_()
            return
        if self.as_view:
            if grad.data_ptr() != view.data_ptr():
                view.copy_(grad)
                parameter.grad = view
            return
        if grad.is_sparse:
            grad = grad.to_dense()
        torch.mul(grad, scale, out=view)

    @torch.no_grad()
    def launch(self, queue: AllReduceQueue, fresh: list[bool]) -> None:
        self._fresh = fresh
        for place, taken in enumerate(self._taken):
            if not taken:
                self.take(place, queue.scale)
        self._taken = [False] * len(self._taken)
        if self.as_view and queue.scale != 1.0:
            self.flat.mul_(queue.scale)
        self._work = queue.launch(self.number, self.flat)

    @torch.no_grad()
    def give(self, present: list[int], factor: float) -> None:
        if factor != 1.0:
            self.flat.mul_(factor)
        handed_out = False
        for member, parameter, view in zip(self.members, self.parameters, self.views, strict=True):
            if not present[member]:
                continue
            grad = parameter.grad
            if self.as_view or grad is None or grad.is_sparse or (self._fresh[member] and alike(grad, view)):
                parameter.grad = view
                handed_out = True
            else:
                grad.copy_(view)
        if handed_out and not self.as_view:
            self._made = None


class InPlace(Bucket):
    """A bucket whose gradients are averaged where they are, without a flat tensor; see :class:`Fused`.

    From the launch to the end of the step its parameters have no gradient. A gradient that arrives late begins anew, is
    added to the average and averaged with it; averaging leaves an average as it is.

    A tensor stands in for a gradient that is not there, or that cannot be worked on: one of another layout, a sparse
    one, or one in memory that another tensor shares, which the backward pass may still read.
    """

    def __init__(
        self, number: int, members: tuple[int, ...], parameters: list[nn.Parameter], sums: SumsPieces
    ) -> None:
        super().__init__(number, members, parameters)
        self._sums = sums
        self._parts: list[Tensor] = []
        self._grads: list[Tensor | None] = []

    def may_leave(self) -> bool:
        """True if no hook of the script may look at a gradient that has arrived."""
        return all(map(unwatched, self.parameters))

    def missing_gradients(self) -> Sequence[int]:
        return [member for member, grad in zip(self.members, self._grads, strict=False) if grad is not None]

    @torch.no_grad()
    def launch(self, queue: AllReduceQueue, fresh: list[bool]) -> None:
        grads = [parameter.grad for parameter in self.parameters]
        for parameter, grad in zip(self.parameters, grads, strict=True):
            if grad is not None:
                parameter.grad = None
        if not self._parts:
            self._parts = list(map(part_of, self.parameters, grads))
            self._grads = [
                part if grad is not None and fresh[member] else grad
                for member, part, grad in zip(self.members, self._parts, grads, strict=True)
            ]
        else:
            for place, grad in enumerate(grads):
                if grad is not None:
                    part = self._parts[place].add_(grad)
                    if self._grads[place] is None:
                        self._grads[place] = part
        self._work = self._sums.sum_pieces([flatten(part) for part in self._parts], queue.scale)

    @torch.no_grad()
    def give(self, present: list[int], factor: float) -> None:
        for member, parameter, part, grad in zip(
            self.members, self.parameters, self._parts, self._grads, strict=True
        ):
            if not present[member]:
                continue
            if factor != 1.0:
                part.mul_(factor)
            if grad is None or grad is part or grad.is_sparse:
                parameter.grad = part
            else:
                parameter.grad = grad.copy_(part)
        self._parts, self._grads = [], []


class Sparse(Bucket):
    """One sparse gradient, summed by the backend itself."""

    def __init__(self, number: int, members: tuple[int, ...], parameter: nn.Parameter, group: Any) -> None:
        super().__init__(number, members, [parameter])
        self._group = group
        self._scale = 1.0 / dist.get_world_size(group)
        self._sum: Tensor | None = None

    @torch.no_grad()
    def launch(self, queue: AllReduceQueue, fresh: list[bool]) -> None:
        (parameter,) = self.parameters
        grad = parameter.grad
        if grad is None:
            grad = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
                parameter.new_empty((0, *parameter.shape[1:])),
                parameter.shape,
                check_invariants=False,
            )
        elif not grad.is_sparse:
            grad = grad.to_sparse(1)
        self._sum = (grad * self._scale).coalesce()
        self._work = dist.all_reduce(self._sum, group=self._group, async_op=True)

    @torch.no_grad()
    def give(self, present: list[int], factor: float) -> None:
        assert self._sum is not None
        if present[self.members[0]]:
            self.parameters[0].grad = self._sum * factor if factor != 1.0 else self._sum
        self._sum = None


def shaped_like(part: Tensor, parameter: Tensor) -> Tensor:
    """``part`` (1-D) in the shape of ``parameter``, and in its memory format where that leaves no gaps."""
    if has_channels_last(parameter):
        return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
    return part.view(parameter.shape)


def has_channels_last(parameter: Tensor) -> bool:
    """True if the parameter is dense in another order than that of its dimensions."""
    return not parameter.is_contiguous() and (
        (parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last))
        or (parameter.dim() == 5 and parameter.is_contiguous(memory_format=torch.channels_last_3d))
    )


def part_of(parameter: nn.Parameter, grad: Tensor | None) -> Tensor:
    """The gradient itself if a sum may work on it, else a tensor with its values, 0 where there is none."""
    if grad is None:
        return empty_like(parameter).zero_()
    if fits(grad, parameter) and is_alone(grad):
        return grad
    return empty_like(parameter).copy_(grad.to_dense() if grad.is_sparse else grad)


def empty_like(parameter: Tensor) -> Tensor:
    """A tensor for a gradient, laid out as :func:`shaped_like` has it."""
    flat = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    return shaped_like(flat, parameter)


def fits(grad: Tensor, parameter: Tensor) -> bool:
    """True if the gradient's values stand in memory as those of :func:`empty_like` do, and may be overwritten."""
    if grad.dtype != parameter.dtype or grad.requires_grad or type(grad) is not Tensor:
        return False
    if has_channels_last(parameter):
        return grad.stride() == parameter.stride()
    return grad.is_contiguous()


_ALONE = users_of_memory(torch.empty(1))


def is_alone(grad: Tensor) -> bool:
    """True if no other tensor shares the gradient's memory. Some gradients are views of what autograd still reads."""
    return _ALONE is not None and users_of_memory(grad) == _ALONE


def flatten(part: Tensor) -> Tensor:
    """The values of a dense tensor in the order of memory, [elements]."""
    return part.as_strided((part.numel(),), (1,), part.storage_offset())


def alike(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of one shape have the same layout and dtype, so that either can stand for the other."""
    return one.stride() == other.stride() and one.dtype == other.dtype
