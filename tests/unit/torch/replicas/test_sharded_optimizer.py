"""Shares of an optimizer's state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.gathering.layers import blocks
from weft.torch.replicas.sharded_optimizer import Shares, by_parameter, tensors_and_plain


def made(replica: int = 0, replicas: int = 3) -> Shares:
    group: Any = None
    return Shares(group, replica, replicas)


def numbers_of(parameters: list[Tensor], local: list[bool]) -> list[list[int]]:
    shares = [made(replica) for replica in range(3)]
    for share in shares:
        share.extend(parameters, local)
    return [[n for n in range(len(parameters)) if share.has(n)] for share in shares]


def test_shares_are_about_equal_and_every_parameter_has_one():
    parameters: list[Tensor] = [nn.Parameter(torch.zeros(size)) for size in (5, 9, 1, 4, 8, 3)]
    assert numbers_of(parameters, [True] * 6) == [[1, 2], [4, 5], [0, 3]]  # 10, 11 and 9 elements


def test_frozen_and_remote_parameters_are_no_load():
    parameters: list[Tensor] = [nn.Parameter(torch.zeros(4)) for _ in range(9)]
    for frozen in parameters[:3]:
        frozen.requires_grad_(False)
    local = [True] * 6 + [False] * 3
    for mine in numbers_of(parameters, local):
        assert len([n for n in mine if n < 3]) == len([n for n in mine if 3 <= n < 6]) == 1


def test_later_parameters_change_no_share():
    first: list[Tensor] = [nn.Parameter(torch.zeros(size)) for size in (6, 4, 2)]
    shares = made()
    shares.extend(first, [True] * 3)
    before = [shares.has(n) for n in range(3)]
    shares.extend([*first, nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(100))], [True] * 5)
    assert [shares.has(n) for n in range(3)] == before


def test_states_are_taken_apart_and_put_together():
    entries = {3: {"step": 2, "exp_avg": torch.ones(2)}, 1: {"exp_avg": torch.zeros(1)}}
    tensors, plain = tensors_and_plain(entries)
    assert set(tensors) == {"3/exp_avg", "1/exp_avg"} and plain == {"3/step": 2}
    back = by_parameter({**tensors, **plain})
    assert list(back) == [1, 3] and back[3]["step"] == 2 and back[3]["exp_avg"] is entries[3]["exp_avg"]


def test_blocks_are_layers_of_a_kind_that_share_nothing():
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))

    net = nn.Module()
    net.layers = nn.ModuleList([layer(), layer(), layer()])
    net.lists = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)])])
    net.one = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    net.head = nn.Linear(2, 2)
    net.head.weight = net.layers[2][0].weight
    assert blocks(net) == [net.layers[0], net.layers[1], net.layers[2][2]]
    assert blocks(nn.Sequential(nn.Tanh(), nn.Tanh())) == []
