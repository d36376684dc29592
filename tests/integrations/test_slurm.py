"""Jobs under a real Slurm of two nodes, which `tests.slurm` starts on this machine; see there for what it needs."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import slurm
from tests.fault.matrix.strike import losses, undisturbed
from tests.launching import ROOT, _environ
from tests.long import one_day_in
from weft.launch.journal.job_status import read

JOB = ROOT / "tests" / "fault" / "workers" / "struck.py"
pytestmark = pytest.mark.skipif(bool(slurm.why_not()), reason=f"no Slurm: {slurm.why_not()}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm") / "cluster") as found:
        yield found


def submit(cluster: slurm.Cluster, folder: Path, options: list[str], *arguments: str) -> str:
    """Hands a job on two nodes in; its number."""
    environ = _environ({"SLURM_CONF": cluster.environ["SLURM_CONF"]})
    run = ["-m", "weft", "run", "--engine", "slurm", "--hosts", "2", "--ranks-per-host", "1"]
    done = subprocess.run(
        [sys.executable, *run, "--log-dir", str(folder), *options, str(JOB), str(folder), *arguments],
        env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def said(folder: Path, job: str) -> str:
    """What the batch script and all ranks have written."""
    logs = [folder / f"slurm-{job}.log", *sorted(folder.glob("attempt-*/rank-*.log"))]
    return "\n".join(path.read_text() for path in logs if path.exists())


def began(cluster: slurm.Cluster, folder: Path, job: str) -> None:
    """Waits until the job has trained a step."""
    deadline = time.monotonic() + 240
    while not (folder / "losses-0").exists():
        assert time.monotonic() < deadline, f"{cluster.state(job)}\n{cluster.logs()}"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("exception", "failed in step 6, .*: ValueError: injected"),
        ("SIGKILL", "(is gone|does not answer any more)"),
    ],
)
def test_a_fault_ends_all_and_names_the_rank(cluster: slurm.Cluster, tmp_path: Path, fault: str, told: str):
    job = submit(cluster, tmp_path, [], "--fault", fault, "--ranks", "1")
    assert cluster.wait(job, "COMPLETED", "FAILED") == "FAILED", said(tmp_path, job)
    found = read(tmp_path)
    assert found.handed_in == job and found.code and (tmp_path / "attempt-0" / "rank-1.log").exists()
    assert found.failure is not None and (fault != "exception" or found.failure["rank"] == 1), found.failure
    text = said(tmp_path, job)
    weft = re.findall(r"weft: rank (\d) on \S+ \(pid \d+\) (.*)", text)
    if weft or fault == "exception":
        assert weft and weft[0][0] == "1" and re.match(told, weft[0][1]), text
    else:
        assert "weftb: task 1: Killed" in text, text  # Slurm was quicker than the rank that waited


@one_day_in(2)
def test_a_job_that_is_told_to_end_goes_back_into_the_queue_and_goes_on(
    cluster: slurm.Cluster, tmp_path: Path
):
    """As Slurm tells it before the time limit, by the signal that the batch script asks for."""
    options = ["--max-restarts", "2", "--time", "30m"]
    job = submit(cluster, tmp_path, options, "--ranks", "9", "--pause", "1")
    assert "#SBATCH --signal=USR1@120\n" in (tmp_path / "struck.sbatch").read_text()
    began(cluster, tmp_path, job)
    cluster.command("scancel", "--signal=USR1", job)
    deadline = time.monotonic() + 240
    while not (tmp_path / "losses-1").exists():
        assert time.monotonic() < deadline and cluster.state(job) != "FAILED", said(tmp_path, job)
        time.sleep(0.2)
    assert cluster.wait(job, "COMPLETED", "FAILED") == "COMPLETED", said(tmp_path, job)
    assert cluster.field(job, "Restarts") == "1"
    assert "back into the queue, restart 1 of 2" in said(tmp_path, job)
    assert losses(tmp_path) == undisturbed(2)


def test_a_job_that_is_cancelled_does_not_come_back(cluster: slurm.Cluster, tmp_path: Path):
    job = submit(cluster, tmp_path, ["--max-restarts", "2"], "--ranks", "9", "--pause", "1")
    began(cluster, tmp_path, job)
    cluster.command("scancel", job)
    assert cluster.wait(job, "CANCELLED", "COMPLETED", "PENDING") == "CANCELLED"
    time.sleep(5)
    assert cluster.state(job) == "CANCELLED"
    assert "back into the queue" not in said(tmp_path, job)
