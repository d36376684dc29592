"""Units move to other ranks between steps, and training goes on as if they had not; started by `test_rebalanced.py`.

    rebalanced.py --folder FOLDER check...

Times are not measured: `slow` says how much longer than traced each partition is busy. Every rank asserts for itself.
"""

from __future__ import annotations

import copy
import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.counted_costs import count_costs
from tests.parity.registry import Checks
from tests.training import distance_from_one, step_of
from weft.errors import UsageError
from weft.profiler.reading import read_run
from weft.torch.split import rebalance

CHECKS = Checks()
given = CHECKS.given
WIDTH, ROWS, BLOCKS = 16, 8, 8
SOON = 3
"""Ranks compare after so many steps here."""


class Block(models.Block):
    def __init__(self, rate: float = 0.25) -> None:
        super().__init__(WIDTH, 4 * WIDTH, torch.tanh, nn.BatchNorm1d, rate)


def network(dropout: float = 0.25) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout) for _ in range(BLOCKS))).double()


def steady() -> nn.Module:
    """Without chance, of which a unit's name is a part, and so how the model was opened."""
    return network(0.0)


def batches(count: int) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return [
        torch.randn(ROWS * weft.rdp_size(), WIDTH, generator=numbers, dtype=torch.float64).tensor_split(
            weft.rdp_size()
        )[weft.rdp_rank()]
        for _ in range(count)
    ]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@contextmanager
def slow(*factors: float) -> Iterator[list[float]]:
    """Inside, partitions are busy so many times as long as traced; the list may be changed between steps."""
    now = list(factors)

    def busy_s(session: Any) -> float:
        (model,) = session.models
        here = session.position("pp")
        own = [unit.unit.time_ms for unit in model.plan.units if unit.partition == here]
        return now[here] * sum(own) / 1e3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebalance, "busy_s", busy_s)
        patch.setattr(rebalance, "STEPS", SOON)
        yield now


