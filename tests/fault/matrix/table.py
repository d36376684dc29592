"""What is struck when, under which launcher, and what is promised then. Data only."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

ONE_HOST = ("local", "torchrun", "mpirun")
TWO_HOSTS = ("torchrun, 2 hosts", "mpirun, 2 hosts")
ENGINES = (*ONE_HOST, *TWO_HOSTS)
RESTARTING = ("local", "torchrun")
"""Launchers of one host that start a job again, if told so."""
HEARTBEAT_S = 4.0
"""The `heartbeat_timeout` of jobs in which a rank freezes."""
CULPRIT = {2: 1, 3: 0, 4: 2}
"""Which rank is struck, by their number: the last, the one with the store, one in the middle."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        says: What the line that names the culprit has after its name, as a pattern.
        code: The exit code of `weft run`.
        by: Who strikes: the rank itself (``rank``), two ranks (``two``), or the test from outside.
        freezes: It shows by a missing heartbeat only.
        hidden_s: So much later it shows, as the rank waits for others.
        survived: The job goes on as if nothing had been.
    """

    says: str = ""
    code: int = 1
    by: str = "rank"
    freezes: bool = False
    hidden_s: float = 0.0
    survived: bool = False


FAULTS = {
    "SIGKILL": Fault(r"was killed by SIGKILL", 137),
    "SIGSEGV": Fault(r"was killed by SIGSEGV", 139),
    "exception": Fault(r"failed.*injected"),
    "handler waits": Fault(r"failed.*injected", hidden_s=10.0),
    "handler saves": Fault(r"failed.*injected", hidden_s=10.0),
    "exit 0": Fault(r"left( at step \d+)? while"),
    "SIGSTOP": Fault(r"is frozen: no heartbeat for", freezes=True),
    "frozen interpreter": Fault(r"is frozen: no heartbeat for", freezes=True),
    "memory limit": Fault(r"was killed by SIGKILL|failed in .*[Mm]emory", 137),
    "full disk": Fault(r"failed in .*(No space left on device|was not saved)"),
    "two at once": Fault(r"was killed by SIGKILL", 137, "two"),
    "launcher killed": Fault(code=-9, by="launcher"),
    "host agent killed": Fault(by="agent"),
    "link cut": Fault(by="link", freezes=True),
    "drop one way": Fault(by="link", freezes=True),
    "slow link": Fault(by="link", survived=True),
    "flapping link": Fault(by="link", survived=True),
}
MOMENTS = ("import", "rendezvous", "first step", "step", "save", "restart")
ON_ONE_HOST = (
    *(
        (fault, "step")
        for fault, what in FAULTS.items()
        if fault != "full disk" and what.by not in ("agent", "link")
    ),
    ("full disk", "save"),
    *itertools.product(("SIGKILL", "exception"), ("rendezvous", "first step", "save", "restart")),
    ("SIGSTOP", "first step"),
    ("SIGSTOP", "save"),
    ("launcher killed", "import"),
    ("SIGSTOP", "import"),
    ("launcher killed", "rendezvous"),
    ("launcher killed", "save"),
)
ON_TWO_HOSTS = (
    *((fault, "step") for fault in ("SIGKILL", "exception", "SIGSTOP")),
    *((fault, "step") for fault, what in FAULTS.items() if what.by in ("agent", "link")),
)


@dataclass(frozen=True)
class Row:
    """One row. `restarts`: how often the launcher may start the job again."""

    engine: str
    ranks: int
    fault: str
    moment: str
    restarts: int = 0

    def __str__(self) -> str:
        again = ", started again" if self.restarts else ""
        return f"{self.engine}, {self.ranks} ranks: {self.fault}, {self.moment}{again}"

    @property
    def struck(self) -> tuple[int, ...]:
        """The ranks that are struck, each of which is the culprit."""
        first = CULPRIT[self.ranks]
        return (first, (first + 1) % self.ranks) if FAULTS[self.fault].by == "two" else (first,)

    @property
    def promised_s(self) -> float:
        """Within which time nothing may be left, on a machine that does nothing else."""
        away = 30.0 if self.engine in TWO_HOSTS else 10.0 if self.engine != "local" else 3.0
        starts = (
            10.0 if self.moment == "import" else 0.0
        )  # they are gone once they have imported and come to init
        return (
            away + starts + FAULTS[self.fault].hidden_s + (HEARTBEAT_S if FAULTS[self.fault].freezes else 0.0)
        )


def rows() -> list[Row]:
    """All of them, the cheap ones first."""
    found = []
    for engine, ranks, (fault, moment) in itertools.product(ONE_HOST, CULPRIT, ON_ONE_HOST):
        again = engine in RESTARTING and FAULTS[fault].by != "launcher"
        if moment != "restart":
            found.append(Row(engine, ranks, fault, moment))
        if again and fault != "full disk":
            found.append(Row(engine, ranks, fault, moment, 2 if moment == "restart" else 1))
    found += [
        Row(engine, ranks, fault, moment)
        for engine, ranks, (fault, moment) in itertools.product(TWO_HOSTS, (2, 4), ON_TWO_HOSTS)
    ]
    return found


SPANNING = (
    Row("local", 2, "SIGKILL", "save", 1),
    Row("local", 3, "two at once", "step"),
    Row("local", 4, "frozen interpreter", "step", 1),
    Row("local", 2, "memory limit", "step"),
    Row("local", 3, "exit 0", "step", 1),
    Row("local", 2, "full disk", "save"),
    Row("local", 3, "exception", "restart", 2),
    Row("local", 2, "handler waits", "step", 1),
    Row("torchrun", 2, "SIGKILL", "step", 1),
    Row("mpirun", 2, "SIGSTOP", "step"),
    Row("mpirun", 2, "launcher killed", "import"),
    Row("mpirun", 2, "SIGSTOP", "import"),
    Row("torchrun", 3, "handler waits", "step"),
    Row("mpirun", 2, "handler saves", "step"),
    Row("torchrun, 2 hosts", 2, "SIGSTOP", "step"),
    Row("mpirun, 2 hosts", 2, "link cut", "step"),
)
"""Those of the normal tests: each fault kind, moment and launcher that no other test has, at least once."""
