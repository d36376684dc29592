"""Padded batches, and the loss of a `Reader` for them. Shapes: B batch, S sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import TOKENS

IGNORED = -100


def batch_of(lengths: Sequence[int], longest: int = 0, left: bool = False) -> dict[str, Tensor]:
    """Words, mask and labels [B, S] of rows of these lengths, padded to the ``longest``; their kinds [B]."""
    longest = longest or max(lengths)
    numbers = torch.Generator().manual_seed(sum(lengths))
    places, counts = torch.arange(longest)[None], torch.tensor(lengths)[:, None]
    mask = (places >= longest - counts if left else places < counts).long()
    shape = len(lengths), longest
    words, labels = (torch.randint(1, TOKENS, shape, generator=numbers) * mask for _ in range(2))
    kind = torch.randint(3, (len(lengths),), generator=numbers)
    return {"words": words, "mask": mask, "labels": labels.masked_fill(mask == 0, IGNORED), "kind": kind}


def reading_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all labels."""
    scores = model(batch["words"], batch["mask"])
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())
