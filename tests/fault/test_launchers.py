"""Faults of ranks that work together with gloo, under each launcher."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import FOREIGN, SOURCE, Completed, Running, processes_left, run_ranks, started
from tests.long import long, one_day_in, one_in

JOB = Path(__file__).parent / "workers" / "job.py"
LAUNCHERS = [
    "weft",
    "torchrun",
    pytest.param("mpirun", marks=pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")),
]
WEFT_PYTHON = [sys.executable, "-m", "weft.compat.python"]
"""What the command ``weft-python`` starts."""
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def run(launcher: str, *args: str) -> Completed:
    return run_ranks(2, JOB, ["--collective", *args], timeout=90, launcher=launcher)


def told(done: Completed) -> list[str]:
    """What weft said, without what the launcher put before or after it."""
    return [line[line.index("weft: ") :] for line in done.stderr.splitlines() if "weft: " in line]


@pytest.mark.parametrize("launcher", one_in(2, LAUNCHERS[1:]))
def test_a_job_ends_well_and_leaves_nothing(launcher: str, tmp_path: Path):
    with started(2, JOB, ["--collective"], env={"TMPDIR": str(tmp_path)}, launcher=launcher) as job:
        done = job.wait(90).check()
        assert "rank 0 done" in done.stdout and "rank 1 done" in done.stdout
        assert told(done) == []
        assert processes_left(job.mark) == []
    assert [path for path in tmp_path.iterdir() if "weft" in path.name] == []


@long
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")
def test_weft_run_by_mpirun(tmp_path: Path):
    """Settings, variables and options reach every rank, and the exit code comes back."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nimport weft.torch as weft\nweft.init()\n"
        "told = weft.allgather([os.environ['GIVEN'], weft.pp_size(), os.environ['OMPI_COMM_WORLD_RANK'],\n"
        "    os.environ['ALSO']])\n"
        "sys.stdout.write(f'{weft.rank()} {told} {sys.argv[1:]}\\n')\nweft.barrier()\n"
        "weft.shutdown()\nsys.exit(3)\n"
    )
    root = " --allow-run-as-root" if os.getuid() == 0 else ""
    options = f"--oversubscribe -x ALSO=b{root}"
    command = ["-m", "weft", "run", "-n", "2", "--engine", "mpirun", "--mpi-options", options]
    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    done = subprocess.run(
        [sys.executable, *command, "-x", "GIVEN=a", "--set", "partitions=2", str(script), "-x"],
        env={**environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 3, done.stderr
    for rank in range(2):
        assert f"{rank} [['a', 2, '0', 'b'], ['a', 2, '1', 'b']] ['-x']" in done.stdout


@long
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")
def test_weft_python_by_mpirun(tmp_path: Path):
    """A script for smdistributed trains under mpirun; its settings come from the environment."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport smdistributed.modelparallel.torch as smp\nimport torch\nsmp.init()\n"
        "torch.manual_seed(0)\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))\n"
        "model = smp.DistributedModel(net.cuda())\n"
        "@smp.step\ndef step(model, x):\n    loss = model(x).sum()\n    model.backward(loss)\n    return loss\n"
        "loss = step(model, torch.ones(4, 4)).reduce_sum().item()\n"
        "told = smp.allgather([loss, len(list(model.local_parameters()))], smp.WORLD)\n"
        "found = [smp.rank(), smp.pp_rank(), smp.pp_size(), smp.state.cfg.microbatches, told[0][0] == told[1][0],\n"
        "    [n for _, n in told], sys.argv[1:]]\n"
        "sys.stdout.write(f'{found}\\n')\n"
    )
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {name: text for name, text in os.environ.items() if not name.startswith((*FOREIGN, "SM_"))}
    added = {
        "SM_HP_MP_PARAMETERS": '{"partitions": 2, "microbatches": 2, "ddp": true}',
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "WEFT_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = ["mpirun", *root, "--oversubscribe", "-np", "2", *WEFT_PYTHON, str(script), "--its-own", "2"]
    done = subprocess.run(command, env=environ | added, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "weft: rank" not in done.stderr
    for rank in range(2):
        assert f"[{rank}, {rank}, 2, 2, True, [2, 2], ['--its-own', '2']]" in done.stdout


@pytest.mark.parametrize("launcher", one_in(2, LAUNCHERS))
def test_an_exception_blames_its_rank_and_not_the_peer(launcher: str):
    done = run(launcher, "--fault", "exception")
    assert done.returncode == 1
    assert re.match(
        r"weft: rank 1 on \S+ \(pid \d+\) failed in step 3, .*: ValueError: injected", told(done)[0]
    )
    assert not any("rank 0" in line and "failed" in line.partition("another rank")[0] for line in told(done))


@one_day_in(2)
@pytest.mark.parametrize("launcher", one_in(2, LAUNCHERS[1:]))
def test_a_frozen_rank_is_found_by_its_heartbeat(launcher: str):
    rank = "1" if launcher == "torchrun" else "0"
    done = run(launcher, "--fault", "stop", "--rank", rank)
    assert done.returncode != 0
    assert re.match(rf"weft: rank {rank} on \S+ \(pid \d+\) is frozen: no heartbeat for ", told(done)[0])
    assert "all_reduce" in done.stderr, "the stack of the rank that waits"


@pytest.mark.parametrize("launcher", one_in(2, LAUNCHERS[1:]))
def test_no_rank_outlives_another_launcher(launcher: str):
    with started(2, JOB, ["--steps", "10000"], launcher=launcher) as job:
        for _ in range(2):
            job.wait_for_line("is watched")
        job.process.send_signal(signal.SIGKILL)
        job.process.wait(5)
        assert processes_left(job.mark) == []


@one_day_in(2)
def test_a_killed_store_owner_is_named():
    done = run("weft", "--fault", "sigkill", "--rank", "0")
    assert done.returncode == 137
    assert re.match(r"weft: rank 0 on \S+ \(pid \d+\) was killed by SIGKILL in step 3", told(done)[0])


@one_day_in(2)
def test_different_settings_are_told_to_all_ranks():
    done = run("weft", "--digest-of-rank")
    message = "the ranks were started differently: settings.microbatches is 4 on rank 0 but 5 on rank 1"
    assert f"rank 0 told: {message}" in done.stdout
    assert f"rank 1 told: {message}" in done.stdout
    assert done.returncode == 1
    assert f"DivergenceError: {message}" in told(done)[0]


def test_a_rank_that_dies_in_the_rendezvous_ends_the_job():
    done = run("weft", "--fault", "sigkill", "--rank", "0", "--step", "-1")
    assert done.returncode == 137
    assert told(done)[0].startswith("weft: rank 0 on")


@one_day_in(2)
def test_a_rank_that_never_comes_is_named():
    done = run("weft", "--fault", "sleep", "--rank", "1", "--step", "-1", "--connect-timeout", "2")
    assert done.returncode == 1
    assert "only 1 of 2 ranks came; missing: rank 1" in done.stderr


def test_the_store_listens_on_loopback_only_and_survives_junk():
    with started(2, JOB, ["--collective", "--junk", "--steps", "100"]) as job:
        job.wait_for_line("step 2")
        addresses = listening(job)
        assert addresses and addresses <= LOOPBACK
        assert told(job.wait(90).check()) == []


def listening(job: Running) -> set[str]:
    """The addresses that the ranks of a job listen on, as the kernel writes them."""
    sockets = set()
    for pid in job.ranks().values():
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].partition(":")[0])
    return found
