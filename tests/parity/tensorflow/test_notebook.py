"""A function of a notebook that uses TensorFlow runs on ranks, with the notebook's models, tensors and source."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("cloudpickle", reason="cloudpickle is not installed: pip install 'weft[notebook]'")

from tests.launching import ROOT, SOURCE, _environ  # noqa: E402
from tests.long import long  # noqa: E402

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)])}


@long
def test_a_function_with_tensorflow_runs_on_ranks():
    command = [sys.executable, str(Path(__file__).with_name("notebook.py"))]
    done = subprocess.run(command, env=_environ(QUIET), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "as expected" in done.stdout
    assert "AutoGraph could not" not in done.stdout + done.stderr
