"""Values of a session: decisions, facts of recordings, views."""

from __future__ import annotations

from typing import Any

from weft.config import Settings
from weft.session.state import Decisions, Process, Recorded, Views


class Closed:
    """Something that remembers when it was closed."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name, self._told = name, told

    def close(self) -> None:
        self._told.append(self._name)


def test_decisions_that_other_settings_confirm_stay() -> None:
    decided = Decisions({"optimize", "microbatches"}, "they fit", chosen=(chosen := object()))  # type: ignore[arg-type]
    assert decided.chosen is chosen
    old = Settings(microbatches=8, optimize="memory")
    decided.follow_settings(old, Settings(microbatches=4, optimize="memory"))
    assert decided == Decisions({"optimize"}, last_number=8)
    decided.follow_settings(Settings(microbatches="auto"), old)
    assert decided.last_number == 8, "settings that leave the number open do not say another one"


def test_memory_beside_the_models_is_never_below_nothing() -> None:
    recorded = Recorded(Process("cuda:0", limit_bytes=100))
    recorded.note_base(-5)
    assert recorded.process == Process("cuda:0", limit_bytes=100, base_bytes=0)
    recorded.note_base(7)
    assert recorded.process.base_bytes == 7


def test_findings_are_told_after_the_other_views_have_closed() -> None:
    told: list[str] = []
    made: Any = {name: Closed(name, told) for name in ("progress", "values", "findings")}
    views = Views(**made)
    views.close()
    assert told == ["progress", "values"]
    views.report_findings(later := Closed("later findings", told))
    assert told[2:] == ["findings"] and views.findings is later
    views.report_findings(None)
    assert told[3:] == ["later findings"] and views.findings is None
    Views().close()
