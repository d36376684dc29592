"""Linear layers, of PyTorch and of `transformers`, whole and sharded."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.torch.pytorch.private import version
from weft.torch.tensors.cut_weights import own

from .attention import cuts_of_attention
from .cuts import Cut
from .experts import cuts_of_experts, cuts_of_mixture
from .rules import as_full_tensor, as_shard, wrap
from .shard_group import ShardGroup, leave
from .sharded_activations import ShardedActivation, can_scatter, enters, plain, scattered
from .splits import COLUMN, EXPERTS, MIXTURE, VOCABULARY, Linear, features, is_transposed
from .vocabulary import cuts_of_vocabulary


def cuts_of(module: nn.Module, linear: Linear) -> dict[str, Cut]:
    """The cuts of a linear's parameters, by name; those that stay whole are left out."""
    if isinstance(module, nn.MultiheadAttention):
        return cuts_of_attention(module)
    if linear.kind == EXPERTS:
        return cuts_of_experts(module, linear)
    if linear.kind == MIXTURE:
        return cuts_of_mixture(module, linear)
    if linear.kind == VOCABULARY:
        return cuts_of_vocabulary(module)
    inputs, results = features(module)
    weight = module.get_parameter("weight")
    by_results = linear.kind == COLUMN
    dim = int(by_results == is_transposed(module))
    blocks = (linear.blocks or (results,)) if by_results else (inputs,)
    cuts = {"weight": Cut(dim, blocks, tuple(weight.shape))}
    bias = getattr(module, "bias", None)
    if by_results and bias is not None:
        cuts["bias"] = Cut(0, blocks, tuple(bias.shape))
    return cuts


def product(module: nn.Module, inputs: Tensor, bias: Tensor | None) -> Tensor:
    """The inputs times what the module has of its weight."""
    weight = own(module, "weight")
    return F.linear(inputs, weight.t() if is_transposed(module) else weight, bias)


class Entered:
    """Full tensors that have entered a region, so that linears that share one share its gradient's messages."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, int, Tensor]] = {}

    def __call__(self, whole: Tensor, shard_group: ShardGroup) -> Tensor:
        key = id(whole)
        count = version(whole) + (isinstance(whole, ShardedActivation) and whole.old())
        known = self._found.get(key)
        if known is None or known[1] != count or known[2].requires_grad != whole.requires_grad:
            known = self._found[key] = (whole, count, enters(whole, shard_group))
        return known[2]


def column(
    module: nn.Module, input: Any, blocks: tuple[int, ...], shard_group: ShardGroup, entered: Any
) -> DTensor:
    """Some of the results, as a part of all."""
    local = entered(as_full_tensor(input), shard_group)
    bias = own(module, "bias")
    return wrap(product(module, local, bias), -1, shard_group, blocks)


def row(module: nn.Module, input: Any, shard_group: ShardGroup, stays_sharded: bool = False) -> Tensor:
    """All results, from some of the inputs and the other ranks' sums; ``in_parts``: each rank those of some tokens."""
    if not isinstance(input, DTensor):
        input = DTensor.from_local(plain(input), shard_group.mesh, [Replicate()]).redistribute(
            placements=[Shard(input.ndim - 1)]
        )
    sums = product(module, as_shard(input, input.ndim - 1, shard_group), None)
    bias = own(module, "bias")
    if stays_sharded and can_scatter(sums, shard_group):
        return scattered(sums, shard_group, bias)
    result = leave(sums, shard_group)
    return result if bias is None else result.add_(bias.to(result.dtype))
