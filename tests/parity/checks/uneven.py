"""Microbatches that are not equal: less samples than microbatches, evaluation, losses that are means over tokens."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.training import step_of
from weft.errors import UsageError

from ..compare import Record, gradients, on_device
from .changes import descend
from .harness import MICROBATCHES, WIDTH, assert_same, check, seeded, start, vectors
from .inputs import chain, plain, refused, uneven
from .modules import normalised
from .training import evaluate

ROWS, LENGTH, CLASSES = 8, 6, WIDTH


@check
def fewer_rows_than_microbatches() -> None:
    for pipeline in ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zbv", "auto"):
        model, alone = chain(pipeline=pipeline)
        for rows in (3, 8, 1, 2, 3):
            batch = vectors(rows=rows)[0]
            loss = uneven(model, batch["x"], batch["y"])
            expected = F.mse_loss(alone(batch["x"]), batch["y"])
            expected.backward()
            torch.testing.assert_close(loss.reduce_mean(), expected.detach(), rtol=1e-5, atol=0.0)
            mine = Record(gradients=[gradients(model.local_named_parameters())])
            assert_same(mine, Record(gradients=[gradients(alone.named_parameters())]))
            descend(model.local_parameters())
            descend(alone.parameters())


@check
def fewer_rows_in_the_first_step() -> None:
    model, alone = chain()
    for rows in (1, 2, 10):
        batch = vectors(rows=rows)[0]
        loss = uneven(model, batch["x"], batch["y"])
        torch.testing.assert_close(
            loss.reduce_mean(), F.mse_loss(alone(batch["x"]), batch["y"]).detach(), rtol=1e-5, atol=0.0
        )


@check
def evaluation_of_any_number_of_rows() -> None:
    net = seeded(normalised).eval()
    alone = copy.deepcopy(net)
    start()
    model = weft.DistributedModel(net)
    for step in (evaluate, plain):
        for rows in (7, 1, 8, 3, 10):
            x = vectors(rows=rows)[0]["x"]
            out = step(model, x).concat()
            torch.testing.assert_close(out.detach(), alone(x).detach(), rtol=1e-5, atol=1e-6)


@check
def training_on_rows_that_do_not_divide_is_refused() -> list[str]:
    told = []

    @weft.step
    def by_model(model: Any, x: Tensor) -> None:
        model.backward(model(x).mean())

    @weft.step
    def by_loss(model: Any, x: Tensor) -> None:
        model(x).mean().backward()

    @weft.step
    def by_autograd(model: Any, x: Tensor) -> None:
        torch.autograd.backward([model(x).mean()])

    for step in (by_model, by_loss, by_autograd):
        model, _ = chain()
        for rows in (10, 3):
            told.append(
                refused(
                    step, model, torch.zeros(rows, WIDTH), words=[str(rows), str(MICROBATCHES), "drop_last"]
                )
            )
        step(model, torch.zeros(ROWS, WIDTH))
        told.append(refused(step, model, torch.zeros(9, WIDTH), words=["9", "drop_last"]))
        step(model, torch.zeros(ROWS, WIDTH))
    return [text[-60:] for text in told]


@check
def evaluation_by_a_training_step_without_its_backward_pass() -> None:
    @weft.step
    def step(model: Any, x: Tensor, train: bool) -> Tensor:
        out = model(x)
        if train:
            model.backward(out.mean())
        return out

    model, alone = chain()
    for rows in (7, 2):
        x = vectors(rows=rows)[0]["x"]
        torch.testing.assert_close(step(model, x, False).concat(), alone(x).detach(), rtol=1e-5, atol=1e-6)


@check
def empty_batches_are_refused() -> str:
    model, _ = chain()
    return refused(uneven, model, torch.zeros(0, WIDTH), torch.zeros(0, WIDTH), words=["no samples"])


# --- means over tokens --------------------------------------------------------------------------------------


def padded(numbers: torch.Generator, ignored: int = -100) -> dict[str, Tensor]:
    """Rows of other lengths."""
    labels = torch.randint(CLASSES, (ROWS, LENGTH), generator=numbers)
    for row, length in enumerate((6, 5, 1, 2, 0, 3, 4, 4)):
        labels[row, length:] = ignored
    return on_device({"x": torch.randn(ROWS, LENGTH, WIDTH, generator=numbers), "labels": labels})


def token_loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), labels.flatten())


def count(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def whole(loss_of: Callable[..., Tensor], weight: Callable[..., Any], seed: int = 0, **settings: Any) -> None:
    """Split and weighed by tokens: the gradients of the whole batch at once."""
    net = seeded(models.Chain)
    alone = copy.deepcopy(net)
    start(**settings)
    model = weft.DistributedModel(net)
    step = step_of(loss_of, weight=weight, allow_uneven=True)
    mine, first = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
    for rows in (8, 7, 3):
        batch = {name: value[:rows] for name, value in padded(mine).items()}
        other = {name: value[:rows] for name, value in padded(first).items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = step(model, **batch)
        expected = loss_of(alone, **other)
        expected.backward()
        torch.testing.assert_close(loss.reduce_mean(), expected.detach(), rtol=1e-5, atol=0.0)
        grads = Record(gradients=[gradients(model.local_named_parameters())])
        assert_same(grads, Record(gradients=[gradients(alone.named_parameters())]))
        descend(model.local_parameters())
        descend(alone.parameters())


@check
def microbatches_weigh_by_their_tokens() -> None:
    whole(token_loss, count)


@check
def microbatches_weigh_by_what_a_mask_counts() -> None:
    def loss_of(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        mask = (labels > 3).float()
        return (model(x).mean(-1).square() * mask).sum() / mask.sum().clamp(min=1)

    whole(loss_of, lambda model, x, labels: float((labels > 3).sum()))


@check
def the_first_ranks_tokens_count() -> None:
    whole(token_loss, count, weft.rank(), inputs="any")


@check
def microbatches_without_tokens_count_nothing() -> None:
    def loss_of(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        chosen = x[labels[:, 0] > 100] if not (labels >= 0).any() else x[(labels >= 0).any(1)]
        return model(chosen).square().mean() if len(chosen) else model(x).sum() * 0

    whole(loss_of, lambda model, x, labels: (labels >= 0).any(1).sum())


@check
def weights_that_are_none_are_refused() -> list[str]:
    told = []
    for weight, options, word in (
        (lambda model, x, y: -1, {}, "must count something"),
        (lambda model, x, y: float("nan"), {}, "must count something"),
        (lambda model, x, y: 1, {"average_grads_across_microbatches": False}, "leave one of the two out"),
    ):
        start()
        model = weft.DistributedModel(seeded(models.Chain), **options)
        step = weft.step(weight=weight)(lambda model, x, y: model.backward(F.mse_loss(model(x), y)))
        try:
            step(model, **vectors()[0])
        except UsageError as error:
            assert word in str(error), error
            told.append(str(error))
        else:
            raise AssertionError("no error")
    return told


@check
def padding_that_matters_is_told_once() -> None:
    class Inside(models.Chain):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    numbers = torch.Generator().manual_seed(0)
    uniform = {**padded(numbers), "labels": torch.randint(CLASSES, (ROWS, LENGTH), generator=numbers)}
    same = padded(numbers)
    same["labels"][:, :] = 3
    same["labels"][:, 4:] = -100
    one = padded(numbers)
    cases: list[tuple[Any, Any, Any, bool]] = [
        (models.Chain, token_loss, one, True),
        (Inside, lambda model, x, labels: model(x, labels), one, True),
        (models.Chain, lambda m, x, labels: F.cross_entropy(m(x).flatten(0, 1), labels.flatten(), ignore_index=5),
         {**one, "labels": one["labels"].clamp(min=5)}, True),
        (models.Chain, lambda m, x, labels: nn.NLLLoss()(m(x).flatten(0, 1).log_softmax(-1), labels.flatten()),
         one, True),
        (models.Chain, token_loss, uniform, False),
        (models.Chain, token_loss, same, False),
        (models.Chain, lambda m, x, labels: F.cross_entropy(m(x).flatten(0, 1), labels.flatten(), reduction="sum"),
         one, False),
    ]  # fmt: skip
    for build, loss_of, batch, expected in cases:
        start()
        model = weft.DistributedModel(seeded(build))

        def body(model: Any, x: Tensor, labels: Tensor, loss_of: Any = loss_of) -> None:
            model.backward(loss_of(model, x, labels))

        step = weft.step(body)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                step(model, batch["x"], batch["labels"])
        found = [str(each.message) for each in caught if "weight=" in str(each.message)]
        assert len(found) == int(expected and weft.rank() == 0), (found, expected)
        assert all("in labels" in text for text in found), found
