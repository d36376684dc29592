"""The ranks that share experts, and the rows that they send each other, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.errors import UsageError
from weft.torch.replicas.sharding.collectives import ShardingGroup
from weft.torch.tensor_parallel.shard_group import Quiet

HOST = torch.device("cpu")


class ExpertGroup(ShardingGroup):
    """The replicas that share experts; their number is the degree. A copied model has the same ones.

    Attributes:
        device: Where tensors are that they exchange; others are copied there.
        record: The context in which they exchange rows: a recording has a span of it.
        agree: Called with what this rank is about to exchange; an error where another one exchanges something else.
    """

    def __init__(self, group: Any, rank: int, size: int, device: torch.device = HOST) -> None:
        super().__init__(group, rank, size)
        self.device = device
        self.record: Callable[[], AbstractContextManager[None]] = nullcontext
        self.agree: Callable[[str], None] = _agreed

    def gather(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """The tensors of all ranks, in their order; ``sizes``: how large each is along ``dim``."""
        shape = [*tensor.shape]
        shape[dim] = max(sizes) - shape[dim]
        parts = super().gather(torch.cat([tensor, tensor.new_zeros(shape)], dim), dim, sizes)
        return [part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)]

    def all_gather_counts(self, counts: Sequence[int]) -> list[list[int]]:
        """For each rank its counts; all have as many."""
        parts = super().gather(torch.tensor(counts, dtype=torch.int64, device=self.device), 0, [])
        return [part.tolist() for part in parts]

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """The rows that all ranks send to this one, those of the first rank first.

        ``rows``: what this one sends, that for the first rank first. ``sent``, ``received``: how many by rank.
        """
        given = rows.to(self.device)
        found = given.new_empty((sum(received), *given.shape[1:]))
        with self.record():
            dist.all_to_all_single(found, given.contiguous(), [*received], [*sent], group=self.group)
        return found.to(rows.device)

    def __reduce__(self) -> Any:
        raise UsageError(
            "a model whose experts are shared by replicas cannot be pickled: save its state_dict(), or a checkpoint of "
            "the job"
        )


def _agreed(what: str) -> None:
    """All do the same."""


class Routes(NamedTuple):
    """The rows that a rank sends.

    Attributes:
        rows: Their indices, those for the first rank first; a row may go to several ranks.
        sent: How many go to each rank.
        received: How many come from each.
        total: How many rows this rank has.
    """

    rows: Tensor
    sent: list[int]
    received: list[int]
    total: int


def exchanged(tensors: Sequence[Tensor], routes: Routes, group: ExpertGroup) -> list[Tensor]:
    """The rows of several tensors that all ranks have sent to this one, in one message."""
    sent = torch.cat([_bytes(each.index_select(0, routes.rows)) for each in tensors], 1)
    return _tensors(group.all_to_all(sent, routes.sent, routes.received), tensors)


def returned(tensors: Sequence[Tensor], routes: Routes, group: ExpertGroup) -> list[Tensor]:
    """For each row of this rank the sum of what the ranks to which it went have sent back."""
    sent = torch.cat([_bytes(each) for each in tensors], 1)
    found = _tensors(group.all_to_all(sent, routes.received, routes.sent), tensors)
    return [sum_by_row(each, routes) for each in found]


def sum_by_row(found: Tensor, routes: Routes) -> Tensor:
    """For each row the sum of what was made of it; in single precision on the way."""
    exact = found.float() if found.dtype in (torch.bfloat16, torch.float16) else found
    sums = exact.new_zeros((routes.total, *found.shape[1:]))
    return sums.index_add(0, routes.rows, exact).to(found.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """Rows as bytes."""
    flat = tensor.contiguous().view(len(tensor), math.prod(tensor.shape[1:]))
    return flat.view(torch.uint8)


def _tensors(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors out of rows of bytes; ``like``: tensors of their types whose rows have the same shapes."""
    widths = [math.prod(each.shape[1:]) * each.itemsize for each in like]
    return [
        piece.contiguous().view(each.dtype).view(len(packed), *each.shape[1:])
        for piece, each in zip(packed.split(widths, 1), like, strict=True)
    ]


class Dispatch(Quiet):
    """Rows on their way to the ranks that have their experts; gradients of a row are those of all these ranks."""

    @staticmethod
    def forward(
        ctx: Any, name: str, routes: Routes, group: ExpertGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.name, ctx.routes, ctx.group = name, routes, group
        found = exchanged(tensors, routes, group)
        ctx.mark_non_differentiable(*(each for each in found if not each.is_floating_point()))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        wanted = [n for n, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        ctx.group.agree(f"sends gradients {wanted} of the rows for the experts of {ctx.name} back")
        sums = iter(returned([gradients[n] for n in wanted], ctx.routes, ctx.group))
        return None, None, None, *(next(sums) if n in wanted else None for n in range(len(gradients)))


class Combine(Quiet):
    """Results of the ranks' experts on the way back to their rows; each gets the gradient of its row.

    Gradients go on to ``links`` as well, as zeros: where no row has come to a rank, its part of the backward pass runs
    all the same. ``went_back``, if given, is called then.
    """

    @staticmethod
    def forward(
        ctx: Any, name: str, routes: Routes, group: ExpertGroup, went_back: Callable[[], None] | None,
        results: Tensor, *links: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.name, ctx.routes, ctx.group, ctx.went_back = name, routes, group, went_back
        ctx.links = [(each.shape, each.dtype, each.device) for each in links]
        (sums,) = returned([results], routes, group)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ctx.group.agree(f"sends gradients of results to the experts of {ctx.name}")
        (found,) = exchanged([gradient], ctx.routes, ctx.group)
        if ctx.went_back is not None:
            ctx.went_back()
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.links)
        return None, None, None, None, found, *zeros


def anchor(weights: Iterable[Tensor], like: Tensor) -> list[Tensor]:
    """An empty tensor that needs a gradient, if some expert of any rank does: then all ranks go backward together."""
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in weights)
    return [torch.zeros(0, device=like.device, requires_grad=True)] if trains else []
