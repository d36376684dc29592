"""Random numbers in a model: active, repeatable from the seed, the same in every rank's view.

A split need not draw the numbers that one process draws. So a model here writes down what chance decided, and
one process repeats the training with the same decisions.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft.torch as weft
from tests import models
from tests.training import step_of
from weft.torch.session import current
from weft.transport.channel import SHAPES, SPEC, Message

from ..compare import gradients, on_device
from ..split import train_split
from .harness import (
    MICROBATCHES,
    ROWS,
    WIDTH,
    adamw,
    assert_same,
    check,
    placed,
    seeded,
    sgd,
    start,
    trained_alone,
    vectors,
)


class Noisy(nn.Module):
    """Dropout inside parts, as a part, and in glue."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.dropout = models.Block(), nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(self.block(x)) + F.dropout(x, 0.1, self.training)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = self.Part(), self.Part(), self.Part()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.dropout(self.a(x)))
        return self.c(F.dropout(x, 0.2, self.training))


@weft.step
def squares(model: nn.Module, x: Tensor, train: bool = True) -> Tensor:
    """The mean square of the model's output, for each microbatch."""
    loss = model(x).square().mean()
    if train:
        model.backward(loss)
    return loss


def equal_rows() -> Tensor:
    """The same two rows for each microbatch [ROWS, WIDTH]."""
    return vectors(rows=ROWS // MICROBATCHES)[0]["x"].repeat(MICROBATCHES, 1)


@check
def dropout_is_active_and_differs_between_microbatches() -> list[float]:
    model = placed(seeded(Noisy), {"a": 0, "b": 1, "c": 0})
    torch.manual_seed(5)
    noisy = [loss.item() for loss in squares(model, equal_rows()).outputs]
    assert len(set(noisy)) == MICROBATCHES, f"equal losses with dropout: {noisy}"
    model.eval()
    quiet = [loss.item() for loss in squares(model, equal_rows(), train=False).outputs]
    assert len(set(quiet)) == 1 and quiet[0] not in noisy, f"unequal losses without dropout: {quiet}"
    model.train()
    again = [loss.item() for loss in squares(model, equal_rows()).outputs]
    assert len(set(again + noisy)) == 2 * MICROBATCHES, f"steps repeat each other: {noisy}, {again}"
    return noisy + quiet + again


@check
def dropout_repeats_with_the_seed() -> list[float]:
    def run(seed: int) -> Any:
        net = seeded(Noisy)
        torch.manual_seed(seed)
        start(auto_partition=False, default_partition=0)
        places = {"a": 0, "b": 1, "c": 0}
        return train_split(net, vectors(), lambda m, b: F.mse_loss(m(b["x"]), b["y"]), adamw, places=places)

    first, second, third = run(21), run(21), run(22)
    assert first.losses == second.losses, f"{first.losses} {second.losses}"
    assert first.losses[0] != third.losses[0], "another seed gives the same losses"
    assert_same(first, second, tolerance=0.0)
    return first.losses


@check
def seeding_again_repeats_a_step() -> list[list[float]]:
    model = placed(seeded(Noisy), {"a": 0, "b": 1, "c": 0})
    losses, grads = [], []
    for _ in range(3):
        model.zero_grad()
        torch.manual_seed(31)
        losses.append([loss.item() for loss in squares(model, equal_rows()).outputs])
        grads.append(gradients(model.local_named_parameters()))
    assert losses[0] == losses[1] == losses[2], (
        f"the first step, which traces, or a later one differs: {losses}"
    )
    for later in grads[1:]:
        for name, value in later.items():
            torch.testing.assert_close(value, grads[0][name], rtol=1e-6, atol=1e-7)
    return losses


@check
def each_signature_is_watched_once() -> None:
    """Microbatches that wait in turn at one part: the others' random numbers are not taken for its own."""
    numpy.random.rand()
    model = placed(seeded(models.Chain), {f"blocks.{number}": number % 2 for number in range(4)})
    channel = current.session().pipeline.channel
    told: list[int] = []
    send = channel.send

    def counted(peer: int, message: Message) -> None:
        assert message.key.kind != SHAPES, "a part is told at each call, as if its result depended on data"
        if message.key.kind == SPEC:
            told.append(message.key.number)
        send(peer, message)

    channel.send = counted
    try:
        for _ in range(2):
            squares(model, equal_rows())
    finally:
        del channel.send
    assert len(told) == len(set(told)) >= 2, f"signatures told: {told}"


@check
def every_rank_tells_what_it_runs() -> None:
    """A third rank waits for the one that runs a call, even if another one has told the same signature."""

    def net() -> nn.Module:
        return models.Composed(
            lambda net, x: torch.tanh(net.b(torch.tanh(net.a(x)))), a=models.Block(), b=models.Block()
        )

    model = placed(seeded(net), {"a": 0, "b": 1})
    pipeline = current.session().pipeline
    before = set(pipeline.announced)
    squares(model, equal_rows())
    mine = sorted(str(key[0]) for key in pipeline.announced - before if "tanh" in str(key[0]))
    assert len(mine) == 1, f"rank {weft.pp_rank()} told {mine}"


class Scaled(nn.Module):
    """`dropout(x * weight)`: linear in the weight, so <gradient, weight> is the loss if the masks agree."""

    def __init__(self, repeat: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.4)


class Product(nn.Module):
    """Three of them with dropout between, each through `checkpoint` where that is asked for."""

    def __init__(self, repeat: str) -> None:
        super().__init__()
        self.a, self.b, self.c = Scaled(repeat), Scaled(repeat), Scaled(repeat)
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.a, self.b, self.c):
            if self.repeat == "no":
                x = part(x)
            else:
                x = checkpoint(part, x, use_reentrant=self.repeat == "reentrant")
            x = F.dropout(x, 0.2)
        return x


