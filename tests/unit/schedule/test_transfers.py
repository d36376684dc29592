from __future__ import annotations

import pytest

from weft.errors import ScheduleError
from weft.schedule import from_csv, make
from weft.schedule.transfers import with_transfers


def test_two_ranks():
    assert [" ".join(map(str, row)) for row in with_transfers(make("1f1b", 2, 2))] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_nothing_travels_within_a_rank():
    rows = with_transfers(make("zbv", 2, 1))
    sent = [str(action) for row in rows for action in row if action.kind.startswith("SEND")]
    assert sorted(sent) == ["0SEND_F0", "1SEND_B0", "2SEND_F0", "3SEND_B0"]


def test_what_is_not_legal():
    with pytest.raises(ScheduleError, match="0B0 needs 0F0"):
        with_transfers(from_csv("0B0,0F0"))
