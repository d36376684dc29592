"""Programs with one habit each give what one process gives, bit for bit but for rounding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.habits import FRAME, HABITS
from tests.fuzz.run import Ranks, ranks
from tests.long import one_in


@pytest.fixture(scope="module")
def job() -> Iterator[Ranks]:
    with ranks() as made:
        yield made


@pytest.mark.parametrize("habit", one_in(8, HABITS))
def test_the_program_gives_what_one_process_gives(job: Ranks, habit: str):
    """With a schedule that takes weights' gradients out of the backward pass, too."""
    source = FRAME + HABITS[habit]
    later = source.replace('"microbatches": 2', '"microbatches": 4, "pipeline": "zb_h1"').replace(
        "= 3, 4, F", "= 3, 8, F"
    )
    assert later.count("zb_h1") == later.count("= 3, 8, F") == 1
    for each in (source, later):
        outcome = job.run(each, 2)
        assert outcome.word == "equal", outcome
