"""Every example runs, and learns: each ends with an error if its loss does not fall."""

import os
from pathlib import Path

import pytest

from tests import warm
from tests.long import long, one_day_in, one_in
from tests.parity.tensorflow import jobs
from tests.unit.test_docs import needs_tensorflow

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))
KERAS = [name for name in EXAMPLES if needs_tensorflow((FOLDER / name).read_text(encoding="utf-8"))]
OTHERS = [name for name in EXAMPLES if name not in KERAS]
RANKS = {"train_hybrid.py": 4}
OPTIONS = {"gpt_demo.py": ["--quick", "--out", "."]}
LONGER = {"gpt_demo.py": 120, "train_lightning.py": 90}
"""What is not there to be copied may have more lines."""


NEEDS = {"train_grpo.py": "trl"}
"""What is only there with `pip install weft[integrations]`."""


def run(folder, name, *options, ranks=None):
    """Exit code and output."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    arguments = ["run", "-n", str(ranks or RANKS.get(name, 2)), str(FOLDER / name), *options]
    start = warm.run
    if name in KERAS:
        pytest.importorskip("tensorflow")
        start = jobs.run
    return start(arguments, {**os.environ, "OMP_NUM_THREADS": "1"}, folder, timeout=400)


@pytest.mark.parametrize("name", [*one_in(5, OTHERS), *(pytest.param(name, marks=long) for name in KERAS)])
def test_runs(name, tmp_path):
    code, output = run(tmp_path, name, *OPTIONS.get(name, []))
    assert code == 0, output
    if name == "gpt_demo.py":
        assert (tmp_path / "demo-step.svg").read_text().startswith("<svg")


def test_each_is_listed_and_short():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in EXAMPLES:
        assert f"`weft run -n {RANKS.get(name, 2)} examples/{name}`" in page
        assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) <= LONGER.get(name, 80)


def losses(output):
    """What the first rank says of losses; lines of progress, which only long loops show, begin otherwise."""
    return [line.removeprefix("loss") for line in output.splitlines() if line.startswith("loss")]


@one_day_in(2)
def test_a_killed_run_ends_as_one_that_was_not(tmp_path):
    code, whole = run(tmp_path, "train_and_resume.py", "--folder", "whole")
    assert code == 0, whole
    code, output = run(tmp_path, "train_and_resume.py", "--folder", "killed", "--crash-at", "25")
    assert code == 128 + 9, output
    code, output = run(tmp_path, "train_and_resume.py", "--folder", "killed")
    assert code == 0, output
    assert "going on after step 20" in output
    assert losses(output) == losses(whole)
    assert "the exported model says 8" in output


def test_ddp_with_weft_is_the_plain_script_but_for_two_lines(tmp_path):
    plain, ours = (
        (FOLDER / name).read_text(encoding="utf-8").partition('\n"""\n')[2].splitlines()
        for name in ("ddp_plain.py", "ddp_with_weft.py")
    )
    changed = sorted(line for line in {*plain} ^ {*ours} if line)
    assert changed == [
        '    dist.init_process_group("gloo")',
        '    dist.init_process_group("weft")',
        "from torch.nn.parallel import DistributedDataParallel",
        "from weft.torch.data_parallel import DistributedDataParallel",
    ]
    found = [run(tmp_path, name) for name in ("ddp_plain.py", "ddp_with_weft.py")]
    assert [code for code, _ in found] == [0, 0]
    assert losses(found[0][1]) == losses(found[1][1]) != []
