"""The figures of docs/schedules.md are those of the schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.schedule.clock import by_kind, run
from weft.schedule import CHUNKS, NAMES, in_flight, make

PAGE = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text(encoding="utf-8")


def line(name: str) -> str:
    schedule = make(name, 4, 8)
    chunks = schedule.stages // 4
    held = max(map(in_flight, schedule.ranks)) / chunks
    step = run(schedule, by_kind({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})).step / chunks
    return f"| `{name}` | {held:g} | {step:g} | {1 - 24 / step:.3f} |"


@pytest.mark.parametrize("name", CHUNKS)
def test_figures(name: str):
    assert line(name) in PAGE.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_in_the_table(name: str):
    assert f"\n| `{name}` | " in PAGE
