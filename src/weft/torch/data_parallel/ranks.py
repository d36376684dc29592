"""Rank and size of this process, and ``init_process_group`` under every launcher.

PyTorch itself asks for torchrun's variables, and mpirun does not give ranks their number in the way that PyTorch reads.
Where MASTER_ADDR is not set, or ``weft run`` has set it, the ranks find each other as ``weft.init`` does: by a store
that only they can reach.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft.errors import LaunchError
from weft.launch import rendezvous
from weft.launch.discovery import Place, discover, master_given
from weft.launch.rendezvous import locate
from weft.transport.private_c10d import rendezvous_handlers


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
    """This process's number on its host: the number of its GPU. Collective if no launcher gives it."""
    return _located().local_rank


def local_size() -> int:
    """The number of processes on this host. Collective if no launcher gives it."""
    return _located().local_size


def _located() -> Place:
    place = locate(discover(os.environ))
    if not place.local_size:
        raise LaunchError(
            "the launcher does not say which processes share a host: call torch.distributed.init_process_group() "
            "before local_rank() and local_size(), or set LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return place


METHOD = "weft"
TIMEOUT = timedelta(seconds=300)
_registered = False


def find_ranks() -> None:
    """Register the init method ``weft://``, and have the default one fall back on it; again does nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    dist.register_rendezvous_handler(METHOD, _find)
    handlers = rendezvous_handlers()
    by_variables = handlers["env"]

    def either(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        launched = discover(os.environ).launched and not master_given(os.environ)
        return (_find if launched else by_variables)(url, *args, **kwargs)

    handlers["env"] = either


def _find(url: str, timeout: timedelta = TIMEOUT, **kwargs: Any) -> Iterator[Any]:
    place = discover(os.environ)
    store = rendezvous.connect(place, timeout)
    rendezvous.choose_interface(place)
    yield store, place.rank, place.world_size
    raise RuntimeError("the ranks have found each other already")
