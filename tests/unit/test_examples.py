"""Every example runs on two processes, and learns: each ends with an error if its loss does not fall."""

import os
from pathlib import Path

import pytest

from tests import warm

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))
OPTIONS = {"gpt_demo.py": ["--quick", "--out", "."]}


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs(name, tmp_path):
    arguments = ["run", "-n", "2", str(FOLDER / name), *OPTIONS.get(name, [])]
    code, output = warm.run(arguments, {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path, timeout=400)
    assert code == 0, output
    if name == "gpt_demo.py":
        assert (tmp_path / "demo-step.svg").read_text().startswith("<svg")


def test_each_is_listed_and_short():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in EXAMPLES:
        assert f"`weft run -n 2 examples/{name}`" in page
        assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) <= 120
