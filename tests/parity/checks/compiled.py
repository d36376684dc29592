"""Modules that `torch.compile` has compiled: each is one unit, and the compiler sees nothing of weft."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests import models

from ..split import train_split
from .harness import WIDTH, assert_same, check, seeded, sgd, squared_error, start, trained_alone, vectors

BACKEND = "eager"


def compiled(
    change: Callable[[Any], None], places: dict[str, int] | None = None, build: Any = models.Chain
) -> None:
    """Trained split with compiled parts, against plain ones; the compiler warns of nothing, and breaks no graph."""
    net = seeded(build)
    expected = trained_alone(copy.deepcopy(net), vectors(), squared_error)
    change(net)
    start(**({} if places is None else {"auto_partition": False}))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = train_split(net, vectors(), squared_error, sgd, places=places)
    for record in (
        actual.gradients[0],
        actual.gradients[1],
        actual.gradients[2],
        actual.parameters,
        actual.state,
    ):
        for name in list(record):
            record[name.replace("_orig_mod.", "")] = record.pop(name)
    assert_same(actual, expected)
    told = [
        str(each.message) for each in caught if "ynamo" in str(each.message) or "compile" in str(each.message)
    ]
    assert not told, told
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert not breaks, dict(breaks)


@check
def children_compiled_in_place() -> None:
    def change(net: Any) -> None:
        for block in net.blocks[::2]:
            block.compile(backend=BACKEND)

    compiled(change)
    compiled(change, {f"blocks.{number}": number % 2 for number in range(4)})


@check
def units_compiled_by_weft() -> None:
    """By the setting, each rank its own, after the split; with another backend here, which takes less time."""
    compile_ = torch.compile
    torch.compile = lambda call: compile_(call, backend="aot_eager")  # type: ignore[assignment,misc]
    try:
        net, batches = seeded(models.Chain), vectors()
        expected = trained_alone(copy.deepcopy(net), batches, squared_error)
        for settings in ({}, {"offload_activations": True}, {"pipeline": "zb_h1"}):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            start(compile=True, **settings)
            assert_same(train_split(copy.deepcopy(net), batches, squared_error, sgd), expected)
            counters = torch._dynamo.utils.counters
            assert counters["frames"]["ok"] > 0 and not counters["graph_break"], (settings, dict(counters))
    finally:
        torch.compile = compile_  # type: ignore[assignment]


@check
def children_replaced_by_compiled_ones() -> None:
    def change(net: Any) -> None:
        for number in (1, 2):
            net.blocks[number] = torch.compile(net.blocks[number], backend=BACKEND)

    compiled(change)
    compiled(change, {f"blocks.{number}": number // 2 for number in range(4)})


@check
def children_compiled_in_both_ways() -> None:
    def change(net: Any) -> None:
        net.blocks[0].compile(backend=BACKEND)
        net.blocks[3] = torch.compile(net.blocks[3], backend=BACKEND)

    compiled(change)


@check
def compiled_by_autograd_ahead_of_time() -> None:
    def change(net: Any) -> None:
        net.blocks[1].compile(backend="aot_eager")
        net.blocks[2] = torch.compile(net.blocks[2], backend="aot_eager")

    compiled(change)


@check
def compiled_inside_of_a_unit() -> None:
    def change(net: Any) -> None:
        for block in net.blocks:
            block.up.compile(backend=BACKEND)
            block.down = torch.compile(block.down, backend=BACKEND)

    compiled(change, {f"blocks.{number}": number % 2 for number in range(4)})


@check
def compiled_with_layers_below() -> None:
    def net() -> nn.Module:
        return models.Stack(
            first=nn.Sequential(nn.Sequential(models.Block(), nn.Tanh()), models.Block()),
            second=nn.Sequential(models.Block(), nn.Linear(WIDTH, WIDTH)),
        )

    def change(net: Any) -> None:
        net.first.compile(backend=BACKEND)
        net.second = torch.compile(net.second, backend=BACKEND)

    compiled(change, build=net)
    compiled(change, {"first": 1, "second": 0}, build=net)
