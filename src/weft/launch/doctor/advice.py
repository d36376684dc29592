"""Findings out of facts, each with its remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.launch.discovery import PORTS
from weft.launch.doctor.facts import SHARED, Facts
from weft.launch.doctor.remote import Answer, Link
from weft.launch.doctor.stream import USUAL_PORT
from weft.untrusted import shown_text

LEAST_SHARED = 1 << 30
LEAST_FILES = 4096
COMPRESSION = "docs/data-parallel.md#algorithms-and-compression"
LEAST_BYTES_PER_S = 100e6
USED = f"{USUAL_PORT} (torchrun), {PORTS.start} to {PORTS.stop - 1} (mpirun, srun), and what the system gives"
ODD_BYTES = 24
"""Options that few connections have take so much of a packet."""
MOST_AHEAD_S = 2.0
"""Clocks that are read through ssh are not known better than that."""


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do; no remedy if all is well."""

    host: str
    subject: str
    text: str
    remedy: str = ""

    @property
    def well(self) -> bool:
        """Nothing is to be done."""
        return not self.remedy

    def __str__(self) -> str:
        line = f"{'ok     ' if self.well else 'warning'}  {self.host}: {self.subject}: {self.text}"
        return line if self.well else f"{line}; {self.remedy}"


def of_host(host: str, facts: Facts, alone: bool) -> Iterator[Finding]:
    """Findings from one host's facts; `alone`: no other host takes part."""
    yield _name(host, facts, alone)
    shown = ", ".join(f"{name} {address}" for name, address in facts.interfaces)
    if alone or len(facts.interfaces) == 1:
        yield Finding(host, "network", shown or "no address but the loopback's")
    elif not facts.interfaces:
        yield Finding(
            host, "network", "no address but the loopback's", "other hosts cannot reach it: give it one"
        )
    else:
        name = facts.interfaces[0][0]
        choice = f"-x NCCL_SOCKET_IFNAME={name} -x GLOO_SOCKET_IFNAME={name}"
        yield Finding(host, "network", f"{shown} (if a job hangs in its first step, choose one: {choice})")
    yield (
        Finding(host, "ports", "a process may listen")
        if facts.listens
        else Finding(
            host, "ports", "no process may listen", "allow it: ranks find each other through sockets"
        )
    )
    torch = f"PyTorch {facts.torch}" if facts.torch else "no PyTorch"
    versions = f"Python {facts.python}, {torch}, weft {facts.version}"
    yield Finding(
        host, "versions", versions, "" if facts.torch else "pip install 'weft[torch]', or 'weft[tensorflow]'"
    )
    yield _gpus(host, facts)
    room = f"{facts.shared_bytes / 2**30:.1f} GiB"
    less = facts.shared_bytes < LEAST_SHARED
    advice = (
        "workers of a DataLoader pass batches there: in a container, docker run --shm-size=8g" if less else ""
    )
    yield Finding(host, SHARED, room, advice)
    few = 0 <= facts.open_files < LEAST_FILES
    files = "no limit" if facts.open_files < 0 else str(facts.open_files)
    yield Finding(host, "open files", files, "ulimit -n 65536, before the job" if few else "")


def _name(host: str, facts: Facts, alone: bool) -> Finding:
    own = shown_text(facts.name)
    if not facts.address:
        return Finding(host, "name", f"{own} leads nowhere", f"add a line for it to /etc/hosts on {host}")
    text = f"{own} is {facts.address}"
    if alone or not facts.address.startswith("127."):
        return Finding(host, "name", text)
    real = next((address for _, address in facts.interfaces), "an address of the network")
    remedy = f"weft finds its own way, but other programs give it to their peers: write {real} into /etc/hosts instead"
    return Finding(host, "name", text, remedy)


def _gpus(host: str, facts: Facts) -> Finding:
    kinds = {name: facts.gpus.count(name) for name in facts.gpus}
    text = ", ".join(f"{number} x {shown_text(name)}" for name, number in kinds.items()) or "none"
    if facts.gpus and facts.torch.endswith("+cpu"):
        return Finding(host, "GPUs", text, "this PyTorch was built without CUDA: install one with it")
    return Finding(host, "GPUs", text)


def of_hosts(answers: Sequence[Answer], links: Sequence[Link]) -> Iterator[Finding]:
    """Findings from the answers of several hosts."""
    known = [(answer.host, answer.facts) for answer in answers if answer.facts is not None]
    for answer in answers:
        if answer.facts is None:
            remedy = f"ssh {answer.host} true must work without a question, and Python must be at the same path there"
            yield Finding(answer.host, "ssh", answer.problem, remedy)
            continue
        yield from of_host(answer.host, answer.facts, alone=False)
        late = abs(answer.ahead_s) > MOST_AHEAD_S
        text = f"{abs(answer.ahead_s):.1f} s {'ahead' if answer.ahead_s > 0 else 'behind'}"
        remedy = "run chrony or ntpd: logs and timelines of hosts would not fit together" if late else ""
        yield Finding(answer.host, "clock", text if late else "within 2 s of this host's", remedy)
    for subject in ("python", "torch", "version"):
        found = {host: str(getattr(facts, subject)) for host, facts in known}
        yield from _alike({"version": "weft"}.get(subject, subject), found, "install the same on all")
    yield from _alike(
        "GPUs",
        {host: str(len(facts.gpus)) for host, facts in known},
        "all hosts get equally many ranks: those of the smallest",
    )
    for link in links:
        yield from _of_link(link)


def _of_link(link: Link) -> Iterator[Finding]:
    pair, passed = f"{link.sender} to {link.taker}", link.passed
    opened = f"open the ports of {link.taker} to {link.sender}"
    if link.problem:
        yield Finding(pair, "network", link.problem, opened)
        return
    if passed.closed:
        ports = ", ".join(f"{port} ({shown_text(reason)})" for port, reason in passed.closed)
        yield Finding(pair, "ports", f"no new connection to {ports}", f"{opened}: a job uses {USED}")
    if not passed.bytes_per_s:
        if passed.packet_bytes:
            text = f"connections begin, but full packets ({passed.mtu_bytes} bytes) do not arrive"
            yield Finding(pair, "network", text, _smaller("what the path takes"))
        return
    slow = passed.bytes_per_s < LEAST_BYTES_PER_S
    advice = f"keep a pipeline on one host, and compress gradients: {COMPRESSION}" if slow else ""
    yield Finding(pair, "network", f"{passed.bytes_per_s / 1e6:,.0f} MB/s", advice)
    if 0 < passed.packet_bytes < passed.mtu_bytes - ODD_BYTES:
        text = (
            f"{passed.packet_bytes} bytes pass, and the interface of {link.sender} sends {passed.mtu_bytes}"
        )
        yield Finding(pair, "packets", text, _smaller(str(passed.packet_bytes)))


def _smaller(size: str) -> str:
    return f"let what lies between take larger ones, or give both interfaces less: ip link set dev NAME mtu {size}"


def _alike(subject: str, found: dict[str, str], remedy: str) -> Iterator[Finding]:
    if len({*found.values()}) > 1:
        texts = ", ".join(f"{value or 'none'} on {host}" for host, value in found.items())
        yield Finding("all", subject, f"they differ: {texts}", remedy)
