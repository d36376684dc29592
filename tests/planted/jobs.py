"""The jobs with planted faults, and which verdict each must get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.slow_network.__main__ import two_hosts
from weft.analysis.analysis import Analysis
from weft.profiler.reading import read_run
from weft.rules.rule import Status, judge
from weft.rules.table import RULES
from weft.rules.verdict import Verdict, verdict

WORKER = Path(__file__).parent / "worker.py"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Planted:
    """One job.

    Attributes:
        expected: The rules of which one must be the verdict; none for a clean job.
        arguments: Of the worker.
        ranks: How many processes.
        quick: A part of `make test`, which only asks that the fault is found: on a busy machine others may be, too.
        hog_core: The core that a process outside of the job takes.
    """

    expected: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    quick: bool = False
    hog_core: int = -1

    def run(self, folder: Path) -> None:
        """Trains, and records into a folder."""
        arguments = ["--partitions", str(self.ranks), *self.arguments]
        command = [
            sys.executable,
            "-m",
            "weft",
            "run",
            "-n",
            str(self.ranks),
            "--quiet",
            "--report",
            str(folder),
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        with tempfile.TemporaryDirectory() as working, _hog(self.hog_core):
            done = subprocess.run(
                [*command, str(WORKER), *arguments], cwd=working, env=environ, capture_output=True, text=True,
                timeout=400,
            )  # fmt: skip
        assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class OverLink(Planted):
    """One job over two hosts, which are network namespaces, with a slow link between them and clocks that differ.

    Attributes:
        rate: What the link carries each way.
        ahead_ms: By how much the second host's clock is ahead.
    """

    rate: str = "200mbit"
    ahead_ms: int = 5

    def run(self, folder: Path) -> None:
        """Trains on both hosts, and records into one folder."""
        with tempfile.TemporaryDirectory() as working, two_hosts(self.rate) as hosts:
            ranks = []
            for rank, host in enumerate(hosts):
                environ = {
                    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "RANK": str(rank),
                    "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1",
                    "MASTER_PORT": "29431", "GLOO_SOCKET_IFNAME": "slow",
                    "WEFT_SET": json.dumps({"record": str(folder)}),
                }  # fmt: skip
                within = ["ip", "netns", "exec", host, "unshare", "--pid", "--fork", "--mount-proc"]
                within += [sys.executable, "-m", "tests.planted.elsewhere"]
                command = [*within, f"node{rank}", str(rank * self.ahead_ms), sys.executable, str(WORKER)]
                ranks.append(
                    subprocess.Popen(
                        [*command, *self.arguments], cwd=working, env=environ, stderr=subprocess.PIPE
                    )
                )
            try:
                told = [each.communicate(timeout=400)[1].decode(errors="replace") for each in ranks]
            finally:
                for each in ranks:
                    each.kill()
                    each.wait()
        assert not any(each.returncode for each in ranks), told


@contextmanager
def _hog(core: int) -> Iterator[None]:
    """Inside, another process takes a core."""
    if core < 0:
        yield
        return
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(busy.pid, {core})
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def found_in(folder: Path) -> Verdict:
    """What the rules say of a recording."""
    return verdict(judge(RULES, Analysis(read_run(folder))))


def faults(planted: Planted, told: Verdict) -> list[str]:
    """What is wrong with the findings, a sentence each."""
    findings = told.findings
    wrong = [f"{each.rule}: {each.text}" for each in findings if each.status is Status.ERROR]
    first = told.finding.rule if told.finding is not None else ""
    if planted.expected:
        if first not in planted.expected:
            wrong.append(
                f"the verdict is {first or 'none'}, not {' or '.join(planted.expected)}: {told.text}"
            )
        wrong += [
            f"{each.rule} is critical, too: {each.text}"
            for each in findings
            if each.status is Status.CRITICAL and each.rule not in planted.expected
        ]
    else:
        wrong += [
            f"{each.rule} finds something in a clean run: {each.text}"
            for each in findings
            if each.status in (Status.WARNING, Status.CRITICAL)
        ]
    return wrong


MANY = ("--microbatches", "32", "--block-s", "0.032")
"""So many that the pipeline's own bubble is small."""
COARSE = ("--microbatches", "8", "--block-s", "0.064")
"""So long that a busy machine, which wakes sleepers late, hides nothing."""
JOBS = {
    "nothing, 2 ranks": Planted((), MANY),
    "nothing, 4 ranks": Planted((), ("--microbatches", "32", "--block-s", "0.064"), 4),
    "a slow module on the last of 2": Planted(
        ("LastPartitionHeavy",), ("--fault", "heavy_last", *COARSE), quick=True
    ),
    "a slow module on the last of 4": Planted(
        ("LastPartitionHeavy",), ("--fault", "heavy_last", "--microbatches", "32", "--block-s", "0.064"), 4
    ),
    "a slow module in the middle of 4": Planted(
        ("PartitionImbalance",), ("--fault", "heavy_middle", "--microbatches", "32", "--block-s", "0.064"), 4
    ),
    "another process on a rank's core": Planted(
        ("StragglerRank",), ("--fault", "straggler", "--spin", "--core", "1", *MANY), hog_core=1
    ),
    "a loader that sleeps": Planted(("DataWait",), ("--fault", "late_data", *COARSE), quick=True),
    "preprocessing on both cores": Planted(
        ("PreprocessingCompetes",), ("--fault", "preprocessing", "--spin", *MANY)
    ),
    "too few microbatches": Planted(("MicrobatchesTooFew", "PipelineBubble"), ("--microbatches", "2"), 4),
    "too many microbatches": Planted(
        ("MicrobatchesTooMany",), ("--microbatches", "32", "--block-s", "0.0002")
    ),
    "a leak of 10 MB a step": Planted(("MemoryLeak",), ("--fault", "leak", "--steps", "40"), quick=True),
    "one step in 25 takes five times as long": Planted(
        ("StepOutlier",), ("--fault", "outlier", "--steps", "78", *MANY)
    ),
    "collector pauses": Planted(("CollectorPauses",), ("--fault", "collector", *MANY)),
    "a link of 200 Mbit/s between hosts": OverLink(
        ("TransferExposed",), ("--microbatches", "8", "--block-s", "0.016", "--wide", "8192")
    ),
    "loss is not a number": Planted(("LossNotFinite",), ("--fault", "nan"), quick=True),
}
