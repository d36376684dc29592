"""The owners of weights that are cut, as each of the ranks that hold them decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.replicas import whole_updates
from weft.torch.replicas.whole_updates import WholeUpdates
from weft.torch.tensor_parallel import Cut
from weft.torch.tensor_parallel.cuts import mark

SIZES = [8, 8, 2, 40, 6, 6, 30, 2]


@dataclass
class Ranks:
    """The ranks that hold a weight, as one of them sees them."""

    axis: str
    rank: int
    size: int
    group: Any = None


def weight_of(size: int, ranks: Ranks, holder: int | None = None) -> nn.Parameter:
    weight = nn.Parameter(torch.zeros(size // ranks.size, 2))
    mark(weight, Cut(0, (size,), (size, 2), holder), ranks)  # type: ignore[arg-type]
    return weight


def updates_of(weights: list[nn.Parameter]) -> WholeUpdates:
    updates = WholeUpdates(torch.optim.SGD(weights, lr=0.1))
    assert updates.extend(with_themselves(weights), {})
    return updates


def with_themselves(weights: list[nn.Parameter]) -> dict[int, tuple[Tensor, Tensor]]:
    return {number: (weight, weight) for number, weight in enumerate(weights)}


def test_each_weight_has_one_owner_and_owners_have_as_much():
    ranks = [Ranks("tp", rank, 2) for rank in (0, 1)]
    seen = [updates_of([weight_of(size, each) for size in SIZES]) for each in ranks]
    owned = [[number for number in range(len(SIZES)) if updates.has(number)] for updates in seen]
    assert sorted(sum(owned, [])) == list(range(len(SIZES))) and all(n in seen[0] for n in range(len(SIZES)))
    assert [sum(SIZES[number] for number in each) for each in owned] == [52, 50]


def test_a_weight_that_is_cut_again_stays_with_the_rank_that_splits_tensors():
    found = []
    for tensors in (0, 1):
        for replica in (0, 1):
            weights = [weight_of(size, Ranks("tp", tensors, 2)) for size in SIZES]
            updates = updates_of(weights)
            before = [updates.has(number) for number in range(len(SIZES))]
            for weight, size in zip(weights, SIZES, strict=True):
                mark(weight, Cut(1, (2,), (size // 2, 2)), Ranks("rdp", replica, 2))  # type: ignore[arg-type]
            assert updates.extend(with_themselves(weights), {}) and not updates.extend(
                with_themselves(weights), {}
            )
            after = [updates.has(number) for number in range(len(SIZES))]
            assert all(earlier for earlier, now in zip(before, after, strict=True) if now)
            found.append(after)
    assert [sum(each) for each in zip(*found, strict=True)] == [1] * len(SIZES)


def test_a_weight_that_one_rank_has_stays_there():
    for rank in (0, 1):
        updates = updates_of([weight_of(8, Ranks("tp", rank, 2), holder=1)])
        assert 0 in updates and updates.has(0) == (rank == 1)


def test_messages_have_weights_of_each_owner(monkeypatch: Any):
    monkeypatch.setattr(whole_updates, "BUCKET_BYTES", 100)
    updates = updates_of([weight_of(size, Ranks("tp", 0, 2)) for size in SIZES])
    rounds = whole_updates._rounds(list(updates._weights.values()))
    sizes = [[weight.size for weight in each] for each in rounds]
    assert sizes == [[80, 60], [12, 16], [12, 16, 4, 4]]
    assert all({weight.owner[0] for weight in each} == {0, 1} for each in rounds)
