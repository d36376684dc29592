"""Programs with one habit each give what one process gives, bit for bit but for rounding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.habits import FRAME, HABITS
from tests.fuzz.run import Ranks, ranks


@pytest.fixture(scope="module")
def job() -> Iterator[Ranks]:
    with ranks() as made:
        yield made


@pytest.mark.parametrize("habit", HABITS)
def test_the_program_gives_what_one_process_gives(job: Ranks, habit: str):
    outcome = job.run(FRAME + HABITS[habit], 2)
    assert outcome.word == "equal", outcome
