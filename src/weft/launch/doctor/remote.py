"""Asks other hosts, through ssh: for their facts, and for what passes from each to each other one."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from weft.document import Document
from weft.errors import FormatError, LaunchError, WeftError
from weft.launch.doctor.facts import Facts
from weft.launch.doctor.stream import Passed
from weft.launch.engines.ssh import STRICT
from weft.untrusted import parse_json, shown_text

SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    """The answer of one host.

    Attributes:
        problem: Why it said nothing; empty if it did.
        ahead_s: How far its clock is ahead of this host's.
    """

    host: str
    facts: Facts | None = None
    problem: str = ""
    ahead_s: float = 0.0


@dataclass(frozen=True)
class Link:
    """The traffic that passes from one host to another one, or why that is not known."""

    sender: str
    taker: str
    passed: Passed = Passed()
    problem: str = ""


def command(host: str, options: Sequence[str], module: str, *words: str) -> list[str]:
    """ssh that runs a module of weft there, by the same Python and in the same folder as here."""
    paths = os.environ.get("PYTHONPATH")
    own = ["env", f"PYTHONPATH={paths}"] if paths else []
    there = shlex.join([*own, sys.executable, "-m", f"weft.launch.doctor.{module}", *words])
    return [
        "ssh",
        *options,
        *STRICT,
        "-o",
        "ConnectTimeout=10",
        "--",
        host,
        f"cd {shlex.quote(os.getcwd())} && {there}",
    ]


def ask(host: str, options: Sequence[str] = ()) -> Answer:
    """A host's facts. ``options``: for ssh."""
    began = time.time()
    try:
        done = subprocess.run(
            command(host, options, "facts"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        raise LaunchError("ssh is not installed: leave --hosts out to look at this host only") from error
    except subprocess.TimeoutExpired:
        return Answer(host, problem=f"no answer in {SECONDS:g} s")
    ended = time.time()
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Answer(host, problem=shown_text(lines[-1]))
    try:
        facts = Facts.from_json(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "")
    except WeftError as error:
        return Answer(host, problem=f"it answers with something else: {error}")
    # Python takes longer to start than to end, so the clock was read soon before the answer came
    middle = max(began, ended - 0.2)
    return Answer(host, facts, ahead_s=facts.clock_s - middle)


def measure(sender: str, taker: str, address: str, options: Sequence[str] = ()) -> Link:
    """The traffic that passes from one host to an address of another one. ``options``: for ssh."""
    secret = secrets.token_hex(16)
    taking = subprocess.Popen(
        command(taker, options, "stream", "take"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert taking.stdin is not None and taking.stdout is not None
    patience = threading.Timer(2 * SECONDS, taking.kill)
    patience.start()
    try:
        taking.stdin.write(f"{secret}\n")
        taking.stdin.flush()
        ports = _ports(taking.stdout.readline())
        if not ports:
            return Link(
                sender,
                taker,
                problem=f"{taker} named no port: nothing can listen there, or it is too busy to answer",
            )
        done = subprocess.run(
            command(sender, options, "stream", "send", address, *map(str, ports)),
            input=f"{secret}\n", capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            return Link(sender, taker, problem=f"{address}: {shown_text(last)}")
        return Link(sender, taker, _passed(done.stdout))
    except (subprocess.TimeoutExpired, OSError, FormatError):
        return Link(sender, taker, problem=f"{address} took nothing in {SECONDS:g} s")
    finally:
        patience.cancel()
        with suppress(OSError):
            taking.stdin.close()  # its other end hears that, wherever it is
        taking.kill()
        taking.stdout.close()
        taking.wait()


def _ports(line: str) -> list[int]:
    """The ports that a host says it listens on; none if it says something else."""
    with suppress(FormatError):
        ports = parse_json(line)
        if isinstance(ports, list):
            return [port for port in ports if type(port) is int and 0 < port < 1 << 16]
    return []


def _passed(text: str) -> Passed:
    report = Document(parse_json(text))
    return Passed(
        tuple((each.items()[0].whole(), each.items()[1].text()) for each in report["closed"]),
        report["bytes_per_s"].number(), report["packet_bytes"].whole(), report["mtu_bytes"].whole(),
    )  # fmt: skip


def links(answers: Sequence[Answer], options: Sequence[str] = ()) -> list[Link]:
    """The traffic between the hosts that answered, each way of each pair: in a round each host sends to another one."""
    found = [
        (answer.host, reached_at(answer.facts, answer.host)) for answer in answers if answer.facts is not None
    ]
    measured: list[Link] = []
    for ahead in range(1, len(found)):
        others = [*found[ahead:], *found[:ahead]]
        with ThreadPoolExecutor(len(found)) as pool:
            measured += pool.map(
                lambda sender, taker: measure(sender[0], taker[0], taker[1], options), found, others
            )
    return measured


def reached_at(facts: Facts, host: str) -> str:
    """Where others reach a host: the address that its name leads to, else its first one.

    >>> from dataclasses import replace
    >>> here = replace(Facts.here(), address="127.0.1.1", interfaces=(("eth0", "10.0.0.7"),))
    >>> reached_at(here, "node7")
    '10.0.0.7'
    """
    own = [address for _, address in facts.interfaces]
    if facts.address in own:
        return facts.address
    return own[0] if own else host.rpartition("@")[2]
