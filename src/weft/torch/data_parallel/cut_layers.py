"""Measures what layers that are cut over all ranks exchange, with all that goes with it: see `machine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Times = list[tuple[float, float]]
Timer = Callable[[torch.device, Callable[[], object]], float]
PAIRS, INSIDE = 4, 8
"""Pairs of layers, and how wide a rank's part of them is inside: their products take next to nothing."""
SHAPES = {
    "cpu": ((4, 128, 64), (4, 128, 256), (8, 128, 512), (8, 128, 1024)),
    "cuda": ((4, 2048, 1024), (4, 2048, 4096), (4, 2048, 8192)),
}
"""Samples, tokens, width."""


def exchanged(device: torch.device, timer: Timer, along: bool) -> Times:
    """Bytes of what a pair of cut layers adds up, and what a sum takes: pairs that are cut, less whole ones.

    A pair adds up once in each pass. `along`: each rank has some of the tokens, so that a pair gathers tokens and hands
    out sums. Whole pairs are as narrow inside as a rank's part. `timer`: seconds of a call that all ranks make.
    """
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    found = []
    for samples, tokens, width in SHAPES[device.type]:
        tokens = -(-tokens // group.size()) * group.size()
        x = torch.randn(samples, tokens, width, device=device, requires_grad=True)
        whole = timer(device, _Pass(_pairs(width, INSIDE, device), lambda x=x: x))  # type: ignore[misc]
        layers = _pairs(width, INSIDE * group.size(), device)
        took = timer(device, _Pass(layers, _cut(layers, x, group, along)))
        found.append((float(x.nbytes), max(took - whole, 1e-9) / (2 * PAIRS)))
    return found


class _Pass:
    """Forward and backward through layers."""

    def __init__(self, layers: nn.Module, inputs: Callable[[], Tensor]) -> None:
        self.layers, self.inputs = layers, inputs

    def __call__(self) -> None:
        from weft.torch.tensors import cut_weights

        cut_weights.ask(inside_unit=lambda: True, between_units=lambda: False)  # as in a step
        try:
            result: Any = self.layers(self.inputs())
            result = getattr(result, "part", result)
            result.backward(torch.ones_like(result))
        finally:
            cut_weights.ask(inside_unit=lambda: False, between_units=lambda: False)


def _pairs(width: int, inside: int, device: torch.device) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, inside), nn.GELU(), nn.Linear(inside, width)) for _ in range(PAIRS))
    ).to(device)


def _cut(layers: nn.Module, x: Tensor, group: Any, along: bool) -> Callable[[], Tensor]:
    """Cut the layers; what gives their input."""
    from weft.torch.tensor_parallel import Linear, Region, Splits
    from weft.torch.tensor_parallel.apply import split  # it loads DTensor
    from weft.torch.tensor_parallel.sharded_activations import spread
    from weft.torch.tensors.shard_positions import ShardPositions

    rank, ranks = group.rank(), group.size()
    linears = [{f"{at}.0": Linear("column"), f"{at}.2": Linear("row")} for at in range(PAIRS)]
    regions = tuple(Region(str(at), each) for at, each in enumerate(linears))
    rows = tuple(f"{at}.2" for at in range(PAIRS)) if along else ()
    shard_group = split(layers, Splits(ranks, regions, spread=rows), group, rank, ranks, x.device)
    if not along:
        return lambda: x
    shard = x.detach().chunk(ranks, 1)[rank].contiguous().requires_grad_()
    return lambda: spread(shard, shard_group, 1, ShardPositions.contiguous([shard.shape[1]] * ranks))
