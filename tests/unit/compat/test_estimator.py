"""The estimator of the original's notebooks: what its script finds, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from pathlib import Path

import pytest

from weft.compat.estimator import PyTorch, arguments, channels
from weft.errors import ConfigError, JobError, LaunchError

SPLIT = {
    "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}},
    "mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": "-x NCCL_DEBUG=WARN"},
}
SCRIPT = """
import json, os, sys
told = {name: value for name, value in os.environ.items() if name.startswith(("SM_", "WEFT_CONFIG", "RANK", "NCCL"))}
told |= {"arguments": sys.argv[1:], "world": os.environ["WORLD_SIZE"], "made": os.path.isdir(told["SM_MODEL_DIR"])}
with open(f"told-{os.environ['RANK']}.json", "w") as file:
    json.dump(told, file)
if "fail" in sys.argv[-1]:
    sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WEFT_CONFIG", "WEFT_SET", "SM_MODEL_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text(SCRIPT)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_on_this_machine(folder: Path):
    estimator = PyTorch(
        "train.py", source_dir="source", instance_count=1, instance_type="ml.p3.16xlarge", distribution=SPLIT,
        hyperparameters={"lr": 0.1, "note": "a; b", "mp_parameters": {}}, environment={"SM_OWN": "1"},
    )  # fmt: skip
    estimator.fit({"train": str(folder / "data")})
    told = [json.loads((folder / "source" / f"told-{rank}.json").read_text()) for rank in range(2)]
    assert [each["RANK"] for each in told] == ["0", "1"] and told[0]["world"] == "2"
    assert told[0]["arguments"] == ["--lr", "0.1", "--note", "a; b"]
    assert (told[0]["SM_HP_LR"], told[0]["SM_HP_NOTE"], told[0]["SM_OWN"]) == ("0.1", "a; b", "1")
    assert told[0]["SM_CHANNEL_TRAIN"] == str(folder / "data") and told[0]["SM_CHANNELS"] == '["train"]'
    assert (
        json.loads(told[0]["SM_HP_MP_PARAMETERS"]) == json.loads(told[0]["WEFT_CONFIG"]) == {"partitions": 2}
    )
    assert told[0]["NCCL_DEBUG"] == "WARN" and told[0]["made"]
    assert told[0]["SM_MODEL_DIR"] == str(folder / "source" / "model")


def test_a_job_that_fails(folder: Path, capfd):
    estimator = PyTorch("train.py", source_dir="source", hyperparameters={"mode": "fail"})
    with pytest.raises(JobError, match=r"the job train ended with exit code 7; with log_dir="):
        estimator.fit()
    assert "rank 0" in capfd.readouterr().err


def told_by(folder: Path, rank: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "source" / f"told-{rank}.json").read_text())
    return found


@pytest.mark.parametrize("engine", ["torchrun", "mpirun"])
def test_another_engine_runs_the_job(engine: str, folder: Path, monkeypatch):
    if shutil.which("mpirun") is None and engine == "mpirun":
        pytest.skip("mpirun is not installed")
    for name in (
        "OMPI_ALLOW_RUN_AS_ROOT",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
        "OMPI_MCA_rmaps_base_oversubscribe",
    ):
        monkeypatch.setenv(name, "1")
    split = {"smdistributed": SPLIT["smdistributed"], "mpi": {"enabled": True, "processes_per_host": 2}}
    estimator = PyTorch(
        "train.py", source_dir="source", engine=engine, distribution=split, hyperparameters={"note": "a; b"}
    )
    estimator.fit({"train": str(folder / "data")}, logs=False)
    told = [told_by(folder, rank) for rank in range(2)]
    assert [each["RANK"] for each in told] == ["0", "1"] and told[0]["world"] == "2"
    assert told[1]["arguments"] == ["--note", "a; b"] and told[1]["made"]
    assert told[1]["SM_CHANNEL_TRAIN"] == str(folder / "data") and told[0]["SM_NUM_GPUS"] == "2"
    assert json.loads(told[1]["WEFT_CONFIG"]) == {"partitions": 2}


def test_a_job_that_nobody_waits_for(folder: Path, capfd):
    (folder / "source" / "train.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(1000)\n")
    estimator = PyTorch("train.py", source_dir="source", log_dir="runs/a")
    estimator.fit(wait=False, logs=["None"])
    handle = estimator.latest_training_job
    assert handle is not None and handle.poll() is None
    deadline = time.monotonic() + 60
    while "here" not in handle.logs() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert handle.stop(0) == 128 + 15 and capfd.readouterr().out == ""


