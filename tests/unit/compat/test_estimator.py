"""The estimator of the original's notebooks: what its script finds, and what is refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from weft.compat.estimator import PyTorch, arguments, channels
from weft.errors import ConfigError, LaunchError

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
    with pytest.raises(LaunchError, match=r"train.py ended with exit code 7; its output says why"):
        estimator.fit()
    assert "rank 0" in capfd.readouterr().err


def test_another_engine_is_planned(folder: Path, capsys):
    estimator = PyTorch(
        "train.py",
        instance_count=2,
        distribution=SPLIT,
        engine="mpirun",
        hosts=["a", "b"],
        hyperparameters={"n": 1},
    )
    estimator.fit(str(folder / "data"))
    printed = capsys.readouterr().out
    assert "mpirun -np 4 " in printed and "--host a:2,b:2" in printed and "train.py -n 1\n" in printed
    assert f"SM_CHANNEL_TRAINING={folder / 'data'}" in printed and "SM_HP_N=1" in printed


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
    with pytest.raises(LaunchError, match="wait=False is not supported"):
        PyTorch("train.py").fit(wait=False)


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
