"""Ranks that a script names."""

from __future__ import annotations

from typing import Any

import pytest

import weft.torch as weft
from weft.errors import UsageError


@pytest.mark.parametrize("number", [-1, 1, 0.0, "0"])
def test_a_rank_that_is_not_there_is_refused(number: Any):
    weft.init({})
    try:
        with pytest.raises(UsageError, match=rf"src_rank is {number!r}, but WORLD_RANK counts from 0 to 0"):
            weft.recv_from(number, weft.RankType.WORLD_RANK)
        with pytest.raises(UsageError, match=rf"dest_rank is {number!r}, but WORLD_RANK counts from 0 to 0"):
            weft.send(1, number, weft.RankType.WORLD_RANK)
    finally:
        weft.shutdown()
