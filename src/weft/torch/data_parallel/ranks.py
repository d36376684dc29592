"""Rank and size of this process, as the interface of data parallelism names them."""

from __future__ import annotations

import os

import torch.distributed as dist

from weft.errors import LaunchError
from weft.launch.discovery import Place, discover
from weft.launch.rendezvous import locate


def is_available() -> bool:
    """True if ranks can talk to each other: ``torch.distributed`` was built with gloo."""
    return dist.is_available() and dist.is_gloo_available()


def is_initialized() -> bool:
    """True if the default process group has been made."""
    return is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number among all; before ``init_process_group`` as the launcher says."""
    return dist.get_rank() if dist.is_initialized() else discover(os.environ).rank


def size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else discover(os.environ).world_size


def local_rank() -> int:
    """This process's number on its host: the number of its GPU. Collective if no launcher has told it."""
    return _located().local_rank


def local_size() -> int:
    """The number of processes on this host. Collective if no launcher has told it."""
    return _located().local_size


def _located() -> Place:
    place = locate(discover(os.environ))
    if not place.local_size:
        raise LaunchError(
            "the launcher does not tell which processes share a host: call torch.distributed.init_process_group() "
            "before local_rank() and local_size(), or set LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return place
