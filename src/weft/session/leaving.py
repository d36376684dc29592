"""The end of a job on one rank, for any framework."""

from __future__ import annotations

from collections.abc import Sequence

from weft.session import recording
from weft.session.session import Session
from weft.transport.channel import Channel


def finish_saving(session: Session) -> None:
    """Wait for the save of a session that goes on beside the training; its error is raised."""
    if session.saves is not None and session.saves.pending is not None:
        with session.doing("the last save"):
            try:
                session.saves.finish()
            except Exception as error:
                session.monitor.locate(error)
                raise


def finish_at_the_end(session: Session) -> None:
    """The same when the script has ended, so nobody else can make the job fail."""
    try:
        finish_saving(session)
    except Exception as error:
        session.monitor.end_with(error)


def leave(session: Session, channels: Sequence[Channel]) -> None:
    """Close all that a session has opened, together with the other ranks. ``channels``: the pipeline's is the first."""
    if session.saves is not None:
        session.saves.close()
    session.views.close()
    if not session.broken:
        session.monitor.note("wait", session.steps, None, "weft.shutdown")
        for channel in channels:
            channel.flush()
        session.monitor.note("", session.steps)
    if session.executor is not None:
        session.executor.close()
    recording.stop(session, channels[0] if channels else None)
    session.views.report_findings(None)
    all_finished = session.monitor.finish()
    for channel in channels:
        channel.close()
    for channel in channels if all_finished else ():
        channel.join()
