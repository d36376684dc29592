"""The largest and the smallest number of several ranks, NaN if one of them has NaN.

gloo compares with ``<``, which is false for NaN: whether one is kept there depends on which rank has it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

EXTREMES = (dist.ReduceOp.MAX, dist.ReduceOp.MIN)


def all_reduce_extreme(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> None:
    """Write into ``tensor`` the largest (``MAX``) or smallest (``MIN``) number of the ranks at each place.

    As ``torch.amax`` and ``torch.amin`` do it for one process, a place where a rank has NaN becomes NaN.

    Args:
        tensor: Of the same shape and dtype on all ranks.
        op: ``ReduceOp.MAX`` or ``ReduceOp.MIN``.
        group: The ranks.
    """
    if not tensor.is_floating_point():
        dist.all_reduce(tensor, op, group=group)
        return
    sign = 1.0 if op == dist.ReduceOp.MAX else -1.0
    nan = tensor.isnan()
    both = torch.stack([tensor.masked_fill(nan, -sign * torch.inf), nan * torch.full_like(tensor, sign)])
    dist.all_reduce(both, op, group=group)
    tensor.copy_(both[0].masked_fill(both[1] != 0, torch.nan))
