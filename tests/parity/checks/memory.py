"""What a rank holds: activations and received tensors of the microbatches in flight, none of those done."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.training import squares, step_of
from weft.runtime.microbatch import present
from weft.torch.activation_checkpointing import set_activation_checkpointing
from weft.torch.offload import activations, states
from weft.torch.session import pipeline as pipelines
from weft.torch.session.current import session

from .harness import WIDTH, check, same_as_alone, seeded, start, vectors

MANY = 64
WIDE = 8


class Count:
    """How many objects of a kind live, and how many did at most."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0

    def add(self, kept: Any) -> None:
        """Counts `kept` until it is freed."""
        self.live += 1
        self.peak = max(self.peak, self.live)
        weakref.finalize(kept, self._drop)

    def _drop(self) -> None:
        self.live -= 1


class Token:
    """Lives as long as the graph that holds it."""


class Watched(torch.autograd.Function):
    """The identity, with a token among what it keeps for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Count) -> Tensor:
        ctx.token = Token()
        count.add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Part(nn.Module):
    """A layer that counts its graphs and the tensors that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)
        self.graphs = Count()
        self.inputs = Count()

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.add(x)
        return Watched.apply(self.linear(x).tanh(), self.graphs)


train = step_of(squares)


@weft.step
def run(model: nn.Module, x: Tensor) -> Tensor:
    """One step without a backward pass, which records a graph all the same."""
    return model(x).square().mean()


@weft.step
def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    """One step of evaluation."""
    with torch.no_grad():
        return model(x).square().mean()


def peaks(step: Any, partitions: list[int], **settings: Any) -> list[tuple[int, int]]:
    """Most graphs and inputs at once in a second step, for each part of this rank; all are freed after it."""
    start(MANY, auto_partition=False, default_partition=0, **settings)
    net = seeded(models.Chain, 4, Part)
    model = weft.DistributedModel(net)
    for part, partition in zip(net.blocks, partitions, strict=True):
        weft.set_partition(part, partition)
    x = torch.ones(MANY, WIDE)
    step(model, x)
    gc.collect()
    mine = [p for p, partition in zip(net.blocks, partitions, strict=True) if partition == weft.pp_rank()]
    for part in mine:
        for count in (part.graphs, part.inputs):
            # What the first step tries beforehand may be freed once the count is as it was before.
            assert count.live <= 0, f"{count.live} still held after the step"
            count.live = count.peak = 0
    gc.disable()
    try:
        step(model, x)
    finally:
        gc.enable()
    for part in mine:
        assert part.graphs.live == 0, f"{part.graphs.live} graphs still held after the step, without gc"
    return [(part.graphs.peak, part.inputs.peak) for part in mine]


@check
def sixty_four_microbatches_hold_only_the_active_ones() -> None:
    for active in (2, 3, 4):
        for partitions in ([0, 0, 1, 1], [0, 1, 0, 1]):
            found = peaks(train, partitions, active_microbatches=active)
            assert found and all(graphs <= active for graphs, _ in found), (
                f"{active} active: {found} graphs, inputs"
            )
            assert all(inputs <= active for _, inputs in found), f"{active} active: {found} graphs, inputs"


@check
def default_number_of_active_microbatches() -> None:
    found = peaks(train, [0, 0, 1, 1])
    assert all(max(counts) <= 2 + 2 for counts in found), f"partitions + 2 active: {found} graphs, inputs"


@check
def evaluation_holds_nothing_of_microbatches_that_are_done() -> None:
    found = peaks(evaluate, [0, 0, 1, 1], active_microbatches=3)
    assert all(max(counts) <= 3 for counts in found), f"3 active: {found} graphs, inputs"


@check
def graphs_that_no_backward_pass_follows_are_freed() -> None:
    found = peaks(run, [0, 0, 1, 1], active_microbatches=3)
    assert all(max(counts) <= 3 for counts in found), f"3 active: {found} graphs, inputs"


