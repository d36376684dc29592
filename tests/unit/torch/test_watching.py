"""A job's line of progress, and the values that its script keeps, in real jobs and on a real terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import weft.torch as weft
from tests.launching import SOURCE, run_ranks
from tests.long import one_day_in, one_in
from weft.errors import UsageError
from weft.session import watching
from weft.torch.watching import open_board

SCRIPT = """\
import sys, time
import torch
import weft.torch as weft

weft.init({"partitions": weft_partitions, "microbatches": 2})
torch.manual_seed(1)
model = weft.DistributedModel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))


@weft.step
def step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


for number in weft.progress(range(20)):
    loss = step(model, torch.ones(4, 8))
    weft.log({"loss": loss, "half": loss.reduce_mean() / 2, "name": "run", "none": float("nan")}, number)
    time.sleep(0.1)
print("the end" + " of TensorFlow, too" * ("tensorflow" in sys.modules))
"""

HOURS = 'import weft.watch.progress\nweft.watch.progress.EVERY_S = {"plain": 3600.0}\n'
"""In lines that are kept a loop is short if it takes less."""


def script(tmp_path: Path, partitions: int) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("weft_partitions", str(partitions)), encoding="utf-8")
    return path


def on_a_terminal(*options: str, cwd: Path) -> str:
    """What a terminal gets of `weft run`."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "160"}
    job = subprocess.Popen(
        [sys.executable, "-m", "weft", "run", *options], stdin=theirs, stdout=theirs, stderr=theirs, env=environ,
        cwd=cwd,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # the last process has closed it
            break
        if not data:
            break
        seen += data
    os.close(ours)
    assert job.wait(60) == 0, seen.decode()
    return seen.decode()


@one_day_in(2)
@pytest.mark.parametrize("partitions", one_in(2, [2, 1]))
def test_a_terminal_shows_one_line_that_makes_room_for_others(partitions, tmp_path):
    seen = on_a_terminal("-n", str(partitions), str(script(tmp_path, partitions)), cwd=tmp_path)
    lines = [line for line in seen.replace("\r\n", "\r\r").split("\r") if " of 20 " in line]
    assert len(lines) >= 3 and "step 20 of 20 ##########" in lines[-1]
    assert all(" samples/s | " in line and " | loss " in line for line in lines)
    assert (" | idle " in lines[-1]) is (partitions == 2)
    assert "\r\x1b[K" in seen  # a line goes before the next
    assert "the end\r\n" in seen


@one_day_in(2)
def test_quiet_and_redirected_jobs_show_no_line_of_so_short_a_loop(tmp_path):
    assert " of 20 " not in on_a_terminal("--quiet", str(script(tmp_path, 1)), cwd=tmp_path)
    path = script(tmp_path, 2)
    path.write_text(f"{HOURS}{path.read_text(encoding='utf-8')}", encoding="utf-8")
    done = run_ranks(2, path, warm=True, options=["--log-dir", str(tmp_path)]).check()
    assert " of 20 " not in done.stderr + done.stdout


def test_values_are_lines_of_json_of_the_first_rank(tmp_path):
    run_ranks(2, script(tmp_path, 2), warm=True, options=["--log-dir", str(tmp_path / "log")]).check()
    (path,) = (path for path in (tmp_path / "log").glob("*.jsonl") if path.name != "events.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(20))
    for line in lines:
        values = line["values"]
        assert values["half"] == pytest.approx(values["loss"] / 2) and values["name"] == "run"
        assert values["none"] == "nan"


@pytest.fixture
def session(tmp_path):
    weft.init({"log_dir": str(tmp_path / "log")})
    yield
    weft.shutdown()


def test_what_cannot_be_kept_is_refused_by_name(session):
    import torch

    with pytest.raises(UsageError, match=r"logits has \[2, 3\] elements: log a number, its mean\(\) say"):
        weft.log({"logits": torch.zeros(2, 3)})
    with pytest.raises(UsageError, match="model is .*: log numbers, texts and tensors with one element"):
        weft.log({"model": object()})


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    weft.init({"log_dir": str(tmp_path / "file" / "log")})
    try:
        with pytest.raises(UsageError, match="weft run --log-dir FOLDER, or the setting log_dir"):
            weft.log({"loss": 1.0})
    finally:
        weft.shutdown()


def test_values_go_to_tensorboard_where_that_is_asked_for(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    weft.init({"log_dir": str(tmp_path / "log"), "tensorboard": str(tmp_path / "board")})
    try:
        for step in (1, 2):
            weft.log({"loss": 0.5 * step, "name": "run"}, step=step)
    finally:
        weft.shutdown()
    (path,) = (tmp_path / "log").iterdir()
    (board,) = (tmp_path / "board").iterdir()
    assert board.name == path.stem
    events = EventAccumulator(str(board)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (2, 1.0)]


def test_tensorboard_that_is_not_installed_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(watching.importlib.util, "find_spec", lambda name: None)
    told = (
        r"TensorBoard, which is not installed: pip install 'weft\[tensorboard\]', or leave out --tensorboard"
    )
    with pytest.raises(UsageError, match=told):
        watching.Log(str(tmp_path / "log"), open_board, str(tmp_path / "board"))
    watching.Log(str(tmp_path / "log"), open_board).close()


def test_progress_without_a_job_gives_the_items():
    assert list(weft.progress(iter([1, 2]), total=2)) == [1, 2] and list(weft.progress(total=3)) == []


def test_what_a_step_returns_says_how_it_becomes_a_tensor():
    import torch

    from weft.torch.output import StepOutput

    output = StepOutput([torch.tensor(1.0), torch.tensor(2.0)])
    uses = (
        lambda: output + 1, lambda: 1 - output, lambda: float(output), lambda: output.item(), lambda: output[0],
        lambda: f"{output:.3f}", lambda: output < 1, lambda: output.shape, lambda: list(output),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(UsageError, match=r"take \.reduce_mean\(\), the batch's mean, or \.concat\(\)"):
            use()
    with pytest.raises(UsageError, match="inside of the step: call model.backward"):
        output.backward()
    assert not hasattr(output, "item") and not hasattr(output, "smp_slice") and f"{output}" == repr(output)


def test_backward_outside_of_a_step_says_where_it_belongs(session):
    import torch

    model = weft.DistributedModel(torch.nn.Linear(2, 1))

    @weft.step
    def step(model, x):
        return model(x).mean()

    loss = step(model, torch.ones(4, 2)).reduce_mean()
    with pytest.raises(
        RuntimeError, match=r"into the function that @weft.step decorates: model.backward\(loss\)"
    ):
        loss.backward()