class Run:
    """A training: its losses, and the places of blocks before each step."""

    def __init__(
        self,
        made: Callable[[Any], torch.optim.Optimizer] = adam,
        net: Callable[[], nn.Module] = network,
        options: Mapping[str, Any] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        gc.collect()
        weft.shutdown()
        count_costs()  # from the start again, so that two runs have the same split
        weft.init({"partitions": 2, "microbatches": 4, "memory_weight": 0.0, "rebalance": True, **settings})
        torch.manual_seed(5)
        self.model = weft.DistributedModel(net(), **options)
        self.optimizer = weft.DistributedOptimizer(made(self.model.parameters()))
        self.losses: list[float] = []
        self.places: list[tuple[int, ...]] = []
        train = step_of(distance_from_one)
        self.train = train

    def go(self, data: list[Tensor], after: Callable[[int], object] = lambda number: None) -> Run:
        for number, x in enumerate(data):
            self.optimizer.zero_grad()
            self.losses.append(self.train(self.model, x).reduce_mean().item())
            self.places.append(self.place())
            self.optimizer.step()
            after(number)
        return self

    def place(self) -> tuple[int, ...]:
        """The partitions of the blocks, by a weight of each."""
        owners = self.model.owners.items()
        return tuple(at for name, at in owners if name.endswith("up.weight") or name.startswith("tables"))

    def moves(self) -> int:
        return sum(one != other for one, other in zip(self.places, self.places[1:], strict=False))

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def same(one: Any, other: Any, where: str = "", most: float = 0.0) -> None:
    """Equal to the last bit, or, where a sum has another order, but for this part."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), f"{where}: {one.keys() ^ other.keys()}"
        for key in one:
            same(one[key], other[key], f"{where}/{key}", most)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{where}/{number}", most)
    elif isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=most, atol=most, msg=lambda text: f"{where}: {text}")
    elif isinstance(one, float):
        assert math.isclose(one, other, rel_tol=most), f"{where}: {one} {other}"
    else:
        assert one == other, f"{where}: {one} {other}"


def both(
    steps: int = 8, factors: tuple[float, ...] = (1.0, 2.5), most: float = 0.0, **settings: Any
) -> tuple[Run, dict[str, Any]]:
    """A run whose units moved, and its state; losses, weights and states are those of a run that never moved."""
    with slow(*[1.0] * len(factors)):
        still = Run(**settings)
        still.go(batches(steps))
        assert still.moves() == 0
        expected = still.losses, still.state()
    with slow(*factors):
        moving = Run(**settings)
        moving.go(batches(steps))
    assert moving.moves() > 0, moving.places
    found = moving.losses, moving.state()
    same(expected, found, most=most)
    return moving, found[1]


@CHECKS.check
def training_goes_on_to_the_last_bit() -> None:
    moving, _ = both()
    assert sum(moving.places[-1]) < sum(moving.places[0])  # the second partition is slow
    held = {name.split(".")[1] for name, _ in moving.model.local_named_parameters() if ".up." in name}
    assert held == {str(n) for n, at in enumerate(moving.places[-1]) if at == weft.pp_rank()}
    states = moving.optimizer.optimizer.state
    for parameter in moving.model.parameters():
        assert (parameter in states) == any(parameter is own for own in moving.model.local_parameters())


@CHECKS.check
def units_move_forth_and_back() -> None:
    with slow(1.0, 1.0):
        still = Run().go(batches(20))
        expected = still.losses, still.state()
    with slow(1.0, 2.5) as now:

        def after(number: int) -> None:
            if number == 7:
                now[:] = [2.5, 1.0]
            if number == 14:
                now[:] = [1.0, 1.0]

        moving = Run().go(batches(20), after)
    assert moving.moves() == 3, moving.places
    first, *_, last = moving.places
    sums = [*map(sum, moving.places)]
    assert first == last and min(sums) < sums[0] < max(sums), sums
    same(expected, (moving.losses, moving.state()))


@CHECKS.check
def gradients_go_with_their_weights() -> None:
    """Two steps add up; units move between them."""

    def run(factor: float) -> Run:
        with slow(1.0, factor):
            made = Run()
            schedule = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, 0.5)
            for number, x in enumerate(batches(9)):
                made.losses.append(made.train(made.model, x).reduce_mean().item())
                made.places.append(made.place())
                if number % 3 == 2:
                    torch.nn.utils.clip_grad_norm_(made.model.parameters(), 0.5)
                    made.optimizer.step()
                    schedule.step()
                    made.optimizer.zero_grad()
        return made

    still = run(1.0)
    expected = still.losses, still.state()
    moving = run(2.5)
    assert moving.moves() == 1 and moving.places[3] == moving.places[0] != moving.places[4]
    same(expected, (moving.losses, moving.state()), most=1e-12)  # each partition has a part of the norm


def groups(parameters: Any) -> torch.optim.Optimizer:
    some = [*parameters]
    return torch.optim.SGD([{"params": some[:7]}, {"params": some[7:], "lr": 0.1}], lr=0.05, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "groups": groups,
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, foreach=True),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
}


@CHECKS.of_each(*OPTIMIZERS)
def optimizers(name: str) -> None:
    both(made=OPTIMIZERS[name])


@CHECKS.check
def states_outside_of_the_device_go_too() -> None:
    with pytest.MonkeyPatch.context() as patch:
        from weft.torch.offload import states

        patch.setattr(states, "LEAST_BYTES", 1)
        moving, _ = both(offload_optimizer=True, offload_activations=True)
    assert moving.optimizer.offloaded is not None


@CHECKS.of_each("gpipe", "interleaved_1f1b", "zb_h1", "zbv", "looped_bfs")
def schedules(name: str) -> None:
    both(pipeline=name, microbatches=4)


@CHECKS.check
def a_checkpoint_has_the_new_split() -> None:
    with slow(1.0, 2.5):
        moving = Run(net=steady).go(batches(6))
        weft.save_checkpoint(given.folder, "moved", model=moving.model, optimizer=moving.optimizer)
        place = moving.place()
        moving.go(batches(2))
        expected = moving.losses[-2:], moving.state()
    for settings in ({}, {"rebalance": False}, {"rebalance": False, "optimize": "memory"}):
        with slow(1.0, 1.0):
            resumed = Run(net=steady, **settings)
            weft.resume_from_checkpoint(
                given.folder, "moved", model=resumed.model, optimizer=resumed.optimizer
            )
            resumed.go(batches(2))
        assert (resumed.place() == place) == ("optimize" not in settings), settings
        same(expected, (resumed.losses, resumed.state()))


@CHECKS.check
def reports_tell_of_the_new_split() -> None:
    folder = given.folder / "recorded"
    with slow(1.0, 2.5):
        moving = Run(record=str(folder)).go(batches(6))
    assert moving.moves() == 1
    place = moving.place()
    places = {unit.name: unit.partition for unit in moving.model.plan.units if unit.partition >= 0}
    assert weft.partition_report().to_dict()["models"]
    torch.distributed.barrier()
    weft.shutdown()
    run = read_run(folder)
    for facts in run.facts.values():
        assert {unit.name: unit.partition for unit in facts.units} == places
        assert facts.planned is not None and len(facts.planned.parts) == 2
    assert place.count(0) > place.count(1)


class Tied(nn.Module):
    """An embedding that is the head too, convolutions whose weights lie in another order, and weights under a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.convolution = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.mixed = nn.utils.parametrizations.weight_norm(nn.Linear(4 * WIDTH, WIDTH))
        self.more = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed((x * 8).long() % 32).mean(1)
        for block in self.blocks:
            x = block(x)
        x = self.mixed(self.convolution(x.view(-1, 1, 4, WIDTH // 4)).flatten(1))
        for block in self.more:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double()


@CHECKS.check
def tied_and_parametrised_weights_move() -> None:
    # the two parts of a tied weight's gradient are added as they come
    moving, _ = both(6, net=tied, most=1e-6)
    assert moving.model.owners["embed.weight"] == moving.model.owners["head.weight"]


@CHECKS.check
def weights_that_were_made_late_move() -> None:
    def late() -> nn.Module:
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch, weft.delay_param_initialization():
            from weft.torch import delayed_parameters

            patch.setattr(delayed_parameters, "SMALL", 16)
            return network()

    both(net=late)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(64, WIDTH, sparse=True, mode="sum") for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        found = x
        for table in self.tables:
            found = found + table((x * 16).long() % 64)
        return found


def sparse() -> nn.Module:
    torch.manual_seed(0)
    return Sparse().double()


@CHECKS.check
def sparse_gradients_go_too() -> None:
    def run(factor: float) -> tuple[Any, tuple[int, ...]]:
        with slow(1.0, factor):
            made = Run(lambda parameters: torch.optim.SparseAdam([*parameters], lr=0.01), sparse)
            for number, x in enumerate(batches(6)):
                made.losses.append(made.train(made.model, x).reduce_mean().item())
                if number % 2:
                    made.optimizer.step()
                    made.optimizer.zero_grad()
            return (made.losses, made.state()), made.place()

    expected, before = run(1.0)
    found, after = run(2.5)
    assert before != after
    same(expected, found)


@CHECKS.check
def replicas_move_together() -> None:
    both(options={"gradient_as_bucket_view": True})
    both(options={"backward_passes_per_step": 2, "broadcast_buffers": False}, offload_optimizer=True)
    both(options={"bucket_cap_mb": 0.001}, all_reduce="direct")


@CHECKS.check
def a_replica_that_trains_faster_waits_for_the_slowest() -> None:
    """Of the ranks of a partition the slowest counts."""
    with slow(1.0, 1.0) as now:
        moving = Run()
        now[1] = 2.5 - weft.rdp_rank()
        moving.go(batches(6))
    assert moving.moves() == 1 and sum(moving.places[-1]) < sum(moving.places[0])


@CHECKS.check
def four_partitions() -> None:
    moving, _ = both(factors=(1.0, 1.0, 2.5, 1.0), partitions=4)
    assert moving.places[0].count(2) > moving.places[-1].count(2), moving.places
    both(factors=(3.0, 1.0, 1.0, 1.0), partitions=4, pipeline="zb_h1")


@CHECKS.check
def other_steps_between_do_not_count() -> None:
    """Evaluations, and a second function that trains."""

    def run(factor: float) -> Run:
        with slow(1.0, factor):
            made = Run()
            another = step_of(lambda model, x: (model(x + 1) + 1).square().mean())

            @weft.step
            def evaluate(model: Any, x: Tensor) -> Tensor:
                with torch.no_grad():
                    return model(x).mean()

            def between(number: int) -> None:
                made.optimizer.zero_grad()
                made.losses.append(another(made.model, data[number]).reduce_mean().item())
                made.optimizer.step()
                made.model.eval()
                made.losses.append(evaluate(made.model, data[number]).reduce_mean().item())
                made.model.train()

            data = batches(7)
            return made.go(data, between)

    still = run(1.0)
    expected = still.losses, still.state()
    moving = run(2.5)
    assert moving.moves() == 1 and moving.places[SOON] == moving.places[0], moving.places
    same(expected, (moving.losses, moving.state()))


@CHECKS.check
def what_the_script_holds_stays_valid() -> None:
    """Parameters, hooks on them, and a state that it loads after units have moved."""
    with slow(1.0, 1.0):
        still = Run().go(batches(8))
        expected = still.losses, still.state()
    with slow(1.0, 2.5):
        moving = Run()
        held = dict(moving.model.module.named_parameters())
        seen: set[str] = set()
        for name, parameter in held.items():
            parameter.register_hook(lambda grad, name=name: seen.add(name))
        start = moving.state()
        moving.go(batches(8))
        here = {name for name in held if moving.model.owners[name] == weft.pp_rank()}
        same(expected, (moving.losses, moving.state()))
        assert all(held[name] is parameter for name, parameter in moving.model.module.named_parameters())
        seen.clear()
        moving.go(batches(1))
        assert seen == here
        moving.model.load_state_dict(start["model"])
        moving.optimizer.load_state_dict(start["optimizer"])
        same(start["model"], moving.model.state_dict())
        weft.shutdown()


class Average:
    """The averages of weights, as a script writes them by itself."""

    def __init__(self, model: Any) -> None:
        self.kept = [(p, p.detach().clone()) for p in model.parameters()]

    def follow(self) -> None:
        with torch.no_grad():
            for parameter, average in self.kept:
                average.mul_(0.5).add_(parameter, alpha=0.5)


@CHECKS.check
def averages_that_stay_behind_are_an_error() -> None:
    with slow(1.0, 2.5):
        moving = Run()
        moving.go(batches(2))
        average = Average(moving.model)
        moving.go(batches(1), lambda _: average.follow())
        with pytest.raises(UsageError):
            moving.go(batches(3), lambda _: average.follow())


class Adamish(torch.optim.SGD):
    """Keeps something outside of its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.first = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]


class Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["kept"] = (1, 2)


def view() -> nn.Module:
    net = network()
    net[0].turned = net[0].up.weight.detach().t()
    return net


def counter() -> nn.Module:
    net = network()

    class Counts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().forward(x) * (1 + 1 / self.calls)

    net[3] = Counts().double()
    return net


def extra() -> nn.Module:
    class Extra(Block):
        def get_extra_state(self) -> Any:
            return 1

        def set_extra_state(self, state: Any) -> None: ...

    net = network()
    net[3] = Extra().double()
    return net


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "outside": ({"made": Adamish}, "Adamish keeps tensors outside of its state"),
    "odd": ({"made": Odd}, "Odd keeps 'kept' of type tuple for a parameter"),
    "view": ({"net": view}, "the attribute turned of 0 is a view of 0.up.weight"),
    "extra": ({"net": extra}, "3 has an extra state"),
}


@CHECKS.of_each(*REFUSED)
def refused(name: str) -> None:
    settings, text = REFUSED[name]
    with slow(1.0, 2.5):
        run = Run(**settings)
        with pytest.raises(UsageError, match=text):
            run.go(batches(5))
        assert run.moves() == 0


@CHECKS.check
def an_attribute_that_stays_ends_the_job() -> None:
    """The rank that decides refuses it."""
    Run(net=counter).go(batches(1))


@CHECKS.check
def what_hides_states_is_refused() -> None:
    with slow(1.0, 2.5):
        run = Run()
        other = weft.DistributedModel(network())
        with pytest.raises(UsageError, match="there are several models"):
            run.go(batches(1))
        del other
        run = Run()
        run.model.register_comm_hook(None, lambda state, bucket: bucket)
        with pytest.raises(UsageError, match="a communication hook may keep something"):
            run.go(batches(1))
        with pytest.raises(UsageError, match="join.. does not fit rebalance"), run.model.join():
            pass
        run = Run()
        plain = torch.optim.SGD(run.model.parameters(), lr=0.1)
        run.train(run.model, batches(1)[0])
        with pytest.raises(UsageError, match="this SGD is not wrapped"):
            plain.step()


@CHECKS.check
def the_first_rank_says_what_moved_and_why() -> None:
    with slow(1.0, 2.5), pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr(rebalance.log, "info", lambda text, *args: lines.append(text % args))
        Run().go(batches(6))
    told = [line for line in lines if line.startswith("rebalance: ")]
    if weft.rank():
        assert not told
        return
    (line,) = told
    assert f"in the last {SOON} steps partition 1 took 2.50 times as long as the split was made for" in line
    assert "from partition 1 to 0. A step is expected to take " in line


def start() -> None:
    pass


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], start)
