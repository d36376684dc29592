"""The page of schedules shows every schedule as it is now."""

from __future__ import annotations

import pytest

from tests.golden.gallery import DRAWN, FOLDER, PAGE, drawn, simulated
from weft.schedule import CHUNKS

TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DRAWN)
def test_picture_is_current_and_shown(name: str):
    kept = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == drawn(name), "if the change is meant, run `python -m tests.golden.gallery` and look"
    section = TEXT.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    assert f"![{name}](images/schedules/{name}.svg)" in section


def test_no_picture_is_left_over():
    assert {path.stem for path in FOLDER.iterdir()} == set(DRAWN)


@pytest.mark.parametrize("name", CHUNKS)
def test_all_do_the_same_work(name: str):
    """So that lengths can be compared: 8 microbatches of 3 ms on each rank."""
    timeline = simulated(name)
    assert [timeline.busy_s(rank) for rank in timeline.ranks] == pytest.approx([0.024] * 4)
