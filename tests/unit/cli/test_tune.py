"""`weft tune` on a real script: what is tried, what fails, and what is said in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launching import SOURCE
from tests.long import long
from weft.cli.main import main
from weft.cli.plan.tune import as_text, lines_to_write
from weft.profiler.reading import read_run
from weft.tune.search import Outcome, Trial, Tuning

SCRIPT = """
import json, os, sys, torch
from torch import nn
import weft.torch as weft
weft.init({"partitions": 1, "microbatches": 2})
if json.loads(os.environ["WEFT_SET"]).get("microbatches") == 1:
    raise MemoryError("too much")
assert os.environ["WEFT_TRIAL"]
torch.manual_seed(0)
layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)]
model = weft.DistributedModel(nn.Sequential(*layers))
@weft.step
def train_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss
while True:
    train_step(model, torch.randn(int(sys.argv[2]), 4))
"""


@long
@pytest.mark.timeout(600)
def test_a_script_is_tried_with_other_settings_and_arguments(tmp_path: Path):
    path, out = tmp_path / "train.py", tmp_path / "out"
    path.write_text(SCRIPT)
    options = [
        "-n", "2", "--steps", "2", "--turns", "1", "--out", str(out), "--json", "--vary", "microbatches=1,3",
        "--vary=--batch=16",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "weft", "tune", *options, str(path), "--batch", "8"],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["settings"]["microbatches"] == 2
    own, one, three, larger, cut, *_ = answer["trials"]
    assert own["changes"] == {} and own["samples_per_s"] > 0 and own["steps"] >= 2
    assert one["changes"] == {"microbatches": 1} and one["failure"] == "out of memory"
    assert three["changes"] == {"microbatches": 3} and "3" in three["failure"], "8 samples in 3 parts"
    assert larger["changes"]["--batch"] == 16 and larger["samples_per_s"] > 0
    assert cut["changes"] == {**cut["changes"], "tensor_parallel_degree": 2, "inputs": "per_rank"}
    assert cut["samples_per_s"] > 0 and not cut["remark"]
    run = read_run(out / "trial4")
    assert {facts.settings["cut_layers"] for facts in run.facts.values()} == {2}
    assert {step.samples for own in run.steps.values() for step in own} <= {16, 32}, "of both ranks"
    assert len(list(out.iterdir())) >= 5 and (out / "trial0" / "rank1.steps.jsonl").exists()
    assert answer["best"] in [one["changes"] for one in answer["trials"]]
    assert "weft tune: the script's own: " in done.stderr


@pytest.mark.timeout(300)
def test_nothing_is_left_when_it_is_killed(tmp_path: Path):
    path, out = tmp_path / "train.py", tmp_path / "out"
    path.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "weft",
        "tune",
        "--steps",
        "100000",
        "--out",
        str(out),
        str(path),
        "--batch",
        "8",
    ]
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    tune = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (out / "trial0" / "rank0.steps.jsonl").exists())
        assert processes_with(str(path))
    finally:
        tune.kill()
        tune.wait()
    wait_until(lambda: not processes_with(str(path)))


def wait_until(true: Callable[[], object]) -> None:
    until = time.monotonic() + 120
    while not true():
        assert time.monotonic() < until
        time.sleep(0.1)


def processes_with(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [str(path)] if text.encode() in path.read_bytes() else []
    return found


def trial(rate: float | None, failure: str = "", **changes: object) -> Trial:
    return Trial(changes, Outcome(rate, 10, 0.01, 1 << 30, failure, settings={"microbatches": 2}))


def test_what_is_said_in_the_end():
    found = Tuning(
        [trial(100.0), trial(150.0, microbatches=8, ddp=True), trial(None, "<no>\x1b[1m", microbatches=9)]
    )
    found.repeats = [(150.0, 100.0), (140.0, 100.0)]
    text = as_text(found)
    assert "Best: microbatches=8, ddp=True, +45.0% samples a second" in text
    assert 'weft.init({..., "microbatches": 8, "ddp": True})' in text
    assert "weft run --set=microbatches=8 --set=ddp=true ..." in text
    assert "\x1b" not in text
    found.repeats = [(101.0, 100.0)]
    assert "as good as any: microbatches=8, ddp=True looked faster, but run in turn it was +1.0%" in as_text(
        found
    )
    alone = as_text(Tuning([trial(100.0), trial(None, "broken", microbatches=9)]))
    assert "Nothing was compared: the script's own settings ran, and none of 1 others" in alone
    assert "Nothing ran" in as_text(Tuning([trial(None, "broken")]))
    assert lines_to_write({"--batch size": 3}) == ["arguments of the script: '--batch size=3'"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "weft tune needs a script"),
        (["--vary", "microbatches", "train.py"], "has no values"),
        (["--vary", "microbatchs=3", "train.py"], "no such setting to try"),
        (["--vary", "partitions=3", "train.py"], "no such setting to try"),
        (["--steps", "0", "train.py"], "at least 1"),
        (["--seconds", "nan", "train.py"], "above 0"),
    ],
)
def test_mistakes_are_told(capsys, options: list[str], said: str):
    assert main(["tune", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_kept(tmp_path: Path, capsys):
    (tmp_path / "kept").write_text("")
    assert main(["tune", "--out", str(tmp_path), "train.py"]) == 2
    assert "is there already" in capsys.readouterr().err and (tmp_path / "kept").exists()
