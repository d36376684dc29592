"""A job that is resumed goes on as the uninterrupted one would have, on any number of ranks; see `checkpoints.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_script


@pytest.mark.timeout(1200)
def test_a_layout_resumes_from_another(tmp_path: Path):
    told = run_script(Path(__file__).parent / "checkpoints.py", str(tmp_path))
    assert told.count(" -> ") == 6 * 8 + 4 * 4
