"""Which tensors flow between units, for models whose flows are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests import models
from tests.unit.torch.networks import CPU, WIDTH, Block, linears
from weft.torch.session.random_streams import Streams
from weft.torch.trace.dry_run import Snapshot
from weft.torch.trace.trace import trace

ROWS = 4
SIZE = 4 * ROWS * WIDTH


def flows(
    net: nn.Module, names: list[str], run: Callable[[], object] | None = None
) -> list[tuple[str, tuple[str, ...], int]]:
    x = torch.randn(ROWS, WIDTH)
    traced = trace(net, run or (lambda: net(x)), CPU, Snapshot([net], Streams(CPU)))
    modules = net.named_modules()
    home = {
        name: number
        for name, _ in modules
        for number, unit in enumerate(names)
        if f"{name}.".startswith(f"{unit}.")
    }
    found = traced.operations.flows(home)
    return [(names[source], tuple(names[user] for user in users), size) for source, users, size in found]


def test_a_residual_goes_around_what_is_between():
    """x + down(tanh(up(x))): the sum is made where `down` is, the input of the block flows nowhere."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH))
    assert flows(net, ["0", "1.up", "1.down", "2"]) == [
        ("0", ("1.up", "1.down"), SIZE),
        ("1.up", ("1.down",), 2 * SIZE),
        ("1.down", ("2",), SIZE),
    ]
    assert flows(net, ["0", "1", "2"]) == [("0", ("1",), SIZE), ("1", ("2",), SIZE)]


def test_two_branches_and_a_long_way():
    def run(net: Any, x: Tensor) -> Tensor:
        one, other = net.a(x), net.b(x)
        return net.d(torch.cat([one, other, net.c(one)], 0)[:ROWS])

    assert flows(models.Composed(run, **linears("abcd")), ["a", "b", "c", "d"]) == [
        ("a", ("c",), SIZE),
        ("b", ("c",), SIZE),
        ("c", ("d",), SIZE),
    ]


def test_results_in_structures_are_found():
    def pair(net: Any, x: Tensor) -> dict[str, object]:
        y = net.inner(x)
        return {"value": y, "more": [y[:1], x]}

    def run(net: Any, x: Tensor) -> Tensor:
        found = net.pair(x)
        return net.out(found["more"][0]) + found["more"][1]

    net = models.Composed(run, pair=models.Composed(pair, **linears(["inner"])), **linears(["out"]))
    assert flows(net, ["pair", "out"]) == [("pair", ("out",), SIZE // ROWS)]


def test_what_is_written_in_place_is_newer():
    def run(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        z = net.b(y.detach())
        y += z
        return net.c(y)

    net = models.Composed(run, **linears("abc"))
    assert flows(net, ["a", "b", "c"]) == [("a", ("b",), SIZE), ("a", ("b",), SIZE), ("b", ("c",), SIZE)]


def test_a_unit_that_is_called_again_gets_nothing_back():
    shared, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    net = nn.ModuleDict({"a": shared, "b": other})
    x = torch.randn(ROWS, WIDTH)
    assert flows(net, ["a", "b"], lambda: shared(other(shared(x)))) == [("a", ("b",), SIZE)]


def test_a_unit_that_hands_on_its_input_did_not_make_it():
    same = models.Composed(lambda net, x: x, weight=nn.Parameter(torch.ones(())))
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), same, nn.Linear(WIDTH, WIDTH))
    assert flows(net, ["0", "1", "2"]) == [("0", ("1", "2"), SIZE)]
