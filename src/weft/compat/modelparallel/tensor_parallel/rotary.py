"""Positions by turning pairs of features (Su et al., arXiv 2104.09864), as GPT-J has them."""

from __future__ import annotations

from typing import Any

import torch

from weft.errors import UsageError


def check(rotary_dim: int | None, head_size: int) -> None:
    """Raise :class:`UsageError` for a number of features that cannot be turned in pairs."""
    if rotary_dim is not None and (rotary_dim % 2 or not 0 < rotary_dim <= head_size):
        raise UsageError(
            f"rotary_dim is {rotary_dim}: choose an even number up to attention_head_size, {head_size}"
        )


def turned(states: Any, rotary_dim: int) -> Any:
    """Queries or keys [N, heads, S, head size], of which the first ``rotary_dim`` features know their position.

    Features 2i and 2i + 1 of position p are turned by the angle p / 10000^(2i / rotary_dim).
    """
    device = states.device
    speeds = 10000.0 ** -(torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)
    angles = torch.arange(states.shape[-2], device=device)[:, None] * speeds
    sin, cos = angles.sin().to(states.dtype), angles.cos().to(states.dtype)
    even, odd = states[..., :rotary_dim].unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((pairs, states[..., rotary_dim:]), -1) if rotary_dim < states.shape[-1] else pairs
