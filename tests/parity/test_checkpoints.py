"""A job that is resumed goes on as the uninterrupted one would have, on any number of ranks; see `checkpoints.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launching import run_ranks

from .jobs import ROOT

JOB = Path(__file__).parent / "checkpoints.py"

# Name of the layout -> ranks, partitions, more arguments. Each resumes from the first and the one before it.
LAYOUTS = {
    "two": (2, 2, ()),
    "two again": (2, 2, ()),
    "two by two": (4, 2, ()),
    "three": (3, 3, ()),
    "by hand": (2, 2, ("--by-hand",)),
    "one": (1, 1, ()),
}


@pytest.mark.timeout(1200)
def test_a_layout_resumes_from_another(tmp_path: Path):
    earlier: list[str] = []
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    for name, (ranks, partitions, more) in LAYOUTS.items():
        given = [
            str(tmp_path),
            name,
            "--partitions",
            str(partitions),
            *more,
            "--from",
            *dict.fromkeys([*earlier[:1], *earlier[-1:]]),
        ]
        done = run_ranks(ranks, JOB, given, env={"PYTHONPATH": path}, timeout=500).check()
        assert done.stdout.count("passed") == ranks
        earlier.append(name)
