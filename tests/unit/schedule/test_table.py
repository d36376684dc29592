"""Schedules by name: what the table says is what the generators do."""

from __future__ import annotations

import itertools
import re

import pytest

from weft.errors import ScheduleError
from weft.schedule import CHUNKS, make, rank_of_stage


@pytest.mark.parametrize("name", CHUNKS)
def test_ranks_of_stages_are_those_of_the_actions(name: str):
    for ranks, chunks in itertools.product((1, 2, 3, 8), (None, 1, 2, 3, 4)):
        try:
            made = make(name, ranks, 1, chunks=chunks).rank_of_stage
        except ScheduleError as error:
            with pytest.raises(ScheduleError, match=re.escape(str(error))):
                rank_of_stage(name, ranks, chunks)
        else:
            assert rank_of_stage(name, ranks, chunks) == made
