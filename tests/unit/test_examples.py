"""Every example runs on two processes, and learns: each ends with an error if its loss does not fall."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))
OPTIONS = {"gpt_demo.py": ["--quick", "--out", "."]}


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs(name, tmp_path):
    command = [sys.executable, "-m", "weft", "run", "-n", "2", str(FOLDER / name), *OPTIONS.get(name, [])]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    if name == "gpt_demo.py":
        assert (tmp_path / "demo-step.svg").read_text().startswith("<svg")


def test_each_is_listed_and_short():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in EXAMPLES:
        assert f"`weft run -n 2 examples/{name}`" in page
        assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) <= 120
