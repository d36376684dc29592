"""accelerate with a split model gives what it gives in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import run_ranks

pytest.importorskip("accelerate")

JOB = Path(__file__).parent / "jobs" / "accelerate_job.py"
QUIET = {"PYTHONWARNINGS": "ignore"}


def found(folder: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return result


@pytest.mark.parametrize("copies", [1, 2])
def test_as_in_one_process(copies: int, tmp_path: Path):
    """With two replicas each reads every other batch, of half the size."""
    run_ranks(1, JOB, [str(tmp_path), "0", "4"], warm=True, env=QUIET).check()
    run_ranks(2 * copies, JOB, [str(tmp_path), "2", str(4 // copies)], warm=True, env=QUIET).check()
    plain = found(tmp_path, "plain-0")
    for rank in range(2 * copies):
        mine = found(tmp_path, f"weft-{rank}")
        assert (mine["main"], mine["copies"], mine["wrapped"]) == (rank == 0, copies, "DistributedModel")
        assert mine["losses"] == pytest.approx(plain["losses"], rel=1e-5, abs=1e-6)
        assert mine["seen"] == plain["seen"]
        place = mine["place"]
        longest = [0.0, 1.0, 2.0][: copies + 1]
        first = [*longest[: 2 + place], *[-1.0] * (copies - 1 - place)]
        last = [*[0.0] * (copies - 1 - place), *longest[: 2 + place]]
        assert mine["functions"] == [
            [0.0, 1.0][:copies], [0, "x", 1, "x"][: 2 * copies], copies - 1, (copies - 1) / 2, copies - 1, ["from 0"],
            [first], [last], ["row 0", "row 1"][:copies],
        ]  # fmt: skip
        assert mine["sums"] == pytest.approx(plain["sums"], rel=1e-5, abs=1e-6)
        assert mine["files"] == sorted(
            [*(f"random_states_{r}.pkl" for r in range(2 * copies)), *plain["files"][:-2], "scheduler.bin"]
        )


REFUSED = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import weft.torch as weft
weft.init({"partitions": 2, "microbatches": 2})
case = sys.argv[1]
if case == "late":
    import accelerate
    accelerate.Accelerator(cpu=True)
from weft.integrations.accelerate import Accelerator
accelerator = Accelerator(cpu=True, **({"mixed_precision": "fp16"} if case == "fp16" else {}))
if case == "model":
    accelerator.prepare(torch.nn.Linear(1, 1))
if case == "optimizer":
    accelerator.prepare(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1))
"""
REASONS = {
    "late": "accelerate has connected the processes already: make weft's Accelerator before anything else of it",
    "model": "prepare() got a plain Linear: wrap it first, weft.DistributedModel(model)",
    "optimizer": "prepare() got a plain SGD: wrap it first, weft.DistributedOptimizer(optimizer)",
    "fp16": "weft's Accelerator works with mixed_precision no or bf16, not fp16",
}


@pytest.mark.parametrize("case", REASONS)
def test_what_cannot_be_honoured_is_refused_by_name(case: str):
    done = run_ranks(2, REFUSED, [case], warm=True, env=QUIET)
    assert done.returncode == 1 and REASONS[case] in done.stderr, done.stderr
