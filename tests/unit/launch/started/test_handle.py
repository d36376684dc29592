"""Jobs that Python starts: the command that is run, and what its handle says."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import stat
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.launching import FOREIGN, SOURCE
from tests.long import one_in
from weft.cli import run
from weft.cli.engines import job_of, places
from weft.cli.main import main
from weft.errors import JobError, LaunchError
from weft.launch import Job
from weft.launch.journal.job_status import read
from weft.launch.started.handle import Handle
from weft.launch.started.start import command

JOBS = [
    Job("train.py", ["--lr", "0.1", "-n", "3", "a b"], ranks_per_host=2, settings={"partitions": 2}),
    Job("package.train", module=True, max_restarts=5, log_dir="runs/a b"),
    Job(
        "train.py",
        hosts=["node1", "u@node2"],
        ranks_per_host=4,
        engine="mpirun",
        mpi_options=["--tag-output"],
    ),
    Job("train.py", hosts=2, engine="slurm", time_limit=timedelta(minutes=90), gpus_per_host=3, name="mine"),
    Job(
        "train.py",
        settings={"pipeline": "gpipe", "record": "a b", "ddp": True},
        variables={"A_KEY": "hidden"},
    ),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.engine)
def test_the_command_line_makes_the_same_job(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_KEY", "hidden")
    line = command(job, "python")
    assert line[:4] == ["python", "-m", "weft", "run"] and "hidden" not in " ".join(line)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    run.add_options(parser)
    options = parser.parse_args(line[4:])
    found = job_of(options, places(options), run._variables(options.variables), job.mpi_options)
    names = ("script", "module", "ranks_per_host", "engine", "form", "max_restarts", "log_dir", "time_limit")
    for name in (*names, "host_names", "host_count", "gpus_per_host"):
        assert getattr(found, name) == getattr(job, name), name
    assert list(found.arguments) == list(job.arguments)
    assert run.config.parse_assignments(options.set) == job.settings


def environ() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    return {**kept, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def job(folder: Path, source: str, **more: Any) -> Job:
    (folder / "train.py").write_text(source)
    return Job("train.py", folder=str(folder), ranks_per_host=2, **more)


def test_a_job_that_ends_well(tmp_path: Path):
    source = "import os\nprint('rank', os.environ['RANK'], os.environ['GIVEN'], flush=True)\n"
    handle = job(tmp_path, source, log_dir="runs/a", variables={"GIVEN": "x y"}).start(environ())
    assert handle.wait(60) == 0 and handle.poll() == 0
    assert handle.logs(rank=1) == "rank 1 x y\n" and handle.logs() == "rank 0 x y\n"
    with pytest.raises(LaunchError, match="there is no rank 2: the job has 2"):
        handle.logs(rank=2)
    assert handle.stop() == 0


def test_the_error_names_the_culprit(tmp_path: Path):
    source = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('boom')\n"
    handle = job(tmp_path, source, log_dir="runs/a").start(environ())
    with pytest.raises(
        JobError, match=r"rank 1 on .* failed in its start, before weft.init: ValueError: boom"
    ) as told:
        handle.wait(60)
    assert (told.value.rank, told.value.code) == (1, 1) and "Traceback" in str(told.value)
    assert "ValueError: boom" in handle.logs(rank=1)


STEP = """
import os
import torch
import weft.torch as weft
weft.init({"partitions": 2})
model = weft.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
@weft.step
def step(model, x):
    loss = model(x).mean()
    model.backward(loss)
    return loss
print("here", os.environ["RANK"], flush=True)
for number in range(4):
    if number == 2 and os.environ["RANK"] == "1":
        raise ValueError("boom")
    step(model, torch.ones(2, 4))
