"""Hands findings of the rules to a script while it runs: at most once a minute, and at the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from weft.errors import UsageError
from weft.profiler.live.following import Follower, Judged
from weft.rules.rule import FOUND, Finding, Status
from weft.session import current
from weft.untrusted import shown

EVERY_S = 60.0
_LEAVE_S = 10.0
_log = logging.getLogger("weft")


def on_finding(call: Callable[[Finding], object]) -> None:
    """Call ``call`` with what slows the job down, while it runs. Every rank may call this; the first one reports.

    Once a minute at most, and at the end, the rules are asked about the last steps. ``call`` gets each finding once
    (its `rule`, `status`, `text` and `advice`), and again if it became worse; consequences of others are left out.
    It runs in a thread of its own, so it must not call weft or collectives. What it raises is logged.

    Raises:
        UsageError: Nothing is recorded, so there is nothing to judge.
    """
    session = current.session()
    if not callable(call):
        raise UsageError(f"on_finding was given {shown(call)}: give it a function that takes a finding")
    if not session.settings.record:
        raise UsageError(
            "on_finding judges the recording, and there is none: weft run --record FOLDER, or the setting record"
        )
    if session.rank:
        return
    session.views.report_findings(None)
    session.views.report_findings(FindingsReporter(Path(session.settings.record), call))


class FindingsReporter:
    """Looks at a recording now and then, in a thread.

    Args:
        folder: That of the recording.
        call: Called with each finding.
        judged: Who asks the rules.
        every_s: Seconds between two looks.
    """

    def __init__(
        self,
        folder: Path,
        call: Callable[[Finding], object],
        judged: Judged | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self._follower, self._call = Follower(folder), call
        self._judged = judged or Judged(every_s=0.0)
        self._every_s = every_s
        self._reported: dict[str, Status] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-findings", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """One last look."""
        self._stop.set()
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        ends = False
        while not ends:
            ends = self._stop.wait(self._every_s)
            try:
                for finding in self._judged.of(self._follower.look()):
                    self._report(finding)
            except Exception:  # the script's own, or a recording that cannot be
                _log.warning("on_finding: it failed", exc_info=True)

    def _report(self, finding: Finding) -> None:
        before = self._reported.get(finding.rule)
        worse = before is None or FOUND.index(finding.status) > FOUND.index(before)
        if worse and not finding.explained_by:
            self._reported[finding.rule] = finding.status
            self._call(finding)
