from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.unit.schedule.cases import Case, any_case
from weft.errors import FormatError
from weft.schedule import from_csv, to_csv
from weft.schedule.file import to_csv_with_transfers


@given(any_case())
@settings(deadline=None)
def test_csv_reads_back(case: Case):
    read = from_csv(to_csv(case.schedule))
    assert (read.ranks, read.rank_of_stage) == (case.schedule.ranks, case.schedule.rank_of_stage)


@given(any_case())
@settings(max_examples=40, deadline=None)
def test_csv_with_transfers_reads_back(case: Case):
    read = from_csv(to_csv_with_transfers(case.schedule))
    assert (read.ranks, read.rank_of_stage) == (case.schedule.ranks, case.schedule.rank_of_stage)


def test_what_is_left_out():
    text = '0UNSHARD,0F0,"0SEND_F0",, 0RECV_B0 ,0B0,0RESHARD,0REDUCE_GRAD0\r\n1RECV_F0,1F0,1B0,1SEND_B0\r\n'
    assert [list(map(str, row)) for row in from_csv(text).ranks] == [["0F0", "0B0"], ["1F0", "1B0"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no line; write one a rank, for example 0F0,0B0"),
        ("0F0,x\n", r'line 1, cell 2: "x" is not an action: write stage, kind and microbatch'),
        ("0F0\n\n", "line 2: rank 1 does nothing, remove the line"),
        ("0F0\n1F0,0B0\n", "line 2: stage 0 is on rank 0 already"),
        ("0F0\n3F0\n", "there is no action of the stages 1, 2, but of stage 3"),
        (
            "0F0,(0F1;0B0)OVERLAP_F_B\n",
            r'line 1, cell 2: "\(0F1;0B0\)OVERLAP_F_B" overlaps a forward and a backward, which weft does not; '
            "write them as two cells",
        ),
        ("y\nz\n", "line 1, cell 1: .*; line 2, cell 1: .*; line 1: rank 0 does nothing"),
    ],
)
def test_faults(text: str, message: str):
    with pytest.raises(FormatError, match=f"^this is not a schedule as CSV: {message}"):
        from_csv(text)
