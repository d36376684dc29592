"""Only the largest values, the others later."""

from __future__ import annotations

import math

import torch

from weft.reduce.collective import Collective
from weft.reduce.compression.pair import Compression
from weft.reduce.exchange import exchange


def topk(ratio: float = 0.01) -> Compression:
    """Each rank sends its k largest values by magnitude with their places, and keeps the rest for later.

    Papers: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", arXiv 1704.05021; Stich et al.,
    "Sparsified SGD with Memory", arXiv 1809.07599.
    Formula: ``x = flat + error``; ``average = sum over ranks of top_k(x) / ranks``; ``error = x - top_k(x)``.
    Bytes moved: each rank receives ``8 k (n - 1)`` for k fp32 values and places from n ranks: less than fp32's ring
    (``8 N (n - 1) / n``) as long as ``k n < N``.

    Args:
        ratio: k / N, in (0, 1]; at least one value is sent.
    """

    def init(numel: int, dtype: torch.dtype, device: torch.device, ranks: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def update(state: torch.Tensor, flat: torch.Tensor, collective: Collective) -> torch.Tensor:
        ranks = exchange(collective)
        count = min(flat.numel(), max(1, math.ceil(ratio * flat.numel())))
        state.add_(flat)
        places = state.abs().topk(count, sorted=False).indices
        values = state[places].to(flat.dtype)
        state.index_add_(0, places, values.to(state.dtype), alpha=-1).nan_to_num_(0.0, 0.0, 0.0)
        width = torch.int32 if flat.numel() <= torch.iinfo(torch.int32).max else torch.int64
        all_values, all_places = ranks.all_gather(values), ranks.all_gather(places.to(width))
        flat.zero_()
        for row in range(ranks.size):
            flat.index_add_(0, all_places[row], all_values[row])
        return flat.div_(ranks.size)

    return Compression(init, update)
