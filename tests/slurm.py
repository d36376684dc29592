"""A Slurm of two nodes on this machine, for tests: its own munged, slurmctld and two slurmd in one folder. As root.

The nodes are names only: both are this machine. A file of hosts that only these processes see makes the names known.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.launch.rendezvous import interface_of

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare")
NODES = ("wefta", "weftb")
START_S = 60.0
_CONFIG = """
ClusterName=weft
SlurmctldHost={host}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=3
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=10
NodeName=wefta NodeHostname={host} NodeAddr={address} Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName=weftb NodeHostname={host} NodeAddr={address} Port={ports[2]} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def own_address() -> str:
    """An address of this machine that is not the loopback's; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # nothing is sent
        address = str(probe.getsockname()[0])
        return address if interface_of(address) not in (None, "lo") else ""
    return ""


def why_not() -> str:
    """Why this machine can have no Slurm; empty if it can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: slurm-wlm munge)"
    if os.getuid() != 0:
        return "only root can start a Slurm here"
    return "" if own_address() else "this machine has no address but the loopback's"


@dataclass(frozen=True)
class Cluster:
    """A Slurm that runs. `environ`: the variables by which its commands find it."""

    folder: Path
    environ: dict[str, str]

    def command(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        told = self.command("scontrol", "--oneliner", "show", "job", job)
        return next((word.partition("=")[2] for word in told.split() if word.startswith(f"{name}=")), "")

    def wait(self, job: str, *states: str, seconds: float = 240.0) -> str:
        """The state of a job, once it is one of these."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {states}\n{self.logs()}"
            time.sleep(0.2)
        return state

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in self.folder.glob("*.log")
        )


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A Slurm of two nodes, gone at the end."""
    host, address = socket.gethostname(), own_address()
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in held:
            each.bind(("", 0))
        ports = [each.getsockname()[1] for each in held]
    text = _CONFIG.format(host=host, address=address, folder=folder, ports=ports)
    (folder / "slurm.conf").write_text(text)
    names = Path("/etc/hosts").read_text() + f"\n{address} {' '.join(NODES)}\n"
    (folder / "hosts").write_text(names)
    environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    private = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount --bind "$0" /etc/hosts && exec "$@"',
        str(folder / "hosts"),
    ]
    files = ("--key-file=munge.key", "--socket=munge.socket", "--log-file=munged.log", "--pid-file=munged.pid",
             "--seed-file=munge.seed")  # fmt: skip
    munge = ["munged", "--foreground", "--force", *(file.replace("=", f"={folder}/") for file in files)]
    commands = [munge, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            quiet = subprocess.DEVNULL
            processes.append(
                subprocess.Popen([*private, *command], env=environ, stdin=quiet, stdout=quiet, stderr=quiet)
            )
            if command is munge:
                _until((folder / "munge.socket").exists, folder)
        found = Cluster(folder, environ)

        def ready() -> bool:
            done = subprocess.run(
                ["sinfo", "-h", "-N", "-o", "%T"], env=environ, capture_output=True, text=True
            )
            return done.stdout.split() == ["idle"] * len(NODES)

        _until(ready, folder)
        yield found
    finally:
        for process in processes[::-1]:
            process.terminate()
        for process in processes[::-1]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def _until(look: object, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    assert callable(look)
    while not look():
        logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
        assert time.monotonic() < deadline, f"Slurm does not come up\n{logs}"
        time.sleep(0.1)
