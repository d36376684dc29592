"""Lightning Fabric with a split model gives what it gives in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run_ranks

pytest.importorskip("lightning")

JOB = Path(__file__).parent / "jobs" / "fabric_job.py"
QUIET = {"PYTHONWARNINGS": "ignore"}


@pytest.mark.parametrize("copies, precision", [(1, "32-true"), (1, "bf16-mixed"), (2, "32-true")])
def test_as_in_one_process(copies: int, precision: str, tmp_path: Path):
    """With two replicas each reads every other row of a batch."""
    run_ranks(1, JOB, [str(tmp_path), "0", "4", precision], warm=True, env=QUIET).check()
    run_ranks(
        2 * copies, JOB, [str(tmp_path), "2", str(4 // copies), precision], warm=True, env=QUIET
    ).check()
    plain = json.loads((tmp_path / "plain-0.json").read_text())
    within = 0.03 if precision == "bf16-mixed" else 1e-5
    for rank in range(2 * copies):
        mine = json.loads((tmp_path / f"weft-{rank}.json").read_text())
        assert mine["losses"] == pytest.approx(plain["losses"], rel=within, abs=within)
        assert mine["sums"] == pytest.approx(plain["sums"], rel=within, abs=within)
        assert mine["seen"] == plain["seen"] and mine["told"] == "rank 0"
    logs = [len(next(path.rglob("metrics.csv")).read_text().splitlines()) for path in
            (tmp_path / "plain", tmp_path / "weft")]  # fmt: skip
    assert logs[0] == logs[1]


REFUSED = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import weft.torch as weft
from lightning.fabric import Fabric
case = sys.argv[1]
if case == "other":
    from weft.integrations.lightning import WeftStrategy
else:
    from weft.integrations.fabric import WeftStrategy
fabric = Fabric(accelerator="cpu", strategy=WeftStrategy(2, 2), precision="16-true" if case == "half" else None)
fabric.launch()
net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
kind = torch.optim.LBFGS if case == "lbfgs" else torch.optim.SGD
model, optimizer = fabric.setup(net, kind(net.parameters(), 0.1))
if case == "two":
    fabric.setup(torch.nn.Linear(1, 1))
    fabric.backward(torch.ones(1, requires_grad=True).sum())
if case == "outside":
    fabric.backward(torch.ones(1, requires_grad=True).sum())
"""
REASONS = {
    "other": "WeftStrategy, for the Trainer; Fabric's is weft.integrations.fabric's",
    "half": "WeftStrategy cannot train with precision='16-true': choose one of 32-true, bf16-mixed",
    "lbfgs": "LBFGS looks at all parameters at once",
    "two": "does not know which of 2 models: fabric.backward(loss, model=model)",
    "outside": "the model is split: call it, and fabric.backward(), in a function decorated with @weft.step",
}


@pytest.mark.parametrize("case", REASONS)
def test_what_cannot_be_honoured_is_refused_by_name(case: str):
    done = run_ranks(2, REFUSED, [case], warm=True, env=QUIET)
    assert done.returncode == 1 and REASONS[case] in done.stderr, done.stderr
