"""The report names what was planted into a real job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planted.jobs import JOBS, faults, found_in

QUICK = [name for name, planted in JOBS.items() if planted.quick]


@pytest.mark.parametrize("name", QUICK)
def test_the_verdict_is_what_was_planted(name: str, tmp_path: Path):
    JOBS[name].run(tmp_path / "out")
    told, findings = found_in(tmp_path / "out")
    assert faults(JOBS[name], told, findings) == []
