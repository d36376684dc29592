"""All that a step can change is as before after a dry run, and each of several runs finds the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.torch.networks import CPU
from weft.torch.example_check import check_run
from weft.torch.example_graph import Example, traced_graph
from weft.torch.execution.thread_settings import rehearsal, rehearsed
from weft.torch.session.random_streams import Streams
from weft.torch.trace.dry_run import DryRun, Forward, Snapshot

X = torch.ones(4, 8)


class Remembers(nn.Module):
    """Writes into its input, a buffer and a parameter; what it returns depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
        self.average = nn.Parameter(torch.ones(8), requires_grad=False)
        self.calls, self.memory = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x.add_(1)
        self.average.mul_(0.5)
        hidden = self.up(x * self.average)
        self.memory = hidden if self.memory is None else torch.cat([self.memory, hidden])
        return self.down(self.norm(self.memory))


def as_before(net: nn.Module) -> Callable[[], bool]:
    """Tells later whether the module has the same state, and no gradient."""
    state = {name: value.clone() for name, value in net.state_dict().items()}
    plain = {name: value for name, value in vars(net).items() if not name.startswith("_")}
    random = torch.get_rng_state()
    return lambda: (
        all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
        and {name: value for name, value in vars(net).items() if not name.startswith("_")} == plain
        and all(parameter.grad is None for parameter in net.parameters())
        and torch.equal(torch.get_rng_state(), random)
    )


def test_each_forward_run_is_the_first() -> None:
    net, x = Remembers(), X.clone()
    same, dry = as_before(net), DryRun([net], Streams(CPU), None, (x,))
    with dry.forward(lambda: net(*dry.arguments()) + torch.rand(())) as run:
        one, other = run(), run()
    assert one.shape == (4, 8) and torch.equal(one, other)
    assert same() and torch.equal(x, X)


def test_parameters_of_a_module_that_only_the_step_knows_come_back() -> None:
    net, teacher = nn.Linear(2, 2), nn.Linear(2, 2)
    same = as_before(teacher)

    def step() -> None:
        with torch.no_grad():
            for one, other in zip(teacher.parameters(), net.parameters(), strict=True):
                one.lerp_(other, 0.5)
        teacher.eval().requires_grad_(False)

    with Snapshot([net], Streams(CPU), step).restored():
        step()
    assert same() and all(parameter.requires_grad for parameter in teacher.parameters())


def test_what_autocast_has_cast_is_forgotten() -> None:
    net = nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with Snapshot([net], Streams(CPU)).restored(), torch.no_grad():
            net.weight.zero_()
            net(torch.ones(1, 2))
        net.zero_grad()
        result = net(torch.ones(1, 2))
        result.sum().backward()
    assert net.weight.grad is not None
    expected = net(torch.ones(1, 2))
    torch.testing.assert_close(result.float(), expected, rtol=0.02, atol=0.02)


def test_objects_of_the_classes_of_every_model_come_back() -> None:
    count = type("Count", (), {"__module__": "one_more", "calls": 0})()
    count.calls = 0
    other = type("Other", (nn.Module,), {"__module__": "one_more"})()
    other.count = count
    with Snapshot([nn.Linear(1, 1), other], Streams(CPU)).restored():
        count.calls += 1
    assert count.calls == 0


def test_a_rehearsal_inside_of_another_ends_before_it() -> None:
    one, other = Forward(), Forward()
    with rehearsed(one):
        with pytest.raises(ValueError), rehearsed(other):
            raise ValueError
        assert rehearsal() is one
    assert rehearsal() is None


@pytest.mark.parametrize("look", [traced_graph, lambda example: [*check_run(example, 1, 1)]])
def test_a_script_that_is_looked_at_stays_as_it_is(look: Callable[[Example], Any]) -> None:
    net, x = Remembers(), X.clone()
    same = as_before(net)
    look(Example(net, x, lambda result: result.square().mean() + torch.rand(())))
    assert same() and torch.equal(x, X)
