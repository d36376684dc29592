"""A few rows of the table of faults; `make faults` runs all of them."""

from __future__ import annotations

import pytest

from tests.fault.matrix import page
from tests.fault.matrix.strike import strike, why_not
from tests.fault.matrix.table import ENGINES, FAULTS, MOMENTS, SPANNING, Row, rows
from tests.long import one_in


@pytest.mark.parametrize("row", one_in(5, SPANNING), ids=str)
def test_a_fault_at_a_moment(row: Row):
    reason = why_not(row)
    if reason:
        pytest.skip(reason)
    found = strike(row)
    assert not found.problem, f"{found.problem}\n{found.said}"


def test_the_table_has_every_launcher_fault_and_moment():
    found = rows()
    assert len({*found}) == len(found)
    assert {*SPANNING} <= {*found}
    assert {row.engine for row in found} == {*ENGINES}
    assert {row.fault for row in found} == {*FAULTS}
    assert {row.moment for row in found} == {*MOMENTS}


def test_the_page_shows_what_went_wrong():
    good, bad = Row("local", 2, "SIGKILL", "step"), Row("mpirun", 3, "SIGKILL", "step")
    text = page.table({good: ("", 0.5), bad: ("exit code 0", 0.2)})
    assert text.splitlines()[2] == "| SIGKILL | step | 0.5 s | | **3 ranks: exit code 0** | | |"


def test_rows_that_were_not_run_stay_on_the_page():
    former = page.table(
        {Row("local", 2, "SIGKILL", "step"): ("", 0.5), Row("mpirun", 2, "exit 0", "step"): ("", 1.0)}
    )
    text = page.table({Row("mpirun", 2, "SIGKILL", "step"): ("", 2.0)}, former)
    assert text.splitlines()[2:] == [
        "| SIGKILL | step | 0.5 s | | 2.0 s | | |",
        "| exit 0 | step | | | 1.0 s | | |",
    ]
