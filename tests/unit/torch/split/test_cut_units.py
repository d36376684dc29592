"""What plans are told of the parts that ranks could have of a model's units."""

from __future__ import annotations

import torch
from torch import nn

from tests import models
from weft.graph import Graph, Unit
from weft.torch.example_graph import Example, traced_graph


def block(inside: int = 32) -> nn.Module:
    return models.Block(8, inside, torch.relu)


def traced(model: nn.Module, units: int) -> dict[str, Unit]:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = traced_graph(Example(model, torch.randn(4, 8)), units=units)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert Graph.from_json(graph.to_json()) == graph
    return {unit.name: unit for unit in graph}


def test_blocks_have_shares_and_sums():
    found = traced(nn.Sequential(block(), block()), units=2)
    parameters = 8 * 32 + 32 + 32 * 8 + 8
    for unit in found.values():
        assert unit.cut_share == parameters / (parameters + 16)
        assert (unit.cut_bytes, unit.cut_ranks, unit.cut_group) == (4 * 8 * 4, 8, None)


def test_single_layers_are_cut_with_those_between_which_tensors_are_in_parts():
    found = traced(nn.Sequential(block(), block(), nn.Linear(8, 3)), units=64)
    assert [found[name].cut_share for name in ("0.norm", "0.up", "0.down", "2")] == [0.0, 1.0, 1.0, 0.0]
    assert found["0.up"].cut_group == found["0.down"].cut_group != found["1.up"].cut_group
    assert (found["0.up"].cut_bytes, found["0.down"].cut_bytes) == (0, 4 * 8 * 4)
    assert found["2"].cut_ranks == 1


def test_ranks_that_do_not_divide_the_layer_are_no_choice():
    found = traced(nn.Sequential(block(12), block(12)), units=2)
    assert {unit.cut_ranks for unit in found.values()} == {4}


def test_experts_of_their_own_are_shared_out_and_add_up_once():
    torch.manual_seed(0)
    mixture = models.Mixture(8, lambda: nn.Linear(8, 8))
    found = traced(nn.Sequential(mixture, nn.Linear(8, 3)), units=64)
    experts = [found[f"0.experts.{number}"] for number in range(4)]
    assert {(unit.cut_share, unit.cut_ranks, unit.cut_group) for unit in experts} == {(1.0, 4, "0")}
    assert sum(unit.cut_bytes for unit in experts) == 4 * 8 * 4
    assert found["0.router"].cut_share == 0.0
