"""The present session: every function of the interface finds the job by it."""

from __future__ import annotations

from weft.errors import UsageError
from weft.session.session import Session

_session: Session | None = None


def enter(session: Session) -> None:
    """From now on this process is in a job."""
    global _session
    _session = session


def leave() -> None:
    """From now on this process is in no job."""
    global _session
    _session = None


def present() -> Session | None:
    """The present session, if there is one."""
    return _session


def session() -> Session:
    """The present session; :class:`UsageError` before ``init``."""
    if _session is None:
        raise UsageError("weft is not initialised: call weft.init(...) first, before anything else of weft")
    return _session


def is_initialized() -> bool:
    """True if :func:`init` was called in this process, and :func:`shutdown` not since."""
    return _session is not None


def is_tracing() -> bool:
    """True if the step only rehearses: it is measured, or compared with one process."""
    if _session is None or not _session.tracing:
        return False
    _session.asked = True
    return True
