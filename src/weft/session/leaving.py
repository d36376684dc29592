"""The end of a job on one rank, for any framework."""

from __future__ import annotations

from collections.abc import Sequence

from weft.session import recording
from weft.session.session import Session
from weft.transport.channel import Channel


def leave(session: Session, channels: Sequence[Channel]) -> None:
    """Close all that a session has opened, together with the other ranks. ``channels``: the pipeline's is the first."""
    for shown in (session.progress, session.values):
        if shown is not None:
            shown.close()
    if not session.broken:
        session.monitor.note("wait", session.steps, None, "weft.shutdown")
        for channel in channels:
            channel.flush()
        session.monitor.note("", session.steps)
    if session.executor is not None:
        session.executor.close()
    recording.stop(session, channels[0] if channels else None)
    if session.findings is not None:
        session.findings.close()
        session.tell_findings(None)
    together = session.monitor.finish()
    for channel in channels:
        channel.close()
    for channel in channels if together else ():
        channel.join()
