"""A job that is resumed goes on as the uninterrupted one would have, on any number of ranks; see `checkpoints.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launching import run_script
from tests.long import drawn, long

from .checkpoints import KINDS, RESUMING, Layout, sources


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kinds", "layouts"),
    [(drawn(3, KINDS), drawn(5, RESUMING)), pytest.param(KINDS, RESUMING, marks=long)],
    ids=["some", "all"],
)
def test_a_layout_resumes_from_another(kinds: Sequence[str], layouts: Sequence[Layout], tmp_path: Path):
    told = run_script(Path(__file__).parent / "checkpoints.py", str(tmp_path), *kinds, *map(str, layouts))
    assert told.count(" -> ") == sum(len(sources(layout, kind)) for layout in layouts for kind in kinds)
