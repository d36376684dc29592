"""Losses of language models in chunks of rows, as in one process; started by `test_chunked_loss.py`.

chunked_loss.py --partitions 2 check...
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.parity.registry import Checks
from weft.torch.execution import chunked_loss
from weft.torch.tensors import deferred_linear, deferred_logits
from weft.torch.tensors.deferred_logits import Deferred

CHECKS = Checks()
WORDS, WIDTH, LENGTH, STEPS = 300, 16, 12, 3
Loss = Callable[[nn.Module, Tensor], tuple[Tensor, Any]]


class Net(models.Words):
    """Words in, logits out; with labels their loss, too, as Hugging Face's models have it."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(WORDS, WIDTH, [models.Block(WIDTH) for _ in range(4)], tied)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        return logits if labels is None else (shifted(logits.double(), labels), logits)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].contiguous().view(-1, WORDS), labels[:, 1:].reshape(-1))


def in_the_model(model: nn.Module, ids: Tensor) -> tuple[Tensor, Any]:
    return model(ids, ids)[0], None


def in_the_step(model: nn.Module, ids: Tensor) -> tuple[Tensor, Any]:
    return shifted(torch.tanh(model(ids) / 3.0) * 3.0, ids), None


def of_each_token(model: nn.Module, ids: Tensor) -> tuple[Tensor, Any]:
    losses = F.cross_entropy(model(ids).view(-1, WORDS), ids.view(-1), reduction="none")
    return (losses * torch.linspace(0, 1, LENGTH, dtype=torch.float64).repeat(len(ids))).mean(), None


def with_accuracy(model: nn.Module, ids: Tensor) -> tuple[Tensor, Any]:
    loss, logits = model(ids, ids)
    return loss, (logits.argmax(-1) == ids).float().mean()


def with_logits(model: nn.Module, ids: Tensor) -> tuple[Tensor, Any]:
    return model(ids, ids)


LOSSES: dict[str, Loss] = {
    each.__name__: each for each in (in_the_model, in_the_step, of_each_token, with_accuracy, with_logits)
}


def batches() -> list[Tensor]:
    return [
        torch.randint(0, WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(n)) for n in range(STEPS)
    ]


def train(net: nn.Module, loss_of: Loss, **settings: Any) -> tuple[list[Any], nn.Module]:
    """The losses and extra results of a few steps, and the model."""
    weft.init(weft_settings(settings))
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2))

    @weft.step
    def train_step(model: nn.Module, ids: Tensor) -> Any:
        loss, extra = loss_of(model, ids)
        model.backward(loss)
        return (loss,) if extra is None else (loss, extra)

    found = []
    for ids in batches():
        optimizer.zero_grad()
        loss, *extra = train_step(model, ids)
        found.append([loss.reduce_mean(), *(each.stack() for each in extra)])
        optimizer.step()
    return found, model


def weft_settings(given: dict[str, Any]) -> dict[str, Any]:
    return {"partitions": CHECKS.given.partitions, "microbatches": 2, "verify": "gradients", **given}


def compare(loss_of: Loss, tied: bool = False, **settings: Any) -> int:
    """Train with chunks and without, and compare; how often a loss was computed in chunks on this rank."""
    torch.manual_seed(0)
    net = Net(tied).double()
    plain, model = train(copy.deepcopy(net), loss_of, chunked_loss="off", **settings)
    whole = model.state_dict()
    counted = 0
    taken = deferred_linear.FORWARD[torch.ops.aten.nll_loss_forward.default]

    def count(*given: Any) -> Any:
        nonlocal counted
        counted += 1
        return taken(*given)

    deferred_linear.FORWARD[torch.ops.aten.nll_loss_forward.default] = count
    try:
        found, model = train(net, loss_of, chunked_loss="on", **settings)
    finally:
        deferred_linear.FORWARD[torch.ops.aten.nll_loss_forward.default] = taken
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dict(model.state_dict()), dict(whole), rtol=1e-7, atol=1e-9)
    assert not any(type(each) is Deferred for row in found for each in row)
    return counted


def everywhere(counted: int) -> int:
    return sum(weft.allgather(counted))


@CHECKS.of_each(*LOSSES)
def steps_give_what_whole_logits_give(name: str) -> None:
    counted = everywhere(compare(LOSSES[name]))
    usual = name in ("in_the_model", "in_the_step", "of_each_token")
    assert counted == 2 * STEPS * (weft.size() // CHECKS.given.partitions) if usual else counted > 0


@CHECKS.check
def a_tied_head_gives_what_whole_logits_give() -> None:
    assert everywhere(compare(in_the_model, tied=True))


@CHECKS.check
def halves_of_the_backward_pass_give_what_whole_logits_give() -> None:
    if CHECKS.given.partitions > 1:
        assert everywhere(compare(in_the_model, pipeline="zb_h1"))


@CHECKS.check
def large_heads_are_chunked_by_themselves() -> None:
    before, chunked_loss.LEAST_BYTES = chunked_loss.LEAST_BYTES, 4 * WORDS * 8
    try:
        torch.manual_seed(0)
        _, model = train(Net(), in_the_model)
        calls = map(chunked_loss.interceptor_of, model.module.modules())
        assert everywhere(
            any(
                type(getattr(one, "inner", None)) is chunked_loss.Head or type(one) is chunked_loss.Head
                for one in calls
            )
        )
    finally:
        chunked_loss.LEAST_BYTES = before


if __name__ == "__main__":
    deferred_logits.CHUNK_BYTES, deferred_logits.LEAST_ROWS = 4 * WORDS * 8, 8
    CHECKS.run(sys.argv[1:], lambda: None)
