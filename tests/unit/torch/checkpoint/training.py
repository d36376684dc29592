"""A small model in training, and its checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import weft.torch as weft
from tests.training import squares, step_of


def made(seed: int = 0) -> tuple[weft.DistributedModel, weft.DistributedOptimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    train(model, optimizer)
    return model, optimizer


def train(model, optimizer) -> None:
    step = step_of(squares)
    optimizer.zero_grad()
    step(model, torch.randn(8, 4))
    optimizer.step()


def values(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(model, expected) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def saved(root: Path, *tags: str) -> tuple[weft.DistributedModel, dict[str, torch.Tensor]]:
    """Saves under each tag, and the state that the last one has."""
    model, optimizer = made()
    for number, tag in enumerate(tags):
        train(model, optimizer)
        weft.save_checkpoint(root, tag, model=model, optimizer=optimizer, user_content={"number": number})
    return model, values(model)
