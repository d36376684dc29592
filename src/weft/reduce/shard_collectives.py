"""Collectives on tensors that are sharded along a dimension: all-reduce, all-gather, reduce-scatter, all-to-all.

CPU ranks of one host do it through memory that they share, straight from the tensors and into them: parts along an
inner dimension are rows with gaps between them. Other ranks use the group's own collectives, for which parts are put in
the order of the ranks first.
"""

from __future__ import annotations

import math
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.errors import TransportError
from weft.reduce.choice import hosts_of
from weft.reduce.shared import TIMEOUT, HostMemory, carries
from weft.transport import segment

# PyTorch 2.13 renamed them, and warns of the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ShardCollectives:
    """The collectives of a group on sharded tensors; all ranks make the same calls in the same order.

    Args:
        group: The ranks.
        memory: What they share; None where they use the group's collectives.
    """

    def __init__(self, group: dist.ProcessGroup, memory: HostMemory | None = None) -> None:
        self.group, self.memory = group, memory
        self.rank, self.size = group.rank(), group.size()

    @classmethod
    def connect(
        cls, group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None = None
    ) -> ShardCollectives:
        """Through shared memory, if all ranks have it. Every rank of the group calls it.

        Args:
            group: The ranks, with a CPU backend if the tensors are there.
            device: Where the tensors are.
            timeout: After which time another rank's silence is an error; 30 minutes if None.
        """
        if device.type != "cpu" or not segment.available() or len(set(hosts_of(group))) > 1:
            return cls(group)
        try:
            memory = HostMemory.connect(group, timeout=timeout or TIMEOUT)
        except TransportError:  # raised by all ranks together
            return cls(group)
        memory.members = tuple(dist.get_process_group_ranks(group))  # errors name these
        return cls(group, memory)

    @torch.no_grad()
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor, as large on each rank, by its sum over the ranks."""
        if self.memory is not None and carries(tensor):
            self.memory.all_reduce(tensor.view(-1))
        else:
            dist.all_reduce(tensor, group=self.group)

    @torch.no_grad()
    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' parts, all as large, behind each other along a dimension."""
        if self.memory is None or not carries(part):
            flat = part.new_empty((self.size, *part.shape))
            _gather(_bytes(flat), _bytes(part.contiguous()), group=self.group)
            return flat.movedim(0, dim).flatten(dim, dim + 1).contiguous()
        shape = list(part.shape)
        shape[dim] *= self.size
        whole = part.new_empty(shape)
        rows = self._rows(whole, dim)
        rows[:, self.rank].copy_(part.reshape(rows[:, self.rank].shape))
        self.memory.gather_pieces(rows.unbind(1))
        return whole

    @torch.no_grad()
    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part along a dimension, which the ranks divide, of the sum of the ranks' tensors."""
        tensor = tensor.contiguous()
        shape = list(tensor.shape)
        shape[dim] //= self.size
        rows = self._rows(tensor, dim)
        part = tensor.new_empty(shape)  # no view: callers may write into it
        if self.memory is None or not carries(tensor):
            self._sum_of_own(rows.transpose(0, 1).contiguous(), part.view(-1))
            return part
        pieces = list(rows.unbind(1))
        pieces[self.rank] = part.view(pieces[self.rank].shape)
        pieces[self.rank].copy_(rows[:, self.rank])
        self.memory.scatter_pieces(pieces)
        return part

    @torch.no_grad()
    def all_to_all(self, sent: torch.Tensor) -> torch.Tensor:
        """The rows that all ranks have for this one, of a tensor with a row for each rank."""
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        if self.memory is None or not carries(sent):
            dist.all_to_all_single(_bytes(received), _bytes(sent), group=self.group)
        else:
            self.memory.all_to_all(sent, received)
        return received

    def _sum_of_own(self, flat: torch.Tensor, found: torch.Tensor) -> None:
        """Write the sum of the ranks' rows that stand at this rank's place."""
        if flat.is_cuda:
            _scatter(found, flat.view(-1), group=self.group)
            return
        first, *rest = self.all_to_all(flat.view(self.size, -1))  # gloo would add up all rows on each rank
        found.copy_(first)
        for row in rest:
            found += row

    def _rows(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """A contiguous tensor as (what is before the dimension, ranks, a rank's run of values)."""
        inner = math.prod(tensor.shape[dim + 1 :])
        return tensor.view(math.prod(tensor.shape[:dim]), self.size, tensor.shape[dim] // self.size * inner)

    def close(self) -> None:
        """Give the memory back."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
