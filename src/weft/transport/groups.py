"""The gloo groups of ranks, by their axes on the mesh; and bytes between the ranks of one, without pickle."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.topology.mesh import Mesh
from weft.transport.tensor_bytes import to_bytes


def default_takes_host_tensors() -> bool:
    """True if the default group can be weft's group of all ranks: a script may have made one for GPUs only."""
    return "gloo" in dist.get_backend()


def make_groups(mesh: Mesh, rank: int, timeout: timedelta) -> dict[tuple[int, ...], Any]:
    """The gloo groups of ``rank``; every rank takes part in making all of them.

    One for all axes with the same ranks, and none for a rank alone: each keeps a thread that never sleeps for long.
    """
    if mesh.world_size == 1:
        return {}
    axes = ("pp", "tp", "rdp", "stage", "mp", *(() if default_takes_host_tensors() else ("world",)))
    wanted = dict.fromkeys(ranks for axis in axes for ranks in mesh.groups(axis))
    made = {ranks: dist.new_group(ranks, timeout, "gloo") for ranks in wanted if len(ranks) > 1}
    return {ranks: group for ranks, group in made.items() if rank in ranks}


class GroupPort:
    """Bytes between the ranks of a ``torch.distributed`` group that takes tensors of the host."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def broadcast_bytes(self, content: bytes, source: int) -> bytes:
        mine = dist.get_rank() == source
        size = torch.tensor([len(content)])
        dist.broadcast(size, source, group=self._group)
        count = int(size)
        if not count:
            return b""
        tensor = _tensor_of(content) if mine else torch.empty(count, dtype=torch.uint8)
        dist.broadcast(tensor, source, group=self._group)
        return to_bytes(tensor)

    def gather_bytes(self, content: bytes) -> list[bytes]:
        ranks = range(dist.get_world_size(self._group))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
        dist.all_gather(sizes, torch.tensor([len(content)]), group=self._group)
        counts = [int(size) for size in sizes]
        if not any(counts):
            return [b"" for _ in ranks]
        padded = _tensor_of(content.ljust(max(counts), b"\0"))
        everything = [torch.empty_like(padded) for _ in ranks]
        dist.all_gather(everything, padded, group=self._group)
        return [to_bytes(part[:count]) for part, count in zip(everything, counts, strict=True)]


def _tensor_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
