"""A model twice as big as fits into a process's limit trains when it is split; see `limited.py`.

A layer has 4 MiB, and AdamW four times that: parameters, gradients and two moments.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.launching import Completed, run_ranks
from tests.long import long

from .jobs import ROOT

JOB = Path(__file__).parent / "limited.py"
ALLOWANCE_MIB = 400
FITS, TOO_LARGE = 21, 26

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's limits and /proc")


def trained(layers: int, partitions: int) -> Completed:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    arguments = ["--partitions", partitions, "--layers", layers, "--allowance", ALLOWANCE_MIB]
    return run_ranks(partitions, JOB, [*map(str, arguments)], env={"PYTHONPATH": path}, timeout=400)


def test_what_fits_trains_alone():
    assert f"trained {4 * FITS} MiB" in trained(FITS, 1).check().stdout


def test_what_does_not_fit_fails_alone():
    done = trained(TOO_LARGE, 1)
    assert done.returncode != 0 and "allocate memory" in done.stderr, done.stderr


@long
def test_twice_what_does_not_fit_trains_split_in_four():
    done = trained(2 * TOO_LARGE, 4).check()
    assert done.stdout.count(f"trained {8 * TOO_LARGE} MiB") == 4
