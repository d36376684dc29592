"""Tensor parallelism: linears of an unmodified model cut over the ranks of axis ``tp``.

Between a column-parallel linear and a row-parallel one, tensors are PyTorch's ``DTensor``: the
model's own code sees whole shapes, whatever it does with them, and each rank computes its part. Everywhere else tensors
are plain.
``find.find`` tries out what can be split, ``apply.split`` does it. How a model looks is found by running it, never by
its names. What stands here does without ``DTensor``, which takes more than a second to load. As soon as anybody loads
it, a ``DTensor`` is known as a shard.
"""

from torch import Tensor

from weft.import_hooks import when_imported
from weft.torch.tensors.shards import register

from .cuts import Cut, axes_of, can_cut, cut, cut_of, cuts_of, full_tensor, is_cut
from .splits import Linear, Region, Splits, refuse_whole

__all__ = [
    "Cut", "Linear", "Region", "Splits", "axes_of", "can_cut", "cut", "cut_of", "cuts_of", "full_tensor", "is_cut",
    "refuse_whole",
]  # fmt: skip


def _gather(shard: Tensor) -> Tensor:
    from .functions import gather_full_tensor

    return gather_full_tensor(shard)


when_imported("torch.distributed.tensor", lambda module: register(module.DTensor, _gather))
