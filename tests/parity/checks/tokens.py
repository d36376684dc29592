"""Batches cut by tokens: microbatches of rows of like length, without their padding, train as the padded batch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests.models import TOKENS, WIDTH, Reader
from tests.padded import batch_of, reading_loss
from tests.training import step_of

from ..compare import on_device
from .harness import check, seeded, start
from .inputs import refused

LENGTHS = ([3, 9, 12, 5, 4, 6, 2, 11, 7, 30], [20, 1, 30, 30, 8, 17, 9, 2, 3, 30], [5] * 9, [4, 9])


def batch(lengths: list[int], longest: int = 40) -> dict[str, Tensor]:
    return on_device(batch_of(lengths, longest))


def trains_as_the_padded_batch(
    make: Callable[[], nn.Module], loss_of: Callable[..., Tensor], tolerance: float = 1e-10, **settings: Any
) -> None:
    """Losses and gradients of several batches."""
    net = seeded(make).double()
    alone = copy.deepcopy(net)
    start(**settings)
    model = weft.DistributedModel(net)
    shapes: list[torch.Size] = []

    def noted(model: Any, batch: dict[str, Tensor]) -> Tensor:
        shapes.append(batch["words"].shape)
        return loss_of(model, batch)

    step = step_of(noted, tokens="mask")
    for lengths in LENGTHS:
        given = batch(lengths)
        loss, expected = step(model, given).reduce_mean(), loss_of(alone, given)
        expected.backward()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=tolerance, atol=0.0)
        for name, parameter in model.local_named_parameters():
            grad = alone.get_parameter(name.removeprefix("module.")).grad
            torch.testing.assert_close(parameter.grad, grad, rtol=tolerance, atol=tolerance)
        for parameter in (*model.local_parameters(), *alone.parameters()):
            parameter.grad = None
    assert all(length < 40 for _, length in shapes[-2:])


@check
def rows_of_like_length() -> None:
    for pipeline in ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zbv", "auto"):
        trains_as_the_padded_batch(Reader, reading_loss, pipeline=pipeline)


def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["words"], attention_mask=batch["mask"], labels=batch["labels"]).loss


SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, **DROPOUT))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


@check
def rows_of_like_length_for_bert() -> None:
    trains_as_the_padded_batch(bert, own_loss)


@check
def rows_of_like_length_for_a_llama() -> None:
    trains_as_the_padded_batch(llama, own_loss, 1e-5)  # its loss is in single precision


@check
def a_mask_that_a_model_does_not_get() -> str:
    start()
    model = weft.DistributedModel(seeded(bert))

    def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(input_ids=batch["words"], labels=batch["labels"]).loss

    return refused(
        step_of(loss_of, tokens="mask"),
        model,
        batch(LENGTHS[0]),
        words=["so that padding counts", "Give the model"],
    )


@check
def inputs_of_the_first_rank_cannot_be_cut_by_tokens() -> str:
    start(inputs="first")
    model = weft.DistributedModel(seeded(Reader))
    return refused(step_of(reading_loss, tokens="mask"), model, batch(LENGTHS[0]), words=["needs the mask"])


@check
def rows_come_back_in_their_order() -> list[float]:
    net = seeded(Reader)
    alone = copy.deepcopy(net)
    start()
    model = weft.DistributedModel(net)

    @weft.step(tokens=lambda model, batch: batch["words"] != 0)
    def step(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scores = model(batch["words"], batch["mask"])
        model.backward(F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten()))
        return scores, scores[:, 0]

    given = batch(LENGTHS[0])
    scores, first = step(model, given)
    expected, mask = alone(given["words"], given["mask"]).detach(), given["mask"][..., None]
    torch.testing.assert_close(scores.concat() * mask, expected * mask, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first.concat(), expected[:, 0], rtol=1e-5, atol=1e-6)
    return [float(scores.concat().sum())]


@check
def a_step_that_comes_after_the_split_is_cut_by_rows() -> None:
    start()
    model = weft.DistributedModel(seeded(Reader))
    step_of(reading_loss, tokens="mask")(model, batch(LENGTHS[0]))
    shapes: list[torch.Size] = []

    @weft.step(tokens="mask")
    def evaluate(model: Any, batch: dict[str, Tensor]) -> Tensor:
        shapes.append(batch["words"].shape)
        return reading_loss(model, batch)

    with torch.no_grad():
        evaluate(model, batch(LENGTHS[0]))
    assert all(length == 40 for _, length in shapes), shapes