@check
def dropout_masks_agree_in_forward_and_backward() -> None:
    for repeat in ("no", "plain", "reentrant"):
        model = placed(seeded(Product, repeat), {"a": 0, "b": 1, "c": 0})
        total = step_of(lambda model, x: model(x.requires_grad_()).sum())
        loss = total(model, torch.rand(ROWS, WIDTH) + 1).reduce_mean()
        for name, weight in model.local_named_parameters():
            product = (weight.grad * weight).sum()
            torch.testing.assert_close(product, loss, rtol=1e-5, atol=0.0, msg=lambda m, n=name: f"{n}: {m}")


@check
def random_numbers_in_glue_are_the_same_for_every_part() -> list[float]:
    class Echo(nn.Module):
        def __init__(self, draws: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.draws = draws

        def forward(self, x: Tensor) -> Tensor:
            torch.rand(self.draws)
            return x * self.weight

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Echo(3), Echo(0)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            left, right = [], []
            for _ in range(2):
                noise = F.dropout(torch.ones_like(x), 0.5) + torch.randn_like(x)
                noise += torch.rand(len(x), 1, device=x.device)
                noise += torch.bernoulli(torch.full_like(x, 0.5)) + x.new_empty(x.shape).normal_()
                noise += torch.randint(0, 9, (WIDTH,), device=x.device)
                noise += torch.randperm(WIDTH, device=x.device)
                left.append(self.a(noise))
                right.append(self.b(noise))
            return torch.cat(left), torch.cat(right)

    model = placed(seeded(Net), {"a": 0, "b": 1})
    torch.manual_seed(41)

    @weft.step
    def step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = model(x)
        model.backward(left.mean() + right.mean())
        return left, right

    told = []
    for batch in vectors():
        left, right = (out.concat() for out in step(model, batch["x"]))
        assert torch.equal(left, right), (
            f"the ranks drew different numbers, {(left - right).abs().max()} apart"
        )
        told.append(left.sum().item())
    assert len(set(told)) == len(told), "every step draws the same numbers"
    return told


DRAWS: dict[str, Callable[[], float | Tensor]] = {
    "torch": lambda: torch.rand(()).item(),
    "tensor": lambda: torch.rand([]),
    "python": random.random,
    "numpy": lambda: float(numpy.random.uniform()),
}


class Dropping(nn.Module):
    """LayerDrop: skips blocks (not the first) by chance, or as `forced` says.

    It writes down what it did for each `key`. With `leave` a skip ends the forward pass: early exit.
    """

    def __init__(self, draw: str, leave: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block() for _ in range(5))
        self.draw, self.leave = draw, leave
        self.decisions: dict[int, list[bool]] = {}
        self.forced: dict[int, list[bool]] | None = None

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        name, kept = int(key[0]), []
        for number, block in enumerate(self.blocks):
            if self.forced is not None:
                keep = self.forced[name][number]
            else:
                keep = bool(number == 0 or not self.training or DRAWS[self.draw]() > 0.4)
            kept.append(keep)
            if keep:
                x = block(x)
            elif self.leave:
                break
        self.decisions[name] = kept
        return x


def keyed() -> list[dict[str, Tensor]]:
    """Batches with a `key` that tells the microbatches of all steps apart."""
    keys = torch.arange(ROWS) // (ROWS // MICROBATCHES)
    return [{**batch, "key": keys + step * MICROBATCHES} for step, batch in enumerate(vectors(steps=4))]


def keyed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["key"]), batch["y"])


def decided_by_chance(draw: str, leave: bool, places: dict[str, int] | None) -> dict[str, list[bool]]:
    """Trains with dropped blocks, repeats it alone with the same decisions; tells the decisions."""
    net = seeded(Dropping, draw, leave)
    alone = copy.deepcopy(net)
    torch.manual_seed(51)
    random.seed(51)
    numpy.random.seed(51)
    start(**({} if places is None else {"auto_partition": False, "default_partition": 0}))
    actual = train_split(net, keyed(), keyed_loss, sgd, places=places)
    decisions = net.decisions
    assert len(decisions) == 4 * MICROBATCHES
    assert len({str(kept) for kept in decisions.values()}) > 3, f"chance decides too little: {decisions}"
    alone.forced = decisions
    assert_same(actual, trained_alone(alone, keyed(), keyed_loss))
    return {str(key): decisions[key] for key in sorted(decisions)}


