"""Masks: found by name or by a function, and every error's text; which dims are positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.padded import batch_of
from weft.errors import UsageError
from weft.session.cut import Cut, Tokens
from weft.torch.tensors.mini_batch import MiniBatch, prepare
from weft.torch.tensors.tokens import spans_of

BATCH = batch_of([3, 8, 1, 5, 2])


def step(batch: Any, other: Any = None) -> None:
    pass


def cut(tokens: Any = "mask", other: Any = None, microbatches: int = 2, **trimmed: Any) -> MiniBatch:
    return prepare(step, (BATCH, other), {}, Cut(tokens=Tokens(tokens, **trimmed)), microbatches)


def test_microbatches_have_their_rows_without_padding():
    batch = cut(other=[torch.arange(5), torch.zeros(5, 3, 8, 8)])
    seen = []
    for index in range(batch.microbatches):
        (words, others), _ = batch.slice(index)
        rows = list(batch.groups[index].rows)
        length = max(int(BATCH["mask"][row].sum()) for row in rows)
        expected = {
            name: whole[rows][:, :length] if whole.dim() > 1 else whole[rows] for name, whole in BATCH.items()
        }
        assert all(torch.equal(part, expected[name]) for name, part in words.items())
        assert words["words"].is_contiguous() and others[0].tolist() == rows
        assert others[1].shape == (len(rows), 3, length, length)
        seen += rows
    assert sorted(seen) == list(range(5)) and batch.samples(0) + batch.samples(1) == 5
    assert batch.costliest == max((0, 1), key=lambda index: batch.groups[index].cost)


@pytest.mark.parametrize(("front", "back"), [(True, False), (False, True), (False, False)])
def test_only_padding_of_compared_sides_is_cut_off(front: bool, back: bool):
    for left in (True, False):
        tokens = Tokens("mask", sides=(front, back))
        batch = prepare(step, (batch_of([3, 8, 1, 5, 2], left=left),), {}, Cut(tokens=tokens), 2)
        assert all(one.start == 0 for one in batch.groups) or front
        assert all(one.stop == 8 for one in batch.groups) or back
        cut_off = any(one.stop - one.start < 8 for one in batch.groups)
        assert cut_off == (front if left else back)


def test_inputs_that_need_gradients_get_them():
    x = torch.randn(5, 8, requires_grad=True)
    batch = cut(other=x)
    sum(batch.slice(index)[0][1].sum() for index in range(2)).backward()
    assert x.grad is not None and x.grad[BATCH["mask"] != 0].eq(1).all()
    assert x.grad.sum() == sum(one.cost for one in batch.groups)


def test_a_function_gives_the_mask():
    assert cut(lambda batch, other: batch["words"] != 0).groups == cut().groups == cut("batch['mask']").groups


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[1, 1, 0, 0]], [(0, 2)]),
        ([[0, 0, 1, 1]], [(2, 4)]),
        ([[0, 1, 0, 1]], [(1, 4)]),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], [(0, 0), (0, 4)]),
    ],
)
def test_spans(mask: list[list[int]], expected: list[tuple[int, int]]):
    for kind in (torch.long, torch.bool, torch.float):
        assert spans_of(torch.tensor(mask, dtype=kind)) == expected


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("attention_mask", r"names none of the tensors .*\(batch\['words'\], batch\['mask'\].*tokens=lambda"),
        (
            lambda batch, other: batch["words"][0],
            r"is \[8\], but tokens is a mask of the shape \[5, positions\]",
        ),
        (lambda batch, other: None, "is NoneType, but tokens is a mask"),
        (lambda batch, other: (batch["mask"] - 1.0) * 1e9, "has negative numbers"),
    ],
)
def test_what_is_no_mask_is_refused(tokens: Any, text: str):
    with pytest.raises(UsageError, match=text):
        cut(tokens)


def test_several_masks_are_refused():
    with pytest.raises(UsageError, match="names several"):
        cut(other={"mask": BATCH["mask"]})


def test_dims_are_those_of_the_first_step():
    other: list[Tensor] = [torch.zeros(5, 6)]
    first = cut(other=other)
    assert first.trimmed["other[0]"] == [] and first.trimmed["batch['words']"] == [1]
    later = cut(other=[torch.zeros(5, 8)], trimmed=first.trimmed)  # 8 is the length by chance
    assert later.slice(0)[0][1][0].shape[1] == 8
    with pytest.raises(UsageError, match=r"other was not among the step's arguments"):
        cut(other=torch.zeros(5, 8), trimmed=first.trimmed)
    with pytest.raises(UsageError, match=r"other\[0\] has the shape \[5, 6\], but 8 positions along dim 1"):
        cut(other=other, trimmed={**first.trimmed, "other[0]": [1]})
