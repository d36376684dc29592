"""Runs one row of the table and judges it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fault.matrix import hosts as network
from tests.fault.matrix.table import FAULTS, HEARTBEAT_S, TWO_HOSTS, Row
from tests.launching import MARK, ROOT, SOURCE, _environ, _marked, end_all, processes_left, started
from weft.checkpoint.find import faults, in_order
from weft.watch.process import is_alive

JOB = Path(__file__).parents[1] / "workers" / "struck.py"
GROUP = "/sys/fs/cgroup/memory/weft-struck-{}"
LONGEST_S = 240.0
"""A job that comes to no end by then is none that a busy machine delays."""
FLAP_S = 3.0
LEFT_BY_OTHERS = ("__autograph", "torchinductor_", "torchelastic_", "ompi.", "pymp-")


@dataclass(frozen=True)
class Outcome:
    """What became of a row. `seconds`: from the fault to the end of all, where the job was not started again."""

    problem: str
    seconds: float | None
    said: str


@dataclass
class _Ended:
    code: int | None
    at: float
    out: str
    err: str


def why_not(row: Row) -> str:
    """Why this machine cannot run a row; empty if it can."""
    if row.engine.startswith("mpirun") and shutil.which("mpirun") is None:
        return "mpirun is not installed"
    if row.fault == "full disk" and os.getuid() != 0:
        return "only root can mount a small disk"
    return network.why_not() if row.engine in TWO_HOSTS else ""


def strike(row: Row) -> Outcome:
    """Runs the row."""
    with _folders(row) as (folder, temporary):
        before = set(os.listdir("/dev/shm"))
        run = _on_two_hosts if row.engine in TWO_HOSTS else _on_this_host
        ended, left = run(row, folder, temporary)
        struck = [float(path.read_text()) for path in folder.glob("struck-*")]
        seconds = ended.at - max(struck) if struck else None
        if not struck:
            problem = "the fault never came"
        else:
            problem = (
                _problem(row, ended, folder, seconds or 0.0) or left or _leavings(folder, temporary, before)
            )
        return Outcome(problem, None if row.restarts else seconds, f"{ended.out}\n{ended.err}")


@contextlib.contextmanager
def _folders(row: Row) -> Iterator[tuple[Path, Path]]:
    """A folder for the job, with a small disk for its saves if that is to be full, and one for temporary files."""
    with tempfile.TemporaryDirectory(prefix="weft-matrix-") as name:
        folder, temporary = Path(name) / "job", Path(name) / "tmp"
        (folder / "saves").mkdir(parents=True)
        temporary.mkdir()
        small = row.fault == "full disk"
        if small:
            disk = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder / "saves")]
            subprocess.run(disk, check=True)
        try:
            yield folder, temporary
        finally:
            if small:
                subprocess.run(["umount", str(folder / "saves")], check=True)
            for group in Path("/sys/fs/cgroup/memory").glob("weft-struck-*"):
                with contextlib.suppress(OSError):
                    group.rmdir()


def _arguments(row: Row, folder: Path) -> list[str]:
    fault = FAULTS[row.fault]
    own = {"two": "SIGKILL", "launcher": "waits", "agent": "waits", "link": "waits"}.get(fault.by, row.fault)
    ranks = ",".join(map(str, row.struck))
    given = [str(folder), "--fault", own, "--ranks", ranks, "--when", row.moment]
    heartbeat = HEARTBEAT_S if fault.freezes else 3 * FLAP_S if row.engine in TWO_HOSTS else 60.0
    return [*given, "--heartbeat", str(heartbeat)]


def _on_this_host(row: Row, folder: Path, temporary: Path) -> tuple[_Ended, str]:
    launcher = {"local": "weft"}.get(row.engine, row.engine)
    options = ["--max-restarts", str(row.restarts)] if row.restarts else []
    warm = launcher == "weft" and row.moment != "import"  # a warm rank has imported everything
    environ = {"TMPDIR": str(temporary), "PYTHONWARNINGS": "ignore"}
    with started(
        row.ranks, JOB, _arguments(row, folder), environ, launcher=launcher, options=options, warm=warm
    ) as job:

        def kill() -> None:
            os.kill(job.process.pid, signal.SIGKILL)

        with _striking(row, folder, kill):
            code, at = _wait(row, folder, job.process.poll, job.mark)
        if code is None:
            end_all(job.mark)
        out, err = job.process.communicate()
        left = processes_left(job.mark, 0)
        return _Ended(code, at, out, err), f"left behind: processes {left}" if left else ""


def _wait(row: Row, folder: Path, poll: Callable[[], int | None], mark: str) -> tuple[int | None, float]:
    """The exit code, and when nothing was left of the job; no code if it does not end in time."""
    deadline = time.monotonic() + LONGEST_S
    while True:
        struck = list(folder.glob("struck-*"))
        if struck and not row.restarts and not FAULTS[row.fault].survived:
            with contextlib.suppress(ValueError):
                deadline = min(deadline, max(float(path.read_text()) for path in struck) + _bound_s(row))
        code = poll()
        if code is not None and not _living(folder) and not processes_left(mark, 0):
            return code, time.monotonic()
        if time.monotonic() > deadline:
            return None, time.monotonic()
        time.sleep(0.02)


def _living(folder: Path) -> list[int]:
    """The ranks' processes that still run."""
    texts = [path.read_text().split() for path in folder.glob("began-*")]
    return [int(words[1]) for words in texts if len(words) == 2 and is_alive(int(words[1]))]