HALVES = {f"blocks.{i}": i // 3 for i in range(5)}
TURNS = {f"blocks.{i}": i % 2 for i in range(5)}


@check
def layer_drop() -> list[Any]:
    return [decided_by_chance("torch", False, places) for places in (None, HALVES, TURNS)]


@check
def layer_drop_that_compares_a_tensor() -> dict[str, list[bool]]:
    return decided_by_chance("tensor", False, TURNS)


@check
def layer_drop_by_python_random() -> dict[str, list[bool]]:
    return decided_by_chance("python", False, TURNS)


@check
def layer_drop_by_numpy() -> dict[str, list[bool]]:
    return decided_by_chance("numpy", False, HALVES)


@check
def early_exit_by_chance() -> list[Any]:
    return [decided_by_chance("torch", True, places) for places in (None, HALVES, TURNS)]


class DropPath(nn.Module):
    """Stochastic depth: each row keeps or loses a branch; the choice [B, 1] is given or drawn."""

    def forward(self, x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        if keep is None:
            keep = x.new_empty(len(x), 1).bernoulli_(0.6)
        return x * keep / 0.6, keep


class Deep(nn.Module):
    """Branches with stochastic depth. Gives the output and the choices [B, branches]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block() for _ in range(4))
        self.paths = nn.ModuleList(DropPath() for _ in range(4))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        choices = []
        for number, (block, path) in enumerate(zip(self.blocks, self.paths, strict=True)):
            branch, choice = path(block(x), None if keep is None else keep[:, number : number + 1])
            x = x + 0.2 * branch
            choices.append(choice)
        return x, torch.cat(choices, dim=1)


@check
def stochastic_depth() -> list[Any]:
    net = seeded(Deep)
    alone = copy.deepcopy(net)
    model = placed(net, {f"{name}.{i}": i % 2 for i in range(4) for name in ("blocks", "paths")})
    optimizer = weft.DistributedOptimizer(sgd(model.parameters()))
    torch.manual_seed(61)

    @weft.step
    def step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out, choices = model(x)
        loss = F.mse_loss(out, y)
        model.backward(loss)
        return loss, choices

    losses, replay, last = [], [], {}
    for batch in vectors():
        optimizer.zero_grad()
        loss, choices = step(model, batch["x"], batch["y"])
        losses.append(loss.reduce_mean().item())
        replay.append({**batch, "keep": choices.concat()})
        last = gradients(model.local_named_parameters())
        optimizer.step()
    kept = [batch["keep"].tolist() for batch in replay]
    assert len({str(rows) for rows in kept}) == len(kept), "every step draws the same numbers"
    expected = trained_alone(alone, replay, lambda m, b: F.mse_loss(m(b["x"], b["keep"])[0], b["y"]))
    torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=0.0)
    for name, grad in last.items():
        torch.testing.assert_close(
            grad, expected.gradients[-1][name.removeprefix("module.")], rtol=1e-5, atol=1e-7
        )
    return kept


@check
def a_step_without_chance_leaves_random_states_alone() -> None:
    torch.manual_seed(71)
    before = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    start()
    net = models.Chain()
    torch.set_rng_state(before[0])
    train_split(net, vectors(), lambda m, b: F.mse_loss(m(b["x"]), b["y"]), sgd)
    after = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    assert torch.equal(before[0], after[0]), "torch's random state changed"
    assert before[1] == after[1], "the state of random changed"
    assert before[2] == after[2], "numpy's random state changed"


class Draws(nn.Module):
    """Draws in glue, on a tensor of its own rank and on every rank alike, between parts with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Noisy.Part(), Noisy.Part()

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.a(x), 0.2, self.training) * torch.rand(WIDTH, device=x.device)
        chosen = torch.multinomial(x.detach().abs() + 1e-3, 2)
        return self.b(x).gather(1, chosen) + torch.rand((), device=x.device)


@check
def a_seed_that_a_step_sets() -> None:
    """From there on a microbatch draws what one process draws, whoever draws it."""

    @weft.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    net = seeded(Draws)
    alone, x = copy.deepcopy(net), on_device(torch.randn(ROWS, WIDTH))
    model = placed(net, {"b": 1}, verify="gradients")
    wanted = []
    for _ in range(2):
        alone.zero_grad()
        for part in x.chunk(MICROBATCHES):
            torch.manual_seed(7)
            loss = alone(part).square().mean()
            (loss / MICROBATCHES).backward()
            wanted.append(loss.detach())
    found = []
    for _ in range(2):
        model.zero_grad()
        found += step(model, x).outputs
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted))
    expected = gradients(alone.named_parameters())
    for name, value in gradients(model.local_named_parameters()).items():
        torch.testing.assert_close(value, expected[name])
