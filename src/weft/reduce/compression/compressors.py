"""The compressions: half precision, the largest values only, 8-bit integers with a scale for each block, low rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from weft.reduce.collective import Collective
from weft.reduce.compression.pair import Compression, Divisible
from weft.reduce.exchange import exchange


def cast(dtype: torch.dtype) -> Compression:
    """Divide by the number of ranks, round to ``dtype``, sum in ``dtype``, and go back.

    Paper: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, keeps gradients in fp16 for the same
    reason; the division comes first, so that an average that fits fp16 cannot overflow on the way.
    Formula: ``average = float32(sum over ranks of dtype(flat / ranks))``.
    Bytes moved: ``2 N`` instead of ``4 N`` for N fp32 values through the all-reduce, 0.5 of fp32. Nothing for values
    that have 16 bits already: they stay as they are.
    State: the buffer of ``dtype``.
    """

    def init(numel: int, given: torch.dtype, device: torch.device, ranks: int) -> torch.Tensor | None:
        return torch.empty(numel, dtype=dtype, device=device) if given.itemsize > dtype.itemsize else None

    def update(state: torch.Tensor | None, flat: torch.Tensor, collective: Collective) -> torch.Tensor:
        flat.div_(collective.size)
        if state is None:
            collective.all_reduce(flat).wait()
            return flat
        state.copy_(flat)
        collective.all_reduce(state).wait()
        return flat.copy_(state)

    return Divisible(init, update)


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


LARGEST = 127
_TINY = torch.finfo(torch.float32).tiny
"""Values that need a smaller scale wait in the error until they have grown."""
_TILE = 1 << 17
"""Values that are worked on at once on a CPU: few enough for its cache, and so many that calls cost little."""


@dataclass
class Int8State:
    """Shapes: n ranks, b blocks a shard, B values a block; messages are of s = 4 b + b B bytes, up to a multiple of 4.

    ``error`` (n, b, B): what this rank has not sent yet; the row of its own shard: what it has not yet given back of
    the average. ``scratch`` (t, B): one tile. ``message`` (n, s) and ``answer`` (1, s): int8.
    """

    error: torch.Tensor
    scratch: torch.Tensor
    message: torch.Tensor
    answer: torch.Tensor
    generator: torch.Generator | None

    def tiles(self, row: int, flat: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Pieces of a shard: which blocks, their errors (t, B), and their part of ``flat``, shorter at its end."""
        blocks, block = self.error.shape[1:]
        tile = self.scratch.shape[0]
        for start in range(0, blocks, tile):
            stop = min(start + tile, blocks)
            first = row * blocks
            yield (
                slice(start, stop),
                self.error[row, start:stop],
                flat[(first + start) * block : (first + stop) * block],
            )

    def parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of messages (n, s): the integers (n, b, B) and the scales (n, b)."""
        blocks, block = self.error.shape[1:]
        values = message[:, 4 * blocks : (4 + block) * blocks]
        return values.unflatten(1, (blocks, block)), message[:, : 4 * blocks].view(torch.float32)


def int8(block: int = 256, rounding: str = "nearest", feedback: bool = True) -> Compression:
    """Reduce-scatter and all-gather of 8-bit integers.

    Papers: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
    of Speech DNNs" (Interspeech 2014), for feeding errors back; Tang et al., "DoubleSqueeze", arXiv 1905.05957, for
    doing so on both sides; Alistarh et al., "QSGD", arXiv 1610.02132, for stochastic rounding; Dettmers et al., "8-bit
    Optimizers via Block-wise Quantization", arXiv 2110.02861, for blocks (here linear, not of a dynamic data type).

    Formula, for each block of x = flat + error::

        scale = max |x| / 127    q = round(x / scale)    error = x - q scale

    q and scale of shard i go to rank i, which averages what it gets with its own flat as it is, treats the average in
    the same way with an error of its own, and sends the result to all. Sums are made in fp32, so nothing overflows
    whatever the number of ranks.

    Bytes moved: each rank sends ``2 N (1 + 4 / block) (n - 1) / n`` for N values on n ranks; a ring of fp32 sends
    ``8 N (n - 1) / n``: 0.254 of it with blocks of 256, for every n.

    Args:
        block: Values that share a scale.
        rounding: ``"nearest"``, or ``"stochastic"``: up or down by chance, right on average.
        feedback: Whether what a step rounds away is added in the next one.
    """

    def init(numel: int, dtype: torch.dtype, device: torch.device, ranks: int) -> Int8State:
        blocks = -(-numel // (ranks * block))
        size = 4 * blocks + -(-blocks * block // 4) * 4
        tile = min(blocks, max(1, _TILE // block)) if device.type == "cpu" else blocks
        return Int8State(
            error=torch.zeros(ranks, blocks, block, device=device),
            scratch=torch.empty(tile, block, device=device),
            message=torch.zeros(ranks, size, dtype=torch.int8, device=device),
            answer=torch.zeros(1, size, dtype=torch.int8, device=device),
            generator=torch.Generator(device) if rounding == "stochastic" else None,
        )

    def update(state: Int8State, flat: torch.Tensor, collective: Collective) -> torch.Tensor:
        ranks = exchange(collective)
        _seed(state, ranks.rank)
        if not feedback:
            state.error.zero_()
        others = [row for row in range(ranks.size) if row != ranks.rank]
        _send(state, others, flat)
        _average(state, ranks.rank, others, ranks.all_to_all(state.message), flat)
        _restore(state, others, ranks.all_gather(state.answer.view(-1)), flat)
        scales = [state.parts(message)[1] for message in (state.message, state.answer)]
        if not bool(torch.isfinite(torch.cat(scales)).all()):
            state.error.nan_to_num_(0.0, 0.0, 0.0)
        return flat

    return Divisible(init, update)


def _seed(state: Int8State, rank: int) -> None:
    """Ranks round by chances of their own, but the same in every run."""
    if state.generator is not None and state.generator.initial_seed() != rank + 1:
        state.generator.manual_seed(rank + 1)


def _quantise(state: Int8State, x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Write x (t, B) into integers (t, B) and scales (t), leave in x what they do not hold, and return what they do."""
    held = state.scratch[: x.shape[0]]
    torch.abs(x, out=held)  # with amax a sixth of the time of aminmax
    torch.amax(held, 1, out=scale).div_(LARGEST)
    torch.mul(x, torch.where(scale > _TINY, 1 / scale, 0).unsqueeze(1), out=held)
    if state.generator is None:
        held.round_()
    else:
        held.add_(torch.rand(held.shape, generator=state.generator, device=x.device)).sub_(0.5)
        held.round_().clamp_(-LARGEST, LARGEST)
    values.copy_(held)
    held.mul_(scale.unsqueeze(1))
    x.sub_(held)
    return held


