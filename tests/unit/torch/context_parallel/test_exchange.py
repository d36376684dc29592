"""What ranks that share sequences exchange, and what autograd keeps of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from weft.torch.context_parallel import exchange
from weft.torch.pytorch.private import imagined_mesh
from weft.torch.pytorch.private_dtensor import take_plain_for_whole
from weft.torch.tensor_parallel.shard_group import ShardGroup, new_name
from weft.torch.tensors.shard_positions import Places


@pytest.fixture
def shard_group() -> Iterator[ShardGroup]:
    """The first of two ranks; the second is not there, and has what the first has."""
    take_plain_for_whole()
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
        given = exchange.in_parts(part, 1, 6, shard_group)
        whole = exchange.share(given, shard_group)
        with exchange.KeptInParts(shard_group, (given, whole) if hooked else (query, query)):
            result = query @ whole[:, :5].transpose(1, 2)
        assert gathers == [1]
        found = torch.autograd.grad(result.square().sum(), [query, part])
        assert gathers == ([1, 1] if hooked else [1])  # again, for the backward pass
        return found

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
        given = exchange.in_parts(part, 1, 6, shard_group)
        assert not exchange.KeptInParts(shard_group, (given, exchange.share(given, shard_group)))._active


def test_blocks_from_both_ends_take_causal_attention_as_long_on_all_ranks():
    for ranks in (2, 3, 8):
        places = Places.dealt(48, ranks)
        pairs = [sum(sum(range(a + 1, a + count + 1)) for a, count in spans) for spans in places.spans]
        assert len(set(pairs)) == 1 and sum(pairs) == sum(range(49))
        behind = Places.behind(exchange.sizes_of(48, ranks))
        assert places.sizes == behind.sizes


@pytest.mark.parametrize("places", [
    Places.behind([3, 0, 2]), Places.dealt(12, 3), Places.dealt(12, 3).taken(1, 11), Places.dealt(4, 2).repeated(3),
    Places.dealt(4, 2).taken(0, 1),
])  # fmt: skip
def test_parts_make_the_whole(places: Places):
    whole = torch.randn(2, places.total, 3)
    parts = [places.own(whole, 1, rank) for rank in range(len(places.spans))]
    assert [part.shape[1] for part in parts] == places.sizes
    assert torch.equal(places.joined(parts, 1), whole)


def test_pieces_of_parts():
    places, whole = Places.dealt(8, 2), torch.arange(8)
    for first in range(8):
        for stop in range(first, 9):
            for rank in range(2):
                part = places.own(whole, 0, rank).narrow(0, *places.within(rank, first, stop))
                assert torch.equal(part, places.taken(first, stop).own(whole[first:stop], 0, rank))
