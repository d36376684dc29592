"""Random inputs of the usual kinds. Each function returns a `batch(step)` for a case.

Shapes: B batch, S sequence, C channels. Labels that are averaged over tokens count equally often in each
row, so that every microbatch weighs the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .case import BATCH_SIZE, VOCABULARY, Batch, generator

IGNORED = -100


def causal(length: int = 10, padded: bool = False, vocabulary: int = VOCABULARY) -> Callable[[int], Batch]:
    """`input_ids` [B, S], their own labels; `padded` adds a mask that hides the last two of odd rows."""

    def batch(step: int) -> Batch:
        ids = torch.randint(3, vocabulary, (BATCH_SIZE, length), generator=generator(step))
        if not padded:
            return {"input_ids": ids, "labels": ids.clone()}
        return {"input_ids": ids, "attention_mask": _mask(length), "labels": ids.clone()}

    return batch


def masked(length: int = 10, padded: bool = True, types: bool = False) -> Callable[[int], Batch]:
    """`input_ids` [B, S] with three labelled positions in each row."""

    def batch(step: int) -> Batch:
        source = generator(step)
        ids = torch.randint(5, VOCABULARY, (BATCH_SIZE, length), generator=source)
        labels = torch.full_like(ids, IGNORED)
        for column in (1, 3, 5):
            labels[:, column] = ids[:, column]
            ids[:, column] = 4
        made = {"input_ids": ids, "labels": labels}
        if padded:
            made["attention_mask"] = _mask(length)
        if types:
            made["token_type_ids"] = (torch.arange(length) > length // 2).long().expand_as(ids).contiguous()
        return made

    return batch


def translation(source: int = 9, target: int = 7, padded: bool = True) -> Callable[[int], Batch]:
    """`input_ids` [B, S] and `labels` [B, T] of an encoder-decoder."""

    def batch(step: int) -> Batch:
        numbers = generator(step)
        made = {
            "input_ids": torch.randint(5, VOCABULARY, (BATCH_SIZE, source), generator=numbers),
            "labels": torch.randint(5, VOCABULARY, (BATCH_SIZE, target), generator=numbers),
        }
        if padded:
            made["attention_mask"] = _mask(source)
        return made

    return batch


def image(size: int = 32, rows: int = BATCH_SIZE, classes: int = 5) -> Callable[[int], Batch]:
    """`pixel_values` [B, 3, H, W] with one class each."""

    def batch(step: int) -> Batch:
        numbers = generator(step)
        pixels = torch.randn(rows, 3, size, size, generator=numbers)
        return {"pixel_values": pixels, "labels": torch.randint(0, classes, (rows,), generator=numbers)}

    return batch


def segmented_image(size: int = 32, classes: int = 5) -> Callable[[int], Batch]:
    """`pixel_values` [B, 3, H, W] with a class for each pixel."""

    def batch(step: int) -> Batch:
        numbers = generator(step)
        pixels = torch.randn(BATCH_SIZE, 3, size, size, generator=numbers)
        return {
            "pixel_values": pixels,
            "labels": torch.randint(0, classes, (BATCH_SIZE, size, size), generator=numbers),
        }

    return batch


def speech(samples: int = 400, letters: int = 3, vocabulary: int = 24) -> Callable[[int], Batch]:
    """`input_values` [B, samples] with `labels` [B, letters] for CTC."""

    def batch(step: int) -> Batch:
        numbers = generator(step)
        return {
            "input_values": torch.randn(BATCH_SIZE, samples, generator=numbers),
            "labels": torch.randint(1, vocabulary, (BATCH_SIZE, letters), generator=numbers),
        }

    return batch


def classified(length: int = 10, classes: int = 3) -> Callable[[int], Batch]:
    """`input_ids` [B, S] with one class for each row."""

    def batch(step: int) -> Batch:
        numbers = generator(step)
        return {
            "input_ids": torch.randint(5, VOCABULARY, (BATCH_SIZE, length), generator=numbers),
            "attention_mask": _mask(length),
            "labels": torch.randint(0, classes, (BATCH_SIZE,), generator=numbers),
        }

    return batch


def _mask(length: int) -> torch.Tensor:
    mask = torch.ones(BATCH_SIZE, length, dtype=torch.long)
    mask[1::2, -2:] = 0
    return mask
