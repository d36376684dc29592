"""The device of a rank, its memory, and what ranks with GPUs or shared memory need beside their groups."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.launch.discovery import Place
from weft.reduce.exchange import gather_rows
from weft.runtime.allocator import host_bytes
from weft.topology.mesh import Mesh
from weft.torch.session.random_streams import mix
from weft.transport.rings import Rings


def rings_of(group: Any, device: torch.device) -> Rings | None:
    """Memory for sends between the CPU ranks of a group that share a host; every rank of the group calls this."""
    return Rings.connect(group) if device.type == "cpu" else None


def choose_device(place: Place) -> torch.device:
    """CUDA device ``local_rank`` where there are GPUs (shared when there are fewer than ranks), else the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count():
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def gpu_of(device: torch.device) -> str:
    """A name for a GPU that no other one has, whatever number it has for a process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def have_own_gpus(device: torch.device, group: Any) -> bool:
    """True if no two ranks of the group share a GPU; every rank calls this. ``None``: a process by itself."""
    if group is None:
        return True
    own = torch.tensor([mix(gpu_of(device))])
    return len(set(gather_rows(own, group).view(-1).tolist())) == dist.get_world_size(group)


def direct_groups(
    mesh: Mesh, rank: int, device: torch.device, timeout: timedelta
) -> dict[tuple[int, int], Any]:
    """NCCL groups by (sender, receiver) position in this rank's pipeline, one for each direction of each pair.

    Every rank calls this. NCCL refuses ranks that share a GPU: their tensors go through host memory.
    """
    direct: dict[tuple[int, int], Any] = {}
    for ranks in mesh.groups("pp"):
        for sender, receiver in itertools.permutations(ranks, 2):
            pair = sorted((sender, receiver))
            group = dist.new_group(pair, timeout, "nccl", device_id=device)
            if rank in (sender, receiver):
                direct[ranks.index(sender), ranks.index(receiver)] = group
    return direct


_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_NAMES = ("mkl_thread_free_buffers", "mkl_serv_thread_free_buffers")
"""Functions that give back the memory of the calling thread: as MKL documents it, and as PyTorch's own builds have
it."""


def find_release() -> Callable[[], None]:
    """A function that gives back the memory in which the calling thread packs operands of matrix products.

    It does nothing where there is no MKL, which multiplies matrices in PyTorch's builds for Intel and AMD processors.
    MKL keeps such memory for each thread. Microbatches are threads of which one runs at a time. Each would have
    megabytes of its own, and would find them in no cache when its turn comes. A thread that gives its memory back with
    the turn leaves it to the next thread, still in the cache.
    """
    try:
        library = ctypes.CDLL(str(_LIBRARY))
    except OSError:
        return lambda: None
    for name in _NAMES:
        if hasattr(library, name):
            release: Callable[[], None] = getattr(library, name)
            release.argtypes, release.restype = (), None  # type: ignore[attr-defined]
            return release
    return lambda: None


def limit_bytes(session: Any) -> float | None:
    """The bytes that a rank may take; None where neither the setting nor a GPU limits it."""
    if session.settings.memory_limit:
        return float(session.settings.memory_limit * 2**30)
    if session.rehearsal is not None:
        return float(session.rehearsal.machines.host.accelerator.memory_bytes)
    if session.device.type == "cuda":
        return float(torch.cuda.get_device_properties(session.device).total_memory)
    return None


def device_bytes(session: Any) -> float:
    """The bytes that a rank has: by the setting, its GPU's, or its part of the host's (or control group's)."""
    limited = limit_bytes(session)
    if limited is not None:
        return limited
    return float(host_bytes(session.place.local_size))
