"""Steps cut by tokens: their gradients are those of the padded batch, and where padding counts they are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests.models import Composed, Reader
from tests.padded import IGNORED, batch_of, reading_loss
from tests.training import step_of
from weft.errors import UsageError

LENGTHS = [3, 9, 12, 5, 4, 6, 2, 11, 7]


def scores_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["words"], batch["mask"])


def next_word(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Shifted as libraries do it: the first label of a row is none."""
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    return F.cross_entropy(scores_of(model, batch).flatten(0, 1), labels.flatten())


def labels_of_its_own(model: Any, batch: dict[str, Tensor]) -> Tensor:
    words = batch["words"].masked_fill(batch["mask"] == 0, -1)
    return F.cross_entropy(scores_of(model, batch).flatten(0, 1), words.flatten(), ignore_index=-1)


def one_of_a_row(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(scores_of(model, batch)[:, 0], batch["kind"])


def two_losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return reading_loss(model, batch) + 0.1 * labels_of_its_own(model, batch)


def first_label(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(scores_of(model, batch)[:, 0], batch["labels"][:, 0])


def own_mean(model: Any, batch: dict[str, Tensor]) -> Tensor:
    each = F.cross_entropy(scores_of(model, batch).flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return each.sum() / batch["mask"].sum()


def begin(init: Callable[..., None], net: nn.Module | None = None, **settings: Any) -> tuple[Any, nn.Module]:
    init(microbatches=3, **settings)
    torch.manual_seed(0)
    net = (net or Reader()).double()
    return weft.DistributedModel(net), copy.deepcopy(net)


def gradients_agree(step: Any, model: Any, alone: nn.Module, loss_of: Any, batch: dict[str, Tensor]) -> None:
    for parameter in (*model.parameters(), *alone.parameters()):
        parameter.grad = None
    loss = step(model, batch)
    expected = loss_of(alone, batch)
    expected.backward()
    torch.testing.assert_close(loss.reduce_mean(), expected.detach(), rtol=1e-10, atol=1e-12)
    for (name, own), (_, one) in zip(model.module.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(
            own.grad, one.grad, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("loss_of", [reading_loss, next_word, labels_of_its_own, one_of_a_row, two_losses])
def test_the_weight_follows(loss_of: Any, init):
    model, alone = begin(init)
    seen: list[torch.Size] = []

    def noted(model: Any, batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch["words"].shape)
        return loss_of(model, batch)

    step = step_of(noted, tokens="mask")
    for longest in (12, 40, 13, 12):
        gradients_agree(step, model, alone, loss_of, batch_of(LENGTHS, longest))
    assert all(shape[1] < 40 and shape[0] > 0 for shape in seen[-12:]) and len({*seen[-3:]}) > 1
    gradients_agree(step, model, alone, loss_of, batch_of([12] * 4))
    gradients_agree(step, model, alone, loss_of, batch_of([4, 7]))


def test_other_labels_are_left_out_later(init):
    model, alone = begin(init)
    step = step_of(one_of_a_row, tokens="mask")
    gradients_agree(step, model, alone, one_of_a_row, batch_of(LENGTHS))
    batch = batch_of(LENGTHS)
    batch["kind"][::2] = IGNORED
    gradients_agree(step, model, alone, one_of_a_row, batch)


def test_padding_on_the_left(init):
    model, alone = begin(init)
    step = step_of(reading_loss, tokens="mask")
    gradients_agree(step, model, alone, reading_loss, batch_of(LENGTHS, 40, left=True))


def test_the_script_may_say_the_weight(init):
    model, alone = begin(init)
    step = step_of(own_mean, tokens="mask", weight=lambda model, batch: batch["mask"].sum())
    gradients_agree(step, model, alone, own_mean, batch_of(LENGTHS))


def test_rows_come_back_in_order(init):
    model, alone = begin(init)

    @weft.step(tokens="mask")
    def step(model: Any, batch: dict[str, Tensor]) -> Any:
        scores = scores_of(model, batch)
        loss = F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())
        model.backward(loss)
        return {"loss": loss, "scores": scores, "first": scores[:, 0], "words": batch["words"]}

    batch = batch_of(LENGTHS, 20)
    out, expected = step(model, batch), scores_of(alone, batch).detach()
    scores, mask = out["scores"].concat(), batch["mask"][..., None]
    torch.testing.assert_close(scores * mask, expected * mask)
    assert scores[:, 12:].eq(0).all()
    torch.testing.assert_close(out["first"].detach().concat(), expected[:, 0])
    assert torch.equal(out["words"].concat(), batch["words"]) and out["loss"].concat().shape == (3,)


def without_mask(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["words"]).flatten(0, 1), batch["labels"].flatten())


def nearly_without_mask(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Nearly all that a new model gives is the same for all words."""
    return F.cross_entropy(1e-9 * model(batch["words"]).flatten(0, 1), batch["labels"].flatten())


def over_padding(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(scores_of(model, batch).flatten(0, 1), batch["words"].flatten())


def joined(model: Any, batch: dict[str, Tensor]) -> Tensor:
    pooled = (scores_of(model, batch) * batch["mask"][..., None]).sum(1)
    return reading_loss(model, batch) + (pooled @ pooled.T).logsumexp(1).mean()


def of_the_length(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return reading_loss(model, batch) + batch["table"].view(-1, 12).sum() * scores_of(model, batch).mean()


@pytest.mark.parametrize(
    ("loss_of", "text"),
    [
        (
            without_mask,
            "for 3 rows without padding its loss is .* instead of .*, so that padding counts, or rows depend.* Give",
        ),
        (nearly_without_mask, "without padding the gradient of .* is another one, so that padding counts"),
        (over_padding, "so that padding counts"),
        (joined, "so that padding counts, or rows depend on each other"),
        (first_label, r"\(3, 1, 2 in 3 rows with padding.*weight=\.\.\."),
        (own_mean, r"\(none, none, none in 3 rows with padding.*weight=\.\.\."),
        (of_the_length, r"cut off batch\['words'\] along 1,.*, it fails with RuntimeError"),
    ],
)
def test_what_would_be_another_loss_is_refused(loss_of: Any, text: str, init):
    model, _ = begin(init)
    before = copy.deepcopy(model.module.state_dict())
    batch = batch_of(LENGTHS) | ({"table": torch.ones(9, 12)} if loss_of is of_the_length else {})
    with pytest.raises(UsageError, match=f"cannot be cut by tokens: .*{text}"):
        step_of(loss_of, tokens="mask")(model, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_each_model_is_compared(init):
    model, _ = begin(init)
    step = step_of(reading_loss, tokens="mask")
    step(model, batch_of(LENGTHS))
    blind = weft.DistributedModel(Composed(lambda parts, words, mask: parts.net(words), net=Reader()))
    with pytest.raises(UsageError, match="cannot be cut by tokens"):
        step(blind, batch_of(LENGTHS))


def test_losses_that_part_later_are_refused(init):
    model, _ = begin(init)

    def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
        scores = scores_of(model, batch).flatten(0, 1)
        return sum(F.cross_entropy(scores, batch[name].flatten()) for name in ("labels", "more"))  # type: ignore[return-value]

    step, batch = step_of(loss_of, tokens="mask"), batch_of(LENGTHS)
    step(model, batch | {"more": batch["labels"].clamp(max=7)})
    with pytest.raises(UsageError, match="means over different numbers of targets"):
        step(model, batch | {"more": batch["labels"].masked_fill(batch["labels"] < 9, IGNORED)})


def test_batch_norm_is_refused(init):
    model, _ = begin(init, nn.Sequential(Reader(), nn.BatchNorm1d(4)))
    with pytest.raises(UsageError, match="1 is a BatchNorm, whose statistics have padding in them"):
        step_of(reading_loss, tokens="mask")(model, batch_of(LENGTHS))


@pytest.mark.parametrize("settings", [{"microbatches": "auto"}])
def test_settings_that_do_not_go_together_with_it(settings: dict[str, Any], init):
    init(**settings)
    model = weft.DistributedModel(Reader())
    with pytest.raises(UsageError, match='does not go together with "microbatches": "auto"'):
        step_of(reading_loss, tokens="mask")(model, batch_of(LENGTHS))


def test_dims_to_cut_are_refused():
    with pytest.raises(UsageError, match="leave tokens= or input_split_axes= out"):
        weft.step(tokens="mask", input_split_axes={"batch": 1})


def test_without_the_comparison_the_weight_must_be_given(init):
    model, alone = begin(init, verify="off")
    with pytest.raises(UsageError, match='"verify": "off" leaves out: say what the loss is a mean over'):
        step_of(reading_loss, tokens="mask")(model, batch_of(LENGTHS))
    step = step_of(reading_loss, tokens="mask", weight=lambda model, batch: batch["mask"].sum())
    gradients_agree(step, model, alone, reading_loss, batch_of(LENGTHS))


def drawing(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.dropout(reading_loss(model, batch), 0.5)


@pytest.mark.parametrize(
    ("loss_of", "lengths", "text"),
    [
        (reading_loss, [12] * 9, "no row of its first batch is padded"),
        (drawing, LENGTHS, "it draws random numbers"),
        (scores_of, LENGTHS, "it has no backward pass"),
    ],
)
def test_what_cannot_be_compared_is_cut_by_rows(loss_of: Any, lengths: list[int], text: str, init, caplog):
    model, _ = begin(init)
    seen: list[torch.Size] = []

    @weft.step(tokens="mask")
    def step(model: Any, batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch["words"].shape)
        out = loss_of(model, batch)
        if loss_of is not scores_of:
            model.backward(out)
        return out

    step(model, batch_of(lengths))
    assert seen[-3:] == [(3, 12)] * 3 and "is cut by rows, not by tokens, because" in caplog.text
    assert text in caplog.text and "Microbatches weigh by their rows" in caplog.text
    step(model, batch_of(LENGTHS))
    assert seen[-3:] == [(3, 12)] * 3
