"""The ``torch.distributed`` groups of this process, for every axis of the mesh."""

from __future__ import annotations

from typing import Any

from weft.torch.session.current import session


def get_world_process_group() -> Any:
    """The ``torch.distributed`` group of all ranks; ``None`` for a single process."""
    return session().group("world")


def get_pp_process_group() -> Any:
    """The ``torch.distributed`` group of this process's pipeline."""
    return session().group("pp")


def get_tp_process_group() -> Any:
    """The ``torch.distributed`` group behind :func:`get_tp_group`."""
    return session().group("tp")


def get_rdp_process_group() -> Any:
    """The ``torch.distributed`` group behind :func:`get_rdp_group`."""
    return session().group("rdp")


def get_dp_process_group() -> Any:
    """The ``torch.distributed`` group behind :func:`get_dp_group`."""
    return session().group("dp")


def get_mp_process_group() -> Any:
    """The ``torch.distributed`` group behind :func:`get_mp_group`."""
    return session().group("mp")
