"""The original's linears and embeddings, as PyTorch's."""

from __future__ import annotations

from typing import Any

from torch import nn


class DistributedLinear(nn.Linear):
    """``nn.Linear``."""


class DistributedEmbedding(nn.Embedding):
    """``nn.Embedding``; weights are drawn from a normal distribution with the deviation ``initializer_range``."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
        deviation = kwargs.pop("initializer_range", 0.02)
        for name in ("_skip_allgather", "_skip_scatter_and_merge"):
            kwargs.pop(name, None)
        super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
        if kwargs.get("_weight") is None:
            nn.init.normal_(self.weight, std=deviation)
