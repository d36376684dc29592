"""Averages of low rank, by PyTorch's own implementation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from weft.reduce.collective import Collective
from weft.reduce.compression.pair import Compression
from weft.reduce.exchange import exchange


class _Bucket:
    """A flat tensor as the bucket that PyTorch's hook expects."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        side = math.isqrt(self._flat.numel())
        return [self._flat.view(side, side)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


@dataclass
class PowerState:
    """The square in which the flat tensor stands (None: it is too small), and PyTorch's state once there is a group."""

    square: torch.Tensor | None
    torch_state: Any = None


def powersgd(rank: int = 4, start: int = 10) -> Compression:
    """The flat tensor as a square matrix M, approximated by P Q^T with ``rank`` columns, errors fed back.

    Paper: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", arXiv
    1905.13727. It is done by ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.powerSGD_hook``. One matrix
    for the whole tensor needs no shapes of parameters, and loses more than the paper's one for each parameter.
    Formula: ``P = average(M Q)``, made orthogonal; ``Q = average(M^T P)``; ``average = P Q^T``; ``error = M - P Q^T``.
    Bytes moved: an all-reduce of ``8 rank sqrt(N)`` bytes instead of ``4 N``, for N values. A tensor for
    which that would be more is summed as it is.

    Args:
        rank: Columns of P and Q.
        start: Steps before the first compressed one, in full precision; at least 2.
    """

    def init(numel: int, dtype: torch.dtype, device: torch.device, ranks: int) -> PowerState:
        side = math.isqrt(numel - 1) + 1 if numel else 0
        return PowerState(torch.zeros(side**2, device=device) if 2 * side * rank < numel else None)

    def update(state: PowerState, flat: torch.Tensor, collective: Collective) -> torch.Tensor:
        if state.square is None:
            collective.all_reduce(flat.div_(collective.size)).wait()
            return flat
        if state.torch_state is None:
            state.torch_state = _torch_state(exchange(collective), rank, start, state.square)
        kept = state.torch_state.q_memory_dict
        if not bool(kept[0].any()):  # after zeros, which have no direction to go on with
            kept[0] = _start(kept[0].numel(), flat.device)
        state.square[: flat.numel()].copy_(flat)
        state.square[flat.numel() :].zero_()
        average = powerSGD_hook.powerSGD_hook(state.torch_state, _Bucket(state.square)).wait()  # type: ignore[arg-type]
        flat.copy_(average[: flat.numel()])
        if not bool(torch.isfinite(flat).all()):
            steps = state.torch_state.iter
            state.torch_state = _torch_state(exchange(collective), rank, start, state.square)
            state.torch_state.iter = steps
        return flat

    return Compression(init, update)


def _torch_state(ranks: Any, rank: int, start: int, square: torch.Tensor) -> powerSGD_hook.PowerSGDState:
    """PyTorch's state, with P and Q made here: PyTorch would seed the whole process's random numbers for them."""
    state = powerSGD_hook.PowerSGDState(
        ranks.group,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start,
        min_compression_rate=1,
        orthogonalization_epsilon=1e-30,
    )
    side = math.isqrt(square.numel())
    state.p_memory_dict[0] = torch.empty(side * rank, device=square.device)
    state.q_memory_dict[0] = _start(side * rank, square.device)
    return state


def _start(numel: int, device: torch.device) -> torch.Tensor:
    """The same chances on every rank."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
