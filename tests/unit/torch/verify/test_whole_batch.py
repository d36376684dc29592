"""Which rows a loss joins, and whether a step of the script's own is told that its loss depends on the microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from weft.session.cut import Joined
from weft.torch.session import current
from weft.torch.tensors.mini_batch import prepare
from weft.torch.verify.whole_batch import judge

ROWS, WIDTH = 12, 6


@pytest.fixture
def model():
    weft.init({"microbatches": 3})
    torch.manual_seed(0)
    yield weft.DistributedModel(
        nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(), nn.Linear(8, 3))
    )
    weft.shutdown()


def halves(out: Tensor, *others: Tensor) -> Tensor:
    return -F.logsigmoid(torch.sub(*out[:, 0].chunk(2))).mean()


LOSSES: dict[str, tuple[Callable[..., Tensor], Joined]] = {
    "mean": (lambda out, x, y: F.mse_loss(out, x[:, :3]), Joined()),
    "classes": (lambda out, x, y: F.cross_entropy(out, y), Joined()),
    "halves": (halves, Joined(blocks=2)),
    "halves, like their reference": (lambda out, x, y: halves(out - out.detach()), Joined(blocks=2)),
    "thirds": (
        lambda out, x, y: F.triplet_margin_loss(*out.chunk(3), margin=5.0) + 0.1 * out.square().mean(),
        Joined(blocks=3),
    ),
    "neighbours": (lambda out, x, y: (out[::2] * out[1::2]).square().mean(), Joined(rows=2)),
    "groups of four": (lambda out, x, y: out.view(-1, 4, 3).std(1).mean(), Joined(rows=4)),
    "all rows": (lambda out, x, y: F.cross_entropy(out @ out.T, torch.arange(len(out))), Joined(rows=0)),
    "a mean that is cut off": (lambda out, x, y: (out.mean() * 100).clamp(min=20) + out.mean(), Joined(rows=0)),
}  # fmt: skip


def step_of(loss_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model(x), x, y)
        model.backward(loss)
        return loss.detach()

    return step


def given() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, WIDTH, generator=numbers), torch.randint(3, (ROWS,), generator=numbers)


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_that_a_loss_joins_are_found(loss: str, model):
    function, expected = LOSSES[loss]
    step, session = step_of(function), current.session()
    batch = prepare(step, (model, *given()), {}, weft.step(step).cut, 4)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    states = torch.get_rng_state()
    found = judge(session, [model], step, loss, batch, None, adapts=True, blocks=True)
    assert found.joined == expected, found
    assert bool(found.text) == (expected != Joined())
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
    assert torch.equal(states, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    assert model.module.training and model.module[3].training


def test_a_cut_that_is_right_by_the_size_of_the_batch_is_kept_for_others(model):
    """Three microbatches of four rows part no pairs; those of another batch would."""
    step = step_of(LOSSES["neighbours"][0])
    batch = prepare(step, (model, *given()), {}, weft.step(step).cut, 3)
    found = judge(current.session(), [model], step, "pairs", batch, None, adapts=True, blocks=True)
    assert found.joined == Joined(rows=2) and not found.text


@pytest.mark.parametrize(
    "loss, warned",
    {"mean": False, "classes": False, "halves": True, "all rows": True, "groups of four": False}.items(),
)
def test_a_step_of_the_scripts_own_is_told(loss: str, warned: bool, model, caplog: pytest.LogCaptureFixture):
    train = weft.step(step_of(LOSSES[loss][0]))
    train(model, *given())
    told = [each.getMessage() for each in caplog.records if "rows in one piece" in each.getMessage()]
    assert bool(told) == warned
    if warned:
        numbers = [float(word) for word in told[0].split(". So")[0].split() if word[0].isdigit()]
        assert len(numbers) == 2 and '"microbatches": 1' in told[0]
    train(model, *given())  # once
    assert len(told) == len([each for each in caplog.records if "rows in one piece" in each.getMessage()])


def test_what_weights_count_is_counted_once_for_each_microbatch(model):
    seen: list[int] = []

    def weight(model: Any, x: Tensor, y: Tensor) -> int:
        seen.append(len(x))
        return len(x)

    weft.step(step_of(LOSSES["mean"][0]), weight=weight)(model, *given())
    assert seen == [4, 4, 4]


@pytest.mark.parametrize("counted", [True, False])
def test_what_a_step_says_that_microbatches_weigh_counts(
    counted: bool, model, caplog: pytest.LogCaptureFixture
):
    """A mean over tokens is that of the whole batch where tokens are counted."""

    def step(model: Any, x: Tensor, y: Tensor) -> None:
        model.backward(F.cross_entropy(model(x), y, ignore_index=0))

    y = torch.ones(ROWS, dtype=torch.long)
    y[:3] = 0
    train = weft.step(step, weight=(lambda model, x, y: (y != 0).sum()) if counted else None)
    train(model, given()[0], y)
    told = [each for each in caplog.records if "rows in one piece" in each.getMessage()]
    assert bool(told) != counted


def test_random_numbers_cannot_be_compared(model, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "weft")
    step = step_of(lambda out, x, y: (out + torch.randn_like(out)).square().mean())
    batch = prepare(step, (model, *given()), {}, weft.step(step).cut, 4)
    for adapts in (False, True):
        found = judge(current.session(), [model], step, "noise", batch, None, adapts, False)
        assert found.joined == Joined() and found.warns == adapts
    assert "draws random numbers" in found.text


def test_several_rows_of_one_call_may_belong_to_a_row_of_the_batch(model):
    """Two columns in one call, one after the other."""

    def step(model: Any, x: Tensor, y: Tensor) -> None:
        one, other = model(torch.cat([x, x.flip(1)])).chunk(2)
        model.backward((one * other.roll(1, 1)).square().mean())

    batch = prepare(step, (model, *given()), {}, weft.step(step).cut, 4)
    found = judge(current.session(), [model], step, "columns", batch, None, adapts=True, blocks=True)
    assert found.joined == Joined() and not found.text
