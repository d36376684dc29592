"""What ranks that share sequences exchange, and what autograd keeps of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from weft.torch.context_parallel import exchange
from weft.torch.pytorch.private import imagined_mesh
from weft.torch.pytorch.private_dtensor import take_plain_as_replicated
from weft.torch.tensor_parallel.shard_group import ShardGroup, new_name
from weft.torch.tensors.shards import ShardPositions


@pytest.fixture
def shard_group() -> Iterator[ShardGroup]:
    """The first of two ranks; the second is not there, and has what the first has."""
    take_plain_as_replicated()
    with imagined_mesh(2, "cpu", new_name()) as mesh:
        yield ShardGroup(mesh, None, 0, 2)


@pytest.mark.parametrize(("total", "ranks"), [(8, 2), (7, 2), (5, 3), (5, 4), (1, 2), (50, 7)])
def test_parts_are_those_of_chunk(total: int, ranks: int):
    sizes = exchange.sizes_of(total, ranks)
    parts = torch.arange(total).chunk(ranks)
    assert sizes == [len(part) for part in parts] + [0] * (ranks - len(parts))
    assert exchange.can_cut(total, ranks) == (len(parts) == ranks)


def test_gathered_keys_are_kept_in_parts(shard_group: ShardGroup, monkeypatch: pytest.MonkeyPatch):
    gathers: list[int] = []
    plain = exchange._gathered

    def count(part: Tensor, dim: int, total: int, shard_group: ShardGroup) -> Tensor:
        gathers.append(dim)
        return plain(part, dim, total, shard_group)

    monkeypatch.setattr(exchange, "_gathered", count)
    part = torch.randn(2, 3, 4, requires_grad=True)
    query = torch.randn(2, 3, 4, requires_grad=True)

    def gradients(hooked: bool) -> tuple[Tensor, ...]:
        gathers.clear()
        given = exchange.sharded(part, 1, 6, shard_group)
        whole = exchange.share(given, shard_group)
        with exchange.KeptSharded(shard_group, (given, whole) if hooked else (query, query)):
            result = query @ whole[:, :5].transpose(1, 2)
        assert gathers == [1]
        found = torch.autograd.grad(result.square().sum(), [query, part])
        assert gathers == ([1, 1] if hooked else [1])  # again, for the backward pass
        return found

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
        given = exchange.sharded(part, 1, 6, shard_group)
        assert not exchange.KeptSharded(shard_group, (given, exchange.share(given, shard_group)))._active


def test_blocks_from_both_ends_take_causal_attention_as_long_on_all_ranks():
    for ranks in (2, 3, 8):
        positions = ShardPositions.zigzag(48, ranks)
        pairs = [sum(sum(range(a + 1, a + count + 1)) for a, count in spans) for spans in positions.spans]
        assert len(set(pairs)) == 1 and sum(pairs) == sum(range(49))
        contiguous = ShardPositions.contiguous(exchange.sizes_of(48, ranks))
        assert positions.sizes == contiguous.sizes


@pytest.mark.parametrize("positions", [
    ShardPositions.contiguous([3, 0, 2]), ShardPositions.zigzag(12, 3), ShardPositions.zigzag(12, 3).taken(1, 11),
    ShardPositions.zigzag(4, 2).repeated(3), ShardPositions.zigzag(4, 2).taken(0, 1),
])  # fmt: skip
def test_parts_make_the_whole(positions: ShardPositions):
    whole = torch.randn(2, positions.total, 3)
    parts = [positions.own(whole, 1, rank) for rank in range(len(positions.spans))]
    assert [part.shape[1] for part in parts] == positions.sizes
    assert torch.equal(positions.joined(parts, 1), whole)


def test_pieces_of_parts():
    positions, whole = ShardPositions.zigzag(8, 2), torch.arange(8)
    for first in range(8):
        for stop in range(first, 9):
            for rank in range(2):
                part = positions.own(whole, 0, rank).narrow(0, *positions.within(rank, first, stop))
                assert torch.equal(part, positions.taken(first, stop).own(whole[first:stop], 0, rank))