@check
def simple_schedule_holds_many() -> None:
    """Forwards come first, so that the graphs of many microbatches live at once: counting works."""
    found = peaks(train, [0, 0, 1, 1], pipeline="gpipe")
    assert all(graphs > MANY // 4 for graphs, _ in found), found


@check
def offloaded_activations_come_back() -> None:
    """Units, checkpoints that are spread over partitions and inside of a unit, weight gradients that come later: what
    they keep goes out while a microbatch waits, and gradients are those of one process."""
    out: list[tuple[int, int]] = []
    real_init, real_least = activations._Storage.__init__, activations.LEAST_BYTES

    def noted(self: Any, *args: Any) -> None:
        microbatch = present()
        assert microbatch is not None
        out.append((microbatch.stage, microbatch.index))
        real_init(self, *args)

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    places = {"0.0": 0, "0.1": 1, "1": 0, "2": 1}
    activations._Storage.__init__, activations.LEAST_BYTES = noted, 1  # type: ignore[method-assign]
    try:
        for checkpoints, pipeline in ((True, "1f1b"), (False, "1f1b"), (False, "gpipe"), (False, "zb_h1")):
            net = seeded(lambda: nn.Sequential(nn.Sequential(layer(), layer()), layer(), layer()))
            for module in (net[0], net[2]) if checkpoints else ():
                set_activation_checkpointing(module, strategy="contiguous")
            out.clear()
            same_as_alone(
                net, vectors(), places=places, offload_activations=True, pipeline=pipeline, verify="off"
            )
            rank = session().position("pp")
            assert out or (rank == 1 and pipeline != "gpipe"), "the last rank goes back at once there"
    finally:
        activations._Storage.__init__, activations.LEAST_BYTES = real_init, real_least  # type: ignore[method-assign]
        start(offload_activations=False, verify="losses")


@check
def offloaded_states_are_those_of_one_process() -> None:
    """AdamW over two partitions, its states outside: the weights after some steps, and a state that is loaded."""
    real = states.BUCKET_BYTES, states.LEAST_BYTES
    states.BUCKET_BYTES, states.LEAST_BYTES = 300, 16
    found = []
    try:
        for offload in (False, True):
            start(2, offload={"optimizer": offload})
            net = seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
            model = weft.DistributedModel(net)
            optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
            for number in range(4):
                optimizer.zero_grad()
                train(model, torch.full((2, WIDTH), 1.0 + number))
                optimizer.step()
                if number == 1:
                    whole = optimizer.state_dict()
                    optimizer.load_state_dict(whole)
            assert (optimizer.offloaded is not None) is offload
            found.append((model.state_dict(), optimizer.state_dict()["state"]))
    finally:
        states.BUCKET_BYTES, states.LEAST_BYTES = real
        start(offload_optimizer=False)
    torch.testing.assert_close(*found, rtol=0, atol=0)


@check
def calls_of_old_shapes_are_forgotten_and_nothing_else_changes() -> Any:
    """Every step has a new shape; a job that forgets after each few gives the losses of one that forgets nothing."""

    def losses() -> list[float]:
        start(2)
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Dropout(0.2)) for _ in range(6))
        )
        model = weft.DistributedModel(net)
        return [float(train(model, torch.ones(2, 2 + step % 20, WIDE)).reduce_mean()) for step in range(45)]

    expected, before = losses(), pipelines.MOST_CALLS
    pipeline = session().pipeline
    assert pipeline is not None
    generation = pipeline.generation
    try:
        pipelines.MOST_CALLS = 60
        found = losses()
    finally:
        pipelines.MOST_CALLS = before
    assert found == expected
    assert pipeline.generation >= generation + 4, (generation, pipeline.generation)
    held = len(pipeline.specs), len(pipeline.announced), len(pipeline.channel.mailbox._messages)
    assert max(held) <= 120, held
    return found
