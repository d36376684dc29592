"""``init``, and which of the replicas this process is."""

from __future__ import annotations

from weft.errors import UsageError
from weft.session.current import is_initialized
from weft.session.ranks import local_rank, local_size
from weft.session.ranks import rdp_rank as rank
from weft.session.ranks import rdp_size as size
from weft.tensorflow import join
from weft.tensorflow.join import shutdown


def init() -> None:
    """Join the job. Every process calls this first, before TensorFlow computes anything.

    Raises:
        UsageError: This process is in a job already.
    """
    if is_initialized():
        raise UsageError(
            "init() called more than once: this process has joined its job, leave the second call out"
        )
    join.init()


__all__ = ["init", "local_rank", "local_size", "rank", "shutdown", "size"]
