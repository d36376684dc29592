"""Averages of 8-bit integers with a scale for each block, and the errors fed back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.reduce.collective import Collective
from weft.reduce.compression.pair import Compression
from weft.reduce.exchange import exchange

LARGEST = 127
_TINY = torch.finfo(torch.float32).tiny
"""Values that need a smaller scale wait in the error until they have grown."""
_TILE = 1 << 15
"""Values that are worked on at once on a CPU: they and their copies stay in its cache."""


@dataclass
class Int8State:
    """Shapes: n ranks, b blocks a rank, B values a block.

    ``error`` (n b, B): what this rank has not sent yet. ``second`` (b, B): what the owner of a shard has not yet given
    back of its average. ``scratch``: one tile. ``message`` (n, b B + 4 b) and ``answer`` (b B + 4 b): int8.
    """

    error: torch.Tensor
    second: torch.Tensor
    scratch: torch.Tensor
    message: torch.Tensor
    answer: torch.Tensor
    generator: torch.Generator | None


def int8(block: int = 256, rounding: str = "nearest", feedback: bool = True) -> Compression:
    """Reduce-scatter and all-gather of 8-bit integers.

    Papers: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
    of Speech DNNs" (Interspeech 2014), for feeding errors back; Tang et al., "DoubleSqueeze", arXiv 1905.05957, for
    doing so on both sides; Alistarh et al., "QSGD", arXiv 1610.02132, for stochastic rounding; Dettmers et al., "8-bit
    Optimizers via Block-wise Quantization", arXiv 2110.02861, for blocks (here linear, not of a dynamic data type).

    Formula, for each block of x = flat + error::

        scale = max |x| / 127    q = round(x / scale)    error = x - q scale

    q and scale of shard i go to rank i, which averages what it gets, treats the average in the same way with an error
    of its own, and sends the result to all. Sums are made in fp32, so nothing overflows whatever the number of ranks.

    Bytes moved: each rank sends ``2 N (1 + 4 / block) (n - 1) / n`` for N values on n ranks; a ring of fp32 sends
    ``8 N (n - 1) / n``: 0.254 of it with blocks of 256, for every n.

    Args:
        block: Values that share a scale.
        rounding: ``"nearest"``, or ``"stochastic"``: up or down by chance, right on average.
        feedback: Whether what a step rounds away is added in the next one.
    """

    def init(numel: int, dtype: torch.dtype, device: torch.device, ranks: int) -> Int8State:
        blocks = -(-numel // (ranks * block))
        size = blocks * (block + 4)
        tile = max(1, _TILE // block) if device.type == "cpu" else ranks * blocks
        generator = None
        if rounding == "stochastic":
            generator = torch.Generator(device)
        return Int8State(
            error=torch.zeros(ranks * blocks, block, device=device),
            second=torch.zeros(blocks, block, device=device),
            scratch=torch.empty(tile, block, device=device),
            message=torch.empty(ranks, size, dtype=torch.int8, device=device),
            answer=torch.empty(1, size, dtype=torch.int8, device=device),
            generator=generator,
        )

    def update(state: Int8State, flat: torch.Tensor, collective: Collective) -> torch.Tensor:
        ranks = exchange(collective)
        _seed(state, ranks.rank)
        if not feedback:
            state.error.zero_()
            state.second.zero_()
        state.error.view(-1)[: flat.numel()].add_(flat)
        _quantise(state, state.error, state.message)
        heard = ranks.all_to_all(state.message)
        _average(state, heard)
        _quantise(state, state.second, state.answer)
        rows = ranks.all_gather(state.answer.view(-1))
        _restore(state, rows, flat)
        return flat

    return Compression(init, update)


def _seed(state: Int8State, rank: int) -> None:
    """Ranks round by chances of their own, but the same in every run."""
    if state.generator is not None and state.generator.initial_seed() != rank + 1:
        state.generator.manual_seed(rank + 1)


def _parts(message: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of messages (n, b B + 4 b): the integers (n, b, B) as a view, and the scales (n, b)."""
    n, size = message.shape
    blocks = size // (block + 4)
    values = message[:, : blocks * block].view(n, blocks, block)
    return values, message[:, blocks * block :].clone().view(torch.float32)


def _quantise(state: Int8State, source: torch.Tensor, message: torch.Tensor) -> None:
    """Write ``source`` (n b, B) into messages (n, b B + 4 b), and leave in it what they do not hold."""
    n, block = message.shape[0], source.shape[1]
    values, scales = _parts(message, block)
    blocks, tile = values.shape[1], state.scratch.shape[0]
    for row in range(n):
        for start in range(0, blocks, tile):
            stop = min(start + tile, blocks)
            x = source[row * blocks + start : row * blocks + stop]
            scaled = state.scratch[: stop - start]
            low, high = torch.aminmax(x, dim=1)
            scale = torch.maximum(high, low.neg_()).div_(LARGEST)
            torch.mul(x, torch.where(scale > _TINY, 1 / scale, 0).unsqueeze(1), out=scaled)
            if state.generator is not None:
                scaled.add_(torch.rand(scaled.shape, generator=state.generator, device=x.device)).sub_(0.5)
            scaled.round_().clamp_(-LARGEST, LARGEST)
            values[row, start:stop].copy_(scaled)
            x.addcmul_(scaled, scale.unsqueeze(1), value=-1)
            scales[row, start:stop] = scale
    message[:, blocks * block :] = scales.view(torch.int8).view(n, -1)
    if not bool(torch.isfinite(scales).all()):
        source.nan_to_num_(0.0, 0.0, 0.0)


def _average(state: Int8State, heard: torch.Tensor) -> None:
    """Add the average of the messages of all ranks (n, b B + 4 b) to ``second`` (b, B)."""
    values, scales = _parts(heard, state.second.shape[1])
    scales = scales / values.shape[0]
    blocks, tile = values.shape[1], state.scratch.shape[0]
    for start in range(0, blocks, tile):
        stop = min(start + tile, blocks)
        scratch = state.scratch[: stop - start]
        for row in range(values.shape[0]):
            scratch.copy_(values[row, start:stop])
            state.second[start:stop].addcmul_(scratch, scales[row, start:stop].unsqueeze(1))


def _restore(state: Int8State, rows: torch.Tensor, flat: torch.Tensor) -> None:
    """Write the values of the answers (n, b B + 4 b) into ``flat``."""
    block = state.second.shape[1]
    values, scales = _parts(rows, block)
    n, blocks, tile = *values.shape[:2], state.scratch.shape[0]
    for row in range(n):
        for start in range(0, blocks, tile):
            stop = min(start + tile, blocks)
            scratch = state.scratch[: stop - start]
            torch.mul(values[row, start:stop], scales[row, start:stop].unsqueeze(1), out=scratch)
            at = (row * blocks + start) * block
            target = flat[at : at + scratch.numel()]
            target.copy_(scratch.view(-1)[: target.numel()])
