"""``init_process_group`` under every launcher: PyTorch itself asks for torchrun's variables.

mpirun does not tell ranks their number in the way that PyTorch reads. Where MASTER_ADDR is not set, or ``weft run`` has
set it, the ranks find each other as ``weft.init`` does: by a store that only they can reach.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft.launch import rendezvous
from weft.launch.discovery import discover, master_told
from weft.transport.private_c10d import rendezvous_handlers

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
        launched = discover(os.environ).launched and not master_told(os.environ)
        return (_find if launched else by_variables)(url, *args, **kwargs)

    handlers["env"] = either


def _find(url: str, timeout: timedelta = TIMEOUT, **kwargs: Any) -> Iterator[Any]:
    place = discover(os.environ)
    store = rendezvous.connect(place, timeout)
    rendezvous.choose_interface(place)
    yield store, place.rank, place.world_size
    raise RuntimeError("the ranks have found each other already")
