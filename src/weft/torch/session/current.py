"""The present session of a PyTorch process, and its ``torch.distributed`` groups for every axis of the mesh."""

from __future__ import annotations

from typing import Any, cast

from weft.errors import UsageError
from weft.session import current
from weft.session.current import enter as enter
from weft.session.current import is_initialized as is_initialized
from weft.session.current import is_tracing as is_tracing
from weft.session.current import leave as leave
from weft.torch.session.session import Session


def present() -> Session | None:
    """The present session, if there is one."""
    return cast("Session | None", current.present())


def session() -> Session:
    """The present session.

    Raises:
        UsageError: There is none, or it is that of another framework.
    """
    found = current.session()
    if not isinstance(found, Session):
        raise UsageError(
            "this process was initialised by weft.tensorflow: use that one alone, or weft.torch alone"
        )
    return found


def get_world_process_group() -> Any:
    """The ``torch.distributed`` group of all ranks; ``None`` for a single process."""
    session().need_all_replicas("the process group of world")
    return session().group("world")


def get_pp_process_group() -> Any:
    """The ``torch.distributed`` group of this process's pipeline."""
    return session().group("pp")


def get_tp_process_group() -> Any:
    """The ``torch.distributed`` group behind :func:`get_tp_group`."""
    return session().group("tp")


def get_rdp_process_group() -> Any:
    """The ``torch.distributed`` group behind :func:`get_rdp_group`."""
    session().need_all_replicas("the process group of rdp")
    return session().group("rdp")


def get_dp_process_group() -> Any:
    """The ``torch.distributed`` group behind :func:`get_dp_group`."""
    session().need_all_replicas("the process group of dp")
    return session().group("dp")


def get_mp_process_group() -> Any:
    """The ``torch.distributed`` group behind :func:`get_mp_group`."""
    return session().group("mp")
