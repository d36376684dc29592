"""``smp.core``: ranks, sizes and barriers, where some scripts look for them."""

from weft.compat.tensorflow.interface import (
    barrier,
    dp_barrier,
    dp_rank,
    dp_size,
    local_rank,
    local_size,
    mp_barrier,
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

__all__ = [
    "barrier", "dp_barrier", "dp_rank", "dp_size", "local_rank", "local_size", "mp_barrier", "mp_rank", "mp_size",
    "pp_rank", "pp_size", "rank", "rdp_rank", "rdp_size", "size", "tp_rank", "tp_size",
]  # fmt: skip