def _send(state: Int8State, others: list[int], flat: torch.Tensor) -> None:
    """Write the other ranks' shards of ``flat``, and the errors, into ``message``."""
    values, scales = state.parts(state.message)
    for row in others:
        for tile, x, part in state.tiles(row, flat):
            x.view(-1)[: part.numel()].add_(part)
            _quantise(state, x, values[row, tile], scales[row, tile])


def _average(state: Int8State, own: int, others: list[int], heard: torch.Tensor, flat: torch.Tensor) -> None:
    """Write the average of what was heard and of the own shard into ``answer`` and, as it arrives, into ``flat``."""
    values, scales = state.parts(heard)
    scales = scales / heard.shape[0]
    answers, answer_scales = state.parts(state.answer)
    for tile, x, part in state.tiles(own, flat):
        x.view(-1)[: part.numel()].add_(part, alpha=1 / heard.shape[0])
        scratch = state.scratch[: x.shape[0]]
        for row in others:
            x.addcmul_(scratch.copy_(values[row, tile]), scales[row, tile].unsqueeze(1))
        held = _quantise(state, x, answers[0, tile], answer_scales[0, tile])
        held.add_(0.0)  # what is -0.0 here is 0.0 where integers arrive
        part.copy_(held.view(-1)[: part.numel()])


def _restore(state: Int8State, others: list[int], rows: torch.Tensor, flat: torch.Tensor) -> None:
    """Write the values of the other ranks' answers (n, s) into ``flat``."""
    values, scales = state.parts(rows)
    for row in others:
        for tile, x, part in state.tiles(row, flat):
            held = state.scratch[: x.shape[0]].copy_(values[row, tile]).mul_(scales[row, tile].unsqueeze(1))
            part.copy_(held.view(-1)[: part.numel()])


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
    for all of the tensor needs no shapes of parameters, and loses more than the paper's one for each parameter.
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