"""


def test_the_folder_says_which_step_the_job_has_reached(tmp_path: Path):
    source = STEP.replace('raise ValueError("boom")', "pass")
    handle = job(tmp_path, source, log_dir="a").start(environ())
    assert handle.wait(100) == 0
    told = read(tmp_path / "a")
    assert told.step is not None and told.step["step"] == 4
    assert any(line.startswith("  step 4") for line in told.lines())


def with_mpi(engine: str) -> dict[str, str]:
    if engine == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe")
    return {**environ(), **dict.fromkeys(names, "1")}


@pytest.mark.parametrize("engine", one_in(2, ["torchrun", "mpirun"]))
def test_another_engine_tells_of_ranks_and_of_the_culprit(engine: str, tmp_path: Path, capfd):
    handle = job(tmp_path, STEP, log_dir="runs/a", engine=engine).start(with_mpi(engine))
    with pytest.raises(JobError, match=r"^rank 1 on .* failed in step 2.*: ValueError: boom") as error:
        handle.wait(100)
    assert error.value.rank == 1 and "Traceback" in str(error.value)
    assert "here 0\n" in handle.logs(0) and "here 1" not in handle.logs(0)
    assert "here 1\n" in handle.logs(1) and "ValueError: boom" in handle.logs(1)
    capfd.readouterr()
    folder = str(tmp_path / "runs" / "a")
    assert main(["status", folder]) == main(["logs", folder, "--rank", "1"]) == 0
    told = capfd.readouterr().out
    assert re.search(r"ended, exit code \d+\n", told) and "attempt 0: logs in attempt-0" in told
    assert (
        re.search(r"attempt 0: failed after .*: rank 1 on .* failed in step 2", told) and "here 1\n" in told
    )


@pytest.mark.parametrize("engine", one_in(2, ["torchrun", "mpirun"]))
def test_another_engine_is_stopped(engine: str, tmp_path: Path):
    source = "import time\nprint('here', flush=True)\ntime.sleep(1000)\n"
    handle = job(tmp_path, source, log_dir="a", engine=engine).start(with_mpi(engine))
    deadline = time.monotonic() + 100
    while "here" not in handle.logs(1) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert read(tmp_path / "a").pid == handle.process.pid
    assert handle.stop(100) != 0 and read(tmp_path / "a").failure is None
    assert [each["event"] for each in read(tmp_path / "a").events] == ["attempt", "stopping", "ended"]


def test_without_a_folder(tmp_path: Path):
    handle = job(tmp_path, "raise SystemExit(7)\n").start(environ())
    with pytest.raises(
        JobError, match="the job train ended with exit code 7; with log_dir=... this error says why"
    ):
        handle.wait(60)
    with pytest.raises(LaunchError, match="the job train has no logs by rank: give it a log_dir"):
        handle.logs()


def test_stop(tmp_path: Path):
    handle = job(tmp_path, "import time\nprint('here', flush=True)\ntime.sleep(1000)\n", log_dir="a").start(
        environ()
    )
    deadline = time.monotonic() + 60
    while "here" not in handle.logs(1) and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(TimeoutError, match="the job train still runs after 0.1 s"):
        handle.wait(0.1)
    assert handle.stop() == 128 + 15


def test_what_cannot_be_started(tmp_path: Path):
    with pytest.raises(LaunchError, match='there is no script ".*/train.py"'):
        Job("train.py", folder=str(tmp_path)).start()
    with pytest.raises(LaunchError, match='there is no command "no-python"'):
        job(tmp_path, "", python="no-python").start()
    with pytest.raises(LaunchError, match="these variables are to be handed on and are not set: NOT_THERE"):
        job(tmp_path, "", hand_on=["NOT_THERE"]).start({})


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ("COMPLETED ExitCode=0:0", 0),
        ("FAILED ExitCode=3:0", 3),
        ("NODE_FAIL ExitCode=0:0", 1),
        ("FAILED ExitCode=0:9", 137),
    ],
)
def test_a_job_of_slurm(tmp_path: Path, told: str, code: int):
    """Programs in Slurm's place write down what they are given."""
    for name, text in {
        "sbatch": "echo 42",
        "scontrol": f"echo 'JobId=42 JobState='$([ -e {tmp_path}/ended ] && echo {told} || echo RUNNING ExitCode=0:0)",
        "scancel": f"echo $@ > {tmp_path}/ended",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    given = {**environ(), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    handle: Handle = job(tmp_path, "", engine="slurm").start(given)
    assert handle.poll() is None
    assert handle.stop() == code
    assert (tmp_path / "ended").read_text() == "42\n"
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2\nexit 1\n"
    )
    with pytest.raises(JobError, match="Slurm has forgotten the job 42: sacct -j 42 may know it"):
        job(tmp_path, "", engine="slurm").start(given).wait(60)