def _bound_s(row: Row) -> float:
    """The promise, with more time on a busy machine."""
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    return row.promised_s * (1.0 + busy)


@contextlib.contextmanager
def _striking(row: Row, folder: Path, *blows: Callable[[], None]) -> Iterator[None]:
    """Calls the blows once the rank says that it is at the moment, if the row is one that is struck from outside."""
    if FAULTS[row.fault].by not in ("launcher", "agent", "link"):
        yield
        return
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            if any(folder.glob("struck-*")):
                for blow in blows:
                    blow()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


# --- two hosts -----------------------------------------------------------------------------------------------------


def _on_two_hosts(row: Row, folder: Path, temporary: Path) -> tuple[_Ended, str]:
    mark = uuid.uuid4().hex
    own = {MARK: mark, "TMPDIR": str(temporary), "PYTHONWARNINGS": "ignore", "WEFT_TOKEN": uuid.uuid4().hex}
    path = os.pathsep.join([str(SOURCE), str(ROOT)])
    environ = {**_environ(own), "PYTHONPATH": path}
    with network.two_hosts() as hosts, contextlib.ExitStack() as stack:
        commands = (
            _torchruns(row, hosts, folder)
            if "torchrun" in row.engine
            else _mpirun(row, hosts, folder, environ)
        )
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        processes = [
            subprocess.Popen(
                command, env=environ, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
            for command, file in zip(commands, files, strict=True)
        ]

        def poll() -> int | None:
            codes = [process.poll() for process in processes]
            return None if None in codes else next((code for code in codes if code), 0)

        with _striking(row, folder, *_blows(row, hosts, mark)):
            code, at = _wait(row, folder, poll, mark)
        end_all(mark)
        texts = []
        for process, file in zip(processes, files, strict=True):
            process.wait(30)
            file.seek(0)
            texts.append(file.read())
        return _Ended(code, at, "", "\n".join(texts)), ""


def _torchruns(row: Row, hosts: network.Hosts, folder: Path) -> list[list[str]]:
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={row.ranks // 2}"]
    place = [f"--master-addr={network.ADDRESSES[0]}", "--master-port=29517"]
    return [
        hosts.on(host, *run, f"--node-rank={host}", *place, str(JOB), *_arguments(row, folder))
        for host in range(2)
    ]


def _mpirun(row: Row, hosts: network.Hosts, folder: Path, environ: dict[str, str]) -> list[list[str]]:
    """By `weft run`, with a script in the place of ssh."""
    agent = folder / "remote.sh"
    there = " ".join(hosts.on(1, "sh", "-c"))
    agent.write_text(f'#!/bin/sh\nshift\nexec {there} "$*"\n')
    agent.chmod(0o755)
    options = [
        "--allow-run-as-root", "--oversubscribe", "--mca", "plm_rsh_agent", str(agent),
        "--mca", "btl_tcp_if_include", network.DEVICE, "--mca", "oob_tcp_if_include", network.DEVICE,
        *(part for name in (MARK, "TMPDIR", "PYTHONWARNINGS") for part in ("-x", name)),
    ]  # fmt: skip
    where = ",".join(f"{address}:{row.ranks // 2}" for address in network.ADDRESSES)
    run = [sys.executable, "-m", "weft", "run", "--engine", "mpirun", "--hosts", where]
    return [hosts.on(0, *run, "--mpi-options", " ".join(options), str(JOB), *_arguments(row, folder))]


def _blows(row: Row, hosts: network.Hosts, mark: str) -> list[Callable[[], None]]:
    def flap() -> None:
        hosts.cut()
        time.sleep(FLAP_S)
        hosts.mend()

    def kill_agent() -> None:
        word = "orted" if "mpirun" in row.engine else "torch.distributed.run"
        for pid in _marked(mark):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if any(w.endswith(word) for w in words) and not {"ip", "tests.planted.elsewhere"} & {*words}:
                    if "mpirun" in row.engine or "--node-rank=1" in words:
                        os.kill(pid, signal.SIGKILL)

    strikes: dict[str, Callable[[], None]] = {
        "host agent killed": kill_agent,
        "link cut": hosts.cut,
        "drop one way": hosts.drop_one_way,
        "slow link": hosts.slow_down,
        "flapping link": flap,
    }
    return [strikes[row.fault]] if row.fault in strikes else []


# --- the verdict ---------------------------------------------------------------------------------------------------


def losses(folder: Path) -> dict[int, str]:
    """The losses by step, of all attempts. A step that was done twice must have had the same loss."""
    found: dict[int, str] = {}
    for file in sorted(folder.glob("losses-*")):
        for line in file.read_text().splitlines():
            step, loss = line.split()
            if found.setdefault(int(step), loss) != loss:
                found[int(step)] = f"{found[int(step)]}, then {loss}"
    return found


@functools.cache
def undisturbed(ranks: int) -> dict[int, str]:
    """The losses of the same job without a fault."""
    with tempfile.TemporaryDirectory(prefix="weft-matrix-") as name:
        with started(ranks, JOB, [name], warm=True) as job:
            job.wait(LONGEST_S).check()
        return losses(Path(name))


def _problem(row: Row, ended: _Ended, folder: Path, seconds: float) -> str:
    fault = FAULTS[row.fault]
    if ended.code is None:
        running = _living(folder)
        return f"not ended {seconds:.1f} s after the fault" + (
            f"; ranks that ran: {running}" if running else ""
        )
    if row.restarts or fault.survived:
        if ended.code != 0:
            return f"exit code {ended.code}, though it was to go on"
        if losses(folder) != undisturbed(row.ranks):
            return f"other losses: {losses(folder)} and not {undisturbed(row.ranks)}"
    elif ended.code == 0:
        return "exit code 0"
    elif row.engine == "local" and ended.code != fault.code and row.fault != "memory limit":
        return f"exit code {ended.code} and not {fault.code}"
    return "" if fault.survived or fault.by == "launcher" else _blames(row, ended)


def _blames(row: Row, ended: _Ended) -> str:
    """Whether the first line that names a rank names one that was struck."""
    fault = FAULTS[row.fault]
    text = ended.err + ended.out
    named = _named(text, r"weft: (?:no rank gets on: )?rank (\d+) on")
    if row.engine != "local" and not named:  # it was quicker than those that wait, and says itself who it was
        if fault.by == "agent" and "lost communication with a remote daemon" in text:
            return ""  # mpirun's own words
        named = _named(
            text, r"\) local_rank: (\d+) \(pid", r"process rank (\d+) with", r"\[\[\d+,\d+\],(\d+)\]"
        )
    if row.moment == "restart":  # each rank that lost its connection told before what led to the restart
        named = [*named[1:], *_named(text, r"\) local_rank: (\d+) \(pid")]
        named = [number for number in named if number in row.struck]
    if not named:
        return "no rank is named"
    culprits = {*range(row.ranks)} if row.fault == "full disk" else {*row.struck}
    if fault.by in ("agent", "link"):
        half = row.ranks // 2
        culprits = {*range(half, row.ranks)} if fault.by == "agent" else {*range(row.ranks)}
    if named[0] not in culprits:
        return f"rank {named[0]} is named and not {', '.join(map(str, sorted(culprits)))}"
    if row.engine == "local" and not re.search(
        rf"weft: .*rank {named[0]} on \S+ \(pid \d+\) ({fault.says})", text
    ):
        return f"the fault is not told: {fault.says}"
    return ""


def _named(text: str, *patterns: str) -> list[int]:
    return [int(number) for pattern in patterns for number in re.findall(pattern, text)]


def _leavings(folder: Path, temporary: Path, before: set[str]) -> str:
    names = [path.name for path in temporary.iterdir() if not path.name.startswith(LEFT_BY_OTHERS)]
    if names:
        return f"left behind in the temporary folder: {', '.join(names)}"
    if shared := [name for name in {*os.listdir("/dev/shm")} - before if "weft" in name]:
        return f"left behind in /dev/shm: {', '.join(shared)}"
    for save in in_order(folder / "saves", None):
        if save.index is not None and (damage := faults(save.folder, save.index)):
            return f"a damaged save: {damage}"
    return ""
