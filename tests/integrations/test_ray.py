"""Ray Train's workers as ranks. Starts a Ray of its own, which takes most of a minute and a gigabyte of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import FOREIGN, SOURCE
from tests.long import one_day_in

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[train]'")

JOB = """
import json, sys, tempfile
from pathlib import Path
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def loop(config):
    import torch
    import weft.torch as weft

    weft.init({"partitions": config["partitions"], "microbatches": 2})
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

    @weft.step
    def train_step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for batch in torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).split(4):
        if config.get("fails") and weft.rank() == 1 and losses:
            raise ValueError("a fault on one worker")
        optimizer.zero_grad()
        losses.append(train_step(model, batch).reduce_mean().item())
        optimizer.step()
    ray.train.report({"loss": losses[-1]})
    place = [weft.local_rank(), weft.local_size()]
    Path(config["folder"], f"{weft.rank()}.json").write_text(json.dumps([losses, place]))
    weft.shutdown()

if __name__ == "__main__":
    folder, workers, *fails = sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    config = {"folder": folder, "partitions": int(workers), "fails": bool(fails)}
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=int(workers)),
            run_config=RunConfig(storage_path=storage, name="job"),
        ).fit()
    ray.shutdown()
"""


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(JOB)
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    own = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(folder / "job.py"), str(folder), *args],
        env={**kept, **own}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_two_workers_train_what_one_trains(tmp_path: Path):
    found = {}
    for workers in ("1", "2"):
        done = run(tmp_path, workers)
        assert done.returncode == 0, done.stdout + done.stderr
        found[workers] = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("?.json"))]
    ((alone, _),) = found["1"]
    assert [place for _, place in found["2"]] == [[0, 2], [1, 2]]
    for losses, _ in found["2"]:
        assert losses == pytest.approx(alone, rel=1e-5)


def test_a_fault_on_one_worker_ends_the_training(tmp_path: Path):
    done = run(tmp_path, "2", "fails")
    assert done.returncode != 0 and "a fault on one worker" in done.stderr, done.stdout + done.stderr


SCRIPT = """
import os, sys
from pathlib import Path

import weft.torch as weft

weft.init()
told = weft.allgather([weft.rank(), weft.pp_size(), sys.argv[2:], os.environ["GIVEN"]])
Path(sys.argv[1], f"told-{weft.rank()}.json").write_text(repr(told))
weft.shutdown()
"""


@one_day_in(2)
def test_weft_run_starts_a_script_on_rays_workers(tmp_path: Path):
    """The script lies in the folder where the command is typed, and gets its arguments, settings and variables."""
    (tmp_path / "script.py").write_text(SCRIPT)
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    own = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    run = ["-m", "weft", "run", "--engine", "ray", "-n", "2", "--set", "partitions=2", "-x", "GIVEN=a b"]
    done = subprocess.run(
        [sys.executable, *run, "script.py", str(tmp_path), "x y"],
        env={**kept, **own}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = repr([[rank, 2, ["x y"], "a b"] for rank in range(2)])
    assert [path.read_text() for path in sorted(tmp_path.glob("told-*"))] == [told, told]
