"""Jobs over two hosts that ssh reaches; the hosts are two addresses of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import sshd
from tests.launching import MARK, SOURCE, Running, processes_left, started
from tests.long import long, one_day_in, one_in
from weft.errors import JobError
from weft.launch import Job
from weft.launch.journal.job_status import read, stop
from weft.launch.remote.agent import FILE

pytestmark = sshd.needs_sshd
RESTARTING = Path(__file__).parent / "workers" / "restarting.py"
WAITS = "import time\nimport weft.torch as weft\nweft.init()\nprint('here', flush=True)\ntime.sleep(1000)\n"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with sshd.running(tmp_path_factory.mktemp("sshd")) as path:
        yield path


@contextlib.contextmanager
def job(
    config: Path, script: str | Path, args: Sequence[str] = (), options: Sequence[str] = (), each: int = 1
) -> Iterator[Running]:
    hosts = ",".join(f"{host}:{each}" for host in sshd.HOSTS)
    known = ["--hosts", hosts, "--ssh-options", f"-F {config}", "-x", MARK]
    with started(2 * each, script, args, options=[*known, *options]) as running:
        yield running
        assert processes_left(running.mark) == []
        assert agents(seconds=10) == []


def agents(seconds: float = 0.0) -> list[int]:
    """Weft's agents on this machine, that still run after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
                if line[1:2] == [FILE.encode()]:
                    found.append(int(folder.name))
        if not found or time.monotonic() > deadline:
            return sorted(found)
        time.sleep(0.05)


def wait_for_lines(folder: Path, text: str, ranks: int = 2) -> None:
    deadline = time.monotonic() + 120
    logs = [folder / "attempt-0" / f"rank-{rank}.log" for rank in range(ranks)]
    while not all(log.exists() and text in log.read_text() for log in logs) and time.monotonic() < deadline:
        time.sleep(0.05)