def test_the_error_of_a_job_with_a_folder_names_the_rank(folder: Path):
    (folder / "source" / "train.py").write_text("raise ValueError('boom')\n")
    with pytest.raises(
        JobError, match=r"rank 0 on .* failed in its start, before weft.init: ValueError: boom"
    ):
        PyTorch("train.py", source_dir="source", log_dir="runs/a").fit(logs=False)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"wait": 0}, "wait is 0: write True or False"),
        ({"logs": "Some"}, "logs is 'Some': write True, False, or some of All, None, Rules, Training"),
        ({"logs": []}, "logs is \\[\\]: write True"),
        ({"job_name": "My Job"}, "name is 'My Job': write small letters, digits and hyphens"),
    ],
)
def test_what_fit_cannot_be_told(given, text, folder: Path):
    with pytest.raises(LaunchError, match=text):
        PyTorch("train.py", source_dir="source").fit(**given)


def test_slurm_gets_the_job(folder: Path, monkeypatch):
    """Programs in Slurm's place; the batch script has what the script is to find."""
    for name, text in {"sbatch": "echo 42", "scontrol": "echo JobState=COMPLETED ExitCode=0:0"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    estimator = PyTorch(
        "train.py",
        source_dir="source",
        engine="slurm",
        instance_count=2,
        hyperparameters={"n": 1},
        log_dir="runs",
    )
    estimator.fit({"train": "/only/there"})
    text = (folder / "source" / "runs" / "train.sbatch").read_text()
    assert "train.py -n 1\n" in text and "export SM_CHANNEL_TRAIN=/only/there\n" in text
    assert f"export SM_MODEL_DIR={folder}/source/model\n" in text


def test_an_engine_whose_command_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    estimator = PyTorch("train.py", source_dir="source", engine="skypilot")
    with pytest.raises(LaunchError, match="no command sky"):
        estimator.fit()
    assert "engine: skypilot" in str(estimator.plan())


def test_hosts_are_ranks_of_this_machine_on_the_local_engine():
    assert "on this host, 6 times" in str(
        PyTorch("x.py", instance_count=3, distribution={"mpi": SPLIT["mpi"]}).plan()
    )


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"instance_count": 0}, LaunchError, "instance_count is 0: write a whole number of at least 1"),
        ({"hosts": ["a"], "instance_count": 2}, LaunchError, "hosts names 1 hosts, and instance_count is 2"),
        ({"hyperparameters": {"a b": 1}}, LaunchError, "'a b' is no name of a hyperparameter"),
        ({"distribution": {"mpi": 1}}, ConfigError, "mpi is 1: write an object"),
        ({"engine": "kubernetes"}, LaunchError, "the engine kubernetes runs an image"),
    ],
)
def test_what_is_refused(given, kind, text):
    with pytest.raises(kind, match=text):
        PyTorch("train.py", **given)


@pytest.mark.parametrize(
    ("script", "inputs", "text"),
    [
        ("nowhere.py", None, 'there is no script ".*nowhere.py"'),
        ("train.py", {"train": "nowhere"}, 'the channel train is ".*nowhere", which is not there'),
        ("train.py", {"a b": "data"}, "'a b' is no name of a channel"),
        ("train.py", "s3://bucket/data", "the channel training is s3://bucket/data: copy it to a folder"),
    ],
)
def test_what_fit_refuses(script, inputs, text, folder: Path):
    with pytest.raises(LaunchError, match=text):
        PyTorch(script, source_dir="source").fit(inputs)


def test_values_that_no_job_can_be_told():
    with pytest.raises(LaunchError, match="a hyperparameter is .*: give texts, numbers, lists and dicts"):
        PyTorch("train.py", hyperparameters={"model": object()}).plan()


def test_arguments_of_the_original_that_mean_nothing_here():
    with pytest.warns(UserWarning, match="these arguments mean nothing here: framework_version, role"):
        PyTorch("train.py", role="arn", framework_version="1.13")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PyTorch("train.py")


def test_dicts_are_pairs_and_paths_are_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert arguments({"sizes": {"b": 2, "a": 1}}) == ["--sizes", "a=1,b=2"]
    assert channels({"val": "data"}) == {"val": str(tmp_path / "data")}
