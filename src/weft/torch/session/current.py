"""The present session of a PyTorch process."""

from __future__ import annotations

from typing import cast

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
