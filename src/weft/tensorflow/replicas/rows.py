"""Rows of all ranks after one another: gradients of embeddings, which are no tensors that could be added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch
import torch.distributed as dist

from weft.tensorflow.session.wire import from_torch, to_torch


def is_by_rows(tensor: Any) -> bool:
    """True if a gradient is one by rows."""
    return isinstance(tensor, tf.IndexedSlices)


def gather_rows(tensors: Sequence[Any], group: Any) -> list[Any]:
    """Each tensor with the rows of all ranks along dim 0, in the order of ranks, which may have any number of them."""
    given = [to_torch(each) for each in tensors]
    counts = [torch.empty(len(given), dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([len(each) for each in given]), group=group)
    rows = torch.stack(counts).T.tolist()
    return [from_torch(_gathered(each, of_ranks, group)) for each, of_ranks in zip(given, rows, strict=True)]


def _gathered(tensor: torch.Tensor, rows: list[int], group: Any) -> torch.Tensor:
    """All ranks send as many rows as the longest one has: a collective moves tensors of one size."""
    padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in rows]
    if padded.numel():
        sent = [each.view(-1).view(torch.uint8) for each in parts]
        dist.all_gather(sent, padded.view(-1).view(torch.uint8), group=group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])
