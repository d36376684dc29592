"""Process groups of some ranks of a group, made by these ranks alone.

``torch.distributed.new_group`` takes every rank of the job, or, with ``use_local_synchronization``, names a group by
how many groups a rank has: ranks that had unequally many never meet, and a group made again meets the old one's
addresses. Here the name is a fresh one that the ranks agree on.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.reduce.exchange import gather_rows
from weft.transport.private_c10d import default_store, nccl_options, use_backend


def subgroup(
    group: dist.ProcessGroup, members: Sequence[int], device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """A group of this rank and others, with gloo for the CPU or NCCL for a GPU.

    Every rank of ``group`` calls it, each with the members (ranks in ``group``, ascending) of its own new group.
    """
    told = torch.tensor([secrets.randbits(62), secrets.randbits(62)], device=device)
    agreed = gather_rows(told, group)[0].tolist()
    name = f"weft/{agreed[0]:x}{agreed[1]:x}/{'-'.join(map(str, members))}"
    store = dist.PrefixStore(name, default_store())
    rank, size = list(members).index(group.rank()), len(members)
    made = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL(store, rank, size, nccl_options(timeout))
        use_backend(made, device, kinds.NCCL, nccl)
    else:
        use_backend(made, device, kinds.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout))
    return made