def test_ranks_of_two_hosts_are_one_job(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Variables, settings and places reach all; what is secret stands in no list of processes."""
    monkeypatch.setenv("AN_API_KEY", "hidden\nvalue")
    script = (
        "import os, sys, subprocess, torch\nimport weft.torch as weft\nweft.init()\n"
        "names = 'RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE'.split()\n"
        "mine = [*(os.environ[name] for name in names), weft.pp_rank(), weft.dp_rank()]\n"
        "told = weft.allgather(mine)\n"
        "listed = subprocess.run(['ps', 'axww'], capture_output=True, text=True).stdout\n"
        "assert os.environ['AN_API_KEY'] == 'hidden\\nvalue' and 'hidden' not in listed\n"
        "sum = torch.ones(2)\ntorch.distributed.all_reduce(sum)\n"
        "print(sys.argv[1:], told, sum.tolist(), file=sys.stderr, flush=True)\nweft.shutdown()\nsys.exit(0)\n"
    )
    options = ["--set", "partitions=2", "-x", "AN_API_KEY", "--log-dir", str(tmp_path), "--prefix", "all"]
    with job(config, script, ["a b", ";", "$HOME"], options, each=2) as running:
        done = running.wait(150).check()
    told = [[str(n), str(n % 2), "2", str(n // 2), "2", n % 2, n // 2] for n in range(4)]
    for rank in range(4):
        assert f"[rank {rank}] {['a b', ';', '$HOME']} {told} [4.0, 4.0]\n" in done.stderr
    places = read(tmp_path).events[1]["ranks"]
    assert len({place["pid"] for place in places.values()}) == 4
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hidden" in path.read_bytes()]


@one_day_in(3)
def test_a_failure_ends_all_hosts_and_the_job_goes_on_from_its_save(config: Path, tmp_path: Path):
    """A rank of the second host is killed; then the job is told to end, and saves."""
    folder = tmp_path / "runs"
    given = [str(tmp_path), "100000", "--pause", "0.05", "--faults", "[[1, 8]]"]
    with job(config, RESTARTING, given, ["--max-restarts", "2", "--log-dir", str(folder)]) as running:
        deadline = time.monotonic() + 150
        while not (tmp_path / "losses-1").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert stop(folder, 90).code == 75
        done = running.wait(60)
    assert done.returncode == 75, done.stderr
    first = next(line for line in done.stderr.splitlines() if line.startswith("weft: rank"))
    assert first.startswith("weft: rank 1 on ") and "was killed by SIGKILL in step 8" in first
    assert "weft: restart 1 of 2 in 1 s" in done.stderr
    assert (tmp_path / "losses-1").read_text().startswith("6 ")  # after the save of step 5


def test_a_handle(config: Path, tmp_path: Path):
    """A job that Python starts: a script that knows nothing of weft fails on the second host."""
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nprint('rank', os.environ['RANK'], flush=True)\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('boom')\ntime.sleep(1000)\n"
    )
    places: dict[str, Any] = {"hosts": sshd.HOSTS, "engine": "ssh", "ssh_options": ["-F", str(config)]}
    given = {"folder": str(tmp_path), "log_dir": "runs/a", "hand_on": ["PYTHONPATH"], **places}
    handle = Job("train.py", **given).start({**os.environ, "PYTHONPATH": str(SOURCE)})
    with pytest.raises(JobError, match=r"rank 1 on .* failed in .*: ValueError: boom\nTraceback") as told:
        handle.wait(90)
    assert (told.value.rank, told.value.code, handle.logs(0)) == (1, 1, "rank 0\n")
    assert agents(seconds=10) == []


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("what", one_in(4, ["cut", "agent", "frozen", "launcher"]))
def test_who_is_gone(config: Path, tmp_path: Path, what: str):
    """An agent with its host, a rank that stands still, a connection that is silent, or the launcher: nothing is left,
    and the culprit is named."""
    with job(config, WAITS, options=["--log-dir", str(tmp_path), "--timeout-heartbeat", "3"]) as running:
        wait_for_lines(tmp_path, "here")
        assert len(agents()) == 4  # and a guard beside each
        if what == "launcher":
            running.process.send_signal(signal.SIGKILL)  # type: ignore[union-attr]
        else:
            rank = int(read(tmp_path).events[1]["ranks"]["1"]["pid"])
            struck = {"agent": parent(rank), "frozen": rank, "cut": parent(parent(rank))}[what]
            os.kill(struck, signal.SIGKILL if what == "agent" else signal.SIGSTOP)
        done = running.wait(60)
        if what == "cut":
            assert agents(seconds=30) == []  # the agent notices by itself that nobody is there
            os.kill(struck, signal.SIGKILL)
    if what == "launcher":
        assert done.returncode == -signal.SIGKILL
        return
    assert done.returncode == 1
    first = next(line for line in done.stderr.splitlines() if line.startswith("weft: "))
    if what in ("agent", "cut"):
        assert first.startswith("weft: 127.0.0.2 (rank 1) is gone: ")
    else:
        assert first.startswith("weft: rank 1 on ") and "is frozen: no heartbeat for 3." in first
        assert json.loads((tmp_path / "failure.json").read_text())["stacks"].keys() == {"0"}


@long
def test_a_job_goes_on_without_a_host(config: Path, tmp_path: Path):
    """Two copies of a pipeline become one, which reads the save of both."""
    folder = tmp_path / "runs"
    options = ["--max-restarts", "2", "--min-hosts", "1", "--log-dir", str(folder)]
    with job(config, RESTARTING, [str(tmp_path), "24", "--pause", "0.2"], options, each=2) as running:
        deadline = time.monotonic() + 150
        losses = tmp_path / "losses-0"
        while not (losses.exists() and losses.read_text().count("\n") >= 6) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(parent(read(folder).events[1]["ranks"]["3"]["pid"]), signal.SIGKILL)
        done = running.wait(150).check()
    assert "weft: 127.0.0.2 (ranks 2 to 3) is gone: " in done.stderr
    assert "weft: goes on without 127.0.0.2: 2 ranks on 127.0.0.1\n" in done.stderr
    assert [event["ranks"] for event in read(folder).events if event["event"] == "attempt"] == [4, 2]
    steps = [int(line.split()[0]) for line in (tmp_path / "losses-1").read_text().splitlines()]
    assert steps[0] > 5 and steps[0] % 5 == 1 and steps[-1] == 24


def test_a_host_whose_key_is_not_known(config: Path, tmp_path: Path):
    changed = tmp_path / "config"
    changed.write_text(config.read_text().replace("/known", "/not-known"))
    with job(changed, WAITS) as running:
        done = running.wait(60)
    assert done.returncode == 1
    told = done.stderr.splitlines()[0]
    assert told.startswith("weft: 127.0.0.") and "cannot be reached by ssh: " in told
    assert "Host key verification failed" in told


RECORDED = """
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
for number in range(3):
    step(model, torch.ones(2, 4))
"""
ELSEWHERE = """
weft.shutdown()
for name in os.listdir("out") if os.environ["RANK"] == "1" else ():
    if name.startswith("rank1"):
        os.unlink(f"out/{name}")
"""


@one_day_in(2)
@pytest.mark.parametrize("shared", one_in(2, [True, False]))
def test_recordings_of_all_hosts_are_judged(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
):
    """The page and the verdict are of all ranks if the hosts share the folder; else it is said whose are missing."""
    monkeypatch.chdir(tmp_path)
    script = RECORDED + ("" if shared else ELSEWHERE)
    with job(
        config, script, options=["--report", "out", "--fail-on", "LossNotFinite", "--metrics-port", "0"]
    ) as running:
        done = running.wait(200)
    assert "weft run: metrics are at http://127.0.0.1:" in done.stderr
    assert (tmp_path / "out" / "report.html").exists() and done.returncode in ((0, 3) if shared else (2,))
    told = "out on this machine has no recording of rank 1, and none came from their hosts"
    for text in (told, "the page has some ranks only"):
        assert (text in done.stderr) is (not shared), done.stderr


@one_day_in(3)
def test_recordings_come_from_a_host_with_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second host's working folder is another one, as on another machine; what lay in it before is left there."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there, tmp_path / "sshd"):
        folder.mkdir()
    (there / "out").mkdir()
    (there / "out" / "rank1.old").write_text("of an earlier job")
    command = f'sh -c "$(printf %s "$SSH_ORIGINAL_COMMAND" | sed s#{here}#{there}#g)"'
    more = [f"Match LocalAddress {sshd.HOSTS[1]}", f" ForceCommand {command}"]
    monkeypatch.chdir(here)
    with sshd.running(tmp_path / "sshd", more) as found:
        folder = "/proc/self/cwd/out"  # the same path on both hosts
        options = ["--report", folder, "--fail-on", "LossNotFinite"]
        with job(found, RECORDED, options=options) as running:
            done = running.wait(200)
    assert done.returncode in (0, 3), done.stderr
    assert f"weft: recordings of {sshd.HOSTS[1]} (rank 1) have come: " in done.stderr
    assert "the page has some ranks only" not in done.stderr
    came = {path.name for path in (here / "out").glob("rank1*")}
    assert came == {path.name for path in (there / "out").glob("rank1*")} - {"rank1.old"} and came
    for name in came:
        assert (here / "out" / name).read_bytes() == (there / "out" / name).read_bytes()
    assert not (there / "out" / "report.html").exists() and not list((here / "out").glob(".*"))
