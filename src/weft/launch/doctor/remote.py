"""Asks other hosts, through ssh: for their facts, and for the speed of each pair."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import LaunchError, WeftError
from weft.foreign import shown_text, whole
from weft.launch.doctor.facts import Facts
from weft.launch.engines.ssh import STRICT

SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    """What came of asking one host.

    Attributes:
        problem: Why it said nothing; empty if it did.
        ahead_s: How far its clock is ahead of this host's.
    """

    host: str
    facts: Facts | None = None
    problem: str = ""
    ahead_s: float = 0.0


@dataclass(frozen=True)
class Speed:
    """Bytes per second from one host to another one, or why there is none."""

    sender: str
    taker: str
    bytes_per_s: float = 0.0
    problem: str = ""


def command(host: str, module: str, *words: str) -> list[str]:
    """ssh that runs a module of weft there, by the same Python and in the same folder as here."""
    paths = os.environ.get("PYTHONPATH")
    own = ["env", f"PYTHONPATH={paths}"] if paths else []
    there = shlex.join([*own, sys.executable, "-m", f"weft.launch.doctor.{module}", *words])
    return [
        "ssh",
        *STRICT,
        "-o",
        "ConnectTimeout=10",
        "--",
        host,
        f"cd {shlex.quote(os.getcwd())} && {there}",
    ]


def ask(host: str) -> Answer:
    """A host's facts."""
    began = time.time()
    try:
        done = subprocess.run(
            command(host, "facts"),
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


def measure(sender: str, taker: str, address: str) -> Speed:
    """How fast one host sends to an address of another one."""
    secret = secrets.token_hex(16)
    taking = subprocess.Popen(
        command(taker, "stream", "take"),
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
        port = whole(taking.stdout.readline().strip(), 65535)
        if not port:
            return Speed(
                sender,
                taker,
                problem=f"{taker} named no port: nothing can listen there, or it is too busy to answer",
            )
        done = subprocess.run(
            command(sender, "stream", "send", address, str(port)),
            input=f"{secret}\n", capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            return Speed(sender, taker, problem=f"{address}:{port}: {shown_text(last)}")
        return Speed(sender, taker, float(taking.communicate(timeout=SECONDS)[0]))
    except (subprocess.TimeoutExpired, ValueError):
        return Speed(sender, taker, problem=f"{address} took nothing in {SECONDS:g} s")
    finally:
        patience.cancel()
        taking.kill()
        taking.communicate()


def pairs(answers: Sequence[Answer]) -> list[Speed]:
    """The speed of each pair of hosts that answered, one after the other."""
    found = [(answer.host, answer.facts) for answer in answers if answer.facts is not None]
    speeds = []
    for number, (taker, facts) in enumerate(found):
        address = reached_at(facts, taker)
        speeds += [measure(sender, taker, address) for sender, _ in found[number + 1 :]]
    return speeds


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
