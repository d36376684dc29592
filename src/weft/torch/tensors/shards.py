"""Tensors of which each rank has a shard: whoever makes such a class says how its tensors are gathered.

The layers below know no more of them, so that the execution of a step needs nothing of tensor parallelism. There are
two kinds. A tensor may *stay* sharded until somebody gathers it, as a ``DTensor`` does. Or it gathers itself *on use*,
when a function takes it that has no rule for shards; until then it travels as it is.

`ShardPositions` says which positions of a dimension each rank has: one behind the other, or in zigzag blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

AllGather = Callable[[Tensor], Tensor]
"""From a shard to a plain tensor, which is the same on each rank. All ranks that have a shard call it together."""
_stay: dict[type[Tensor], AllGather] = {}
_on_use: dict[type[Tensor], AllGather] = {}


def register(kind: type[Tensor], all_gather: AllGather, on_use: bool = False) -> None:
    """Let a class of tensors be known. ``on_use``: its tensors gather themselves when they are used."""
    (_on_use if on_use else _stay)[kind] = all_gather


def stays_sharded(tensor: Tensor) -> bool:
    """True if the tensor is a shard that does not gather itself."""
    return isinstance(tensor, tuple(_stay))


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor for which :func:`stays_sharded` is true."""
    return next(all_gather for kind, all_gather in _stay.items() if isinstance(tensor, kind))(tensor)


def used(tensor: Tensor) -> Tensor:
    """The whole of a shard that gathers itself on use. Any other tensor is returned as it is."""
    for kind, all_gather in _on_use.items():
        if isinstance(tensor, kind):
            return all_gather(tensor)
    return tensor


def resize(parameter: Tensor, values: Tensor) -> None:
    """Let a parameter hold values of another shape, its shard or its whole.

    The autograd node that adds up its gradient expects the former shape, and lives as long as any graph that has it.
    PyTorch gives the parameter a new node only with another dtype.
    """
    if values.shape != parameter.shape:
        other = torch.float16 if values.dtype == torch.float32 else torch.float32
        parameter.data = values.new_empty(0, dtype=other)
    parameter.data = values


def sizes_of(total: int, ranks: int) -> list[int]:
    """The number of positions of each rank, of ``total``, as ``torch.chunk`` would cut them.

    >>> sizes_of(8, 2), sizes_of(7, 2), sizes_of(5, 4)
    ([4, 4], [4, 3], [2, 2, 1, 0])
    """
    most = -(-total // ranks)
    return [max(0, min(most, total - most * rank)) for rank in range(ranks)]


@dataclass(frozen=True)
class ShardPositions:
    """Of each position, whose it is.

    Attributes:
        spans: For each rank the first position and the number of positions, of each piece that it has; in order.
    """

    spans: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def contiguous(cls, sizes: Iterable[int]) -> ShardPositions:
        """Each rank's positions behind those of the one before.

        >>> ShardPositions.contiguous([4, 3]).spans
        (((0, 4),), ((4, 3),))
        """
        found, first = [], 0
        for size in sizes:
            found.append(((first, size),) if size else ())
            first += size
        return cls(tuple(found))

    @classmethod
    def zigzag(cls, total: int, ranks: int) -> ShardPositions:
        """Each of ``n`` ranks has the i-th block from the front and the i-th from the back, of ``2n`` blocks.

        So with a causal mask all have as much to do: ``(i + 1) + (2n - i)`` blocks of keys.

        >>> ShardPositions.zigzag(8, 2).spans
        (((0, 2), (6, 2)), ((2, 4),))
        """
        block, blocks = total // (2 * ranks), 2 * ranks
        return cls(
            tuple(_merged([(i * block, block), ((blocks - 1 - i) * block, block)]) for i in range(ranks))
        )

    @cached_property
    def sizes(self) -> list[int]:
        """The number of positions of each rank."""
        return [sum(count for _, count in spans) for spans in self.spans]

    @cached_property
    def total(self) -> int:
        """The number of positions."""
        return sum(self.sizes)

    def own(self, whole: Tensor, along: int, rank: int) -> Tensor:
        """The rank's positions of a full tensor, which is seen, or copied where they are several pieces."""
        spans = self.spans[rank]
        if len(spans) < 2:
            return whole.narrow(along, *(spans[0] if spans else (0, 0)))
        return torch.cat([whole.narrow(along, *span) for span in spans], along)

    def joined(self, parts: Sequence[Tensor], along: int) -> Tensor:
        """The whole of what all ranks have."""
        pieces: list[tuple[int, Tensor]] = []
        for spans, part in zip(self.spans, parts, strict=True):
            found = part.split_with_sizes([count for _, count in spans], along) if spans else ()
            pieces.extend((first, piece) for (first, _), piece in zip(spans, found, strict=True))
        if not pieces:
            return parts[0]
        pieces.sort(key=lambda piece: piece[0])
        return torch.cat([piece for _, piece in pieces], along)

    def taken(self, first: int, stop: int) -> ShardPositions:
        """The same of the positions from ``first`` to ``stop``.

        >>> ShardPositions.zigzag(8, 2).taken(0, 7).spans
        (((0, 2), (6, 1)), ((2, 4),))
        """
        cut = (
            [(max(a, first) - first, min(a + count, stop) - max(a, first)) for a, count in spans]
            for spans in self.spans
        )
        return ShardPositions(tuple(tuple(span for span in spans if span[1] > 0) for spans in cut))

    def within(self, rank: int, first: int, stop: int) -> tuple[int, int]:
        """Where in the rank's part its positions from ``first`` to ``stop`` begin, and how many they are."""
        before = sum(max(0, min(a + count, first) - a) for a, count in self.spans[rank])
        return before, self.taken(first, stop).sizes[rank]

    def repeated(self, times: int) -> ShardPositions:
        """The same of so many sequences, one behind the other, seen as one dimension.

        >>> ShardPositions.contiguous([2, 1]).repeated(2).spans
        (((0, 2), (3, 2)), ((2, 1), (5, 1)))
        """
        again = (
            [(number * self.total + a, count) for number in range(times) for a, count in spans]
            for spans in self.spans
        )
        return ShardPositions(tuple(map(_merged, again)))


def _merged(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Pieces in order, those that are right behind each other as one."""
    found: list[tuple[int, int]] = []
    for first, count in spans:
        if found and sum(found[-1]) == first:
            found[-1] = found[-1][0], found[-1][1] + count
        else:
            found.append((first, count))
    return tuple(found)
