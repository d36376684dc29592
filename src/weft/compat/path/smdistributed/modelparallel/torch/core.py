"""``smp.core``: ranks, sizes and barriers, where some scripts look for them."""

from typing import Any

from weft.compat.later import later
from weft.compat.modelparallel.interface import (
    dp_rank,
    dp_size,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from weft.compat.refused import refuse_unknown

__all__ = [
    "dp_rank",
    "dp_size",
    "local_rank",
    "local_size",
    "mp_rank",
    "mp_size",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "size",
    "tp_rank",
    "tp_size",
]


def __getattr__(name: str) -> Any:
    if name in ("barrier", "dp_barrier", "mp_barrier"):
        return later(name)
    return refuse_unknown(__name__, name)
