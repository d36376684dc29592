"""The estimator's ``fit`` by ssh, over two hosts, and on a Ray of its own: real ranks, and what they are told."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import sshd
from tests.launching import FOREIGN, SOURCE
from tests.long import one_day_in
from weft.compat.estimator import PyTorch
from weft.errors import JobError

SCRIPT = """
import json, os, sys
import torch
import weft.torch as weft

weft.init()
torch.manual_seed(0)
model = weft.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)))

@weft.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

loss = train_step(model, torch.ones(4, 4)).reduce_mean().item()
print("loss of rank", weft.rank(), "is", loss, flush=True)
told = {name: os.environ.get(name) for name in ("SM_HP_LR", "SM_CHANNEL_TRAIN", "SM_MODEL_DIR", "SM_OWN")}
told |= {"arguments": sys.argv[1:], "size": [weft.size(), weft.pp_size(), weft.local_size()], "loss": loss}
with open(f"{os.environ['SM_MODEL_DIR']}/told-{weft.rank()}.json", "w") as file:
    json.dump(told, file)
if "--fail" in sys.argv and weft.rank() == 1:
    raise ValueError("a fault on the second host")
weft.shutdown()
"""
SPLIT = {
    "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2, "microbatches": 2}}}
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith((*FOREIGN, "WEFT_", "SM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text(SCRIPT)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with sshd.running(tmp_path_factory.mktemp("sshd")) as path:
        yield path


def check(folder: Path, local_size: int) -> None:
    """What both ranks were told, and that they trained together."""
    model = folder / "source" / "model"  # Ray's workers run in a copy of the script's folder
    told: list[dict[str, Any]] = [json.loads((model / f"told-{rank}.json").read_text()) for rank in (0, 1)]
    for each in told:
        assert each["size"] == [2, 2, local_size] and each["arguments"][:2] == ["--lr", "0.1"]
        assert (each["SM_HP_LR"], each["SM_OWN"]) == ("0.1", "own words")
        assert each["SM_CHANNEL_TRAIN"] == str(folder / "data")
        assert each["SM_MODEL_DIR"] == str(model)
    assert told[0]["loss"] == told[1]["loss"]


@sshd.needs_sshd
def test_fit_by_ssh(
    folder: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WEFT_SSH_OPTIONS", f"-F {config}")
    given: dict[str, Any] = {
        "source_dir": "source", "distribution": SPLIT, "engine": "ssh", "instance_count": 2, "hosts": sshd.HOSTS,
        "environment": {"SM_OWN": "own words"},
    }  # fmt: skip
    estimator = PyTorch("train.py", hyperparameters={"lr": 0.1}, **given)
    estimator.fit({"train": str(folder / "data")})
    check(folder, 1)
    shown = capfd.readouterr().out
    assert "loss of rank 0 is" in shown and "[rank 1] loss of rank 1 is" in shown
    estimator = PyTorch("train.py", hyperparameters={"lr": 0.1, "fail": "now"}, log_dir="runs", **given)
    with pytest.raises(JobError, match="a fault on the second host") as failed:
        estimator.fit({"train": str(folder / "data")}, logs=False)
    assert failed.value.rank == 1 and "loss of rank" not in capfd.readouterr().out
    job = estimator.latest_training_job
    assert job is not None and "loss of rank 1 is" in job.logs(rank=1)


@one_day_in(3)
def test_fit_on_ray(folder: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[train]'")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ranks = {"mpi": {"enabled": True, "processes_per_host": 2}}
    estimator = PyTorch(
        "train.py", source_dir="source", distribution={**SPLIT, **ranks}, engine="ray",
        hyperparameters={"lr": 0.1}, environment={"SM_OWN": "own words"},
    )  # fmt: skip
    estimator.fit({"train": str(folder / "data")})
    check(folder, 2)
