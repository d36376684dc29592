"""Runs many small items (cases, checks) in as few jobs of several ranks as possible.

Starting ranks costs time, and an item needs little. So one job runs a whole list. Each rank writes a line
when it begins an item and one with the result. A failed item may end its job, and a new one runs what
comes after it. When no rank could write what failed, the first item without a result from every rank is
to blame.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests import warm
from tests.launching import run_ranks

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent

Start = Callable[[Sequence[str], Mapping[str, str], Path], Any]
"""Starts `weft ARGUMENTS` with variables in a folder; see `warm.start`."""

PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}

# A job that wrote no line for so long is stuck; weft itself should have ended it before.
PATIENCE_S = 240.0
MOST_RESTARTS = 25
TAIL = 6000

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Outcome:
    """What became of one item: the result of each rank, and the job's output where some are missing."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    broken: str = ""

    def faults(self) -> str:
        """Everything that went wrong on any rank; empty if nothing did."""
        told = [f"rank {line['rank']}: {line['error']}" for line in self.lines if not line["ok"]]
        return "\n".join(told + ([self.broken] if self.broken else []))


def run_items(
    script: str,
    items: Sequence[str],
    ranks: int,
    partitions: int | None = None,
    patience_s: float = PATIENCE_S,
    start: Start = warm.start,
) -> dict[str, Outcome]:
    """Outcomes of all `items` (in this order) of a worker in this folder, on `ranks` processes.

    `partitions`: as many as ranks, if not given. `start`: starts a job.
    """
    outcomes: dict[str, Outcome] = {}
    waiting = list(items)
    for _ in range(MOST_RESTARTS):
        if not waiting:
            break
        given = command(script, waiting, ranks, partitions or ranks)
        lines, began, output = _attempt(given, patience_s, start)
        if not began:
            return outcomes | {item: Outcome(broken=f"no rank began:\n{output}") for item in waiting}
        done = [item for item in waiting if len(lines.get(item, ())) == ranks]
        failed = any(not line["ok"] for item in done for line in lines[item])
        outcomes |= {item: Outcome(lines[item]) for item in done}
        waiting = [item for item in waiting if item not in done]
        if waiting and not failed:
            blamed = waiting.pop(0)
            outcomes[blamed] = Outcome(lines.get(blamed, []), f"the job ended in this item:\n{output}")
    return outcomes | {
        item: Outcome(broken=f"not run: {MOST_RESTARTS} jobs broke before") for item in waiting
    }


def outcomes(
    request: pytest.FixtureRequest, file: str, script: str, parameter: str, start: Start = warm.start
) -> Callable[[int, str], Outcome]:
    """From a number of ranks and an item to its outcome, for a test file's fixture.

    The first question runs all items that were selected of the file, by their ``parameter`` and ``ranks``; where they
    have a parameter ``worker``, those of this script.
    """
    selected: dict[int, list[str]] = {}
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        of_script = script.endswith(params.get("worker", script))
        if item.path == Path(file) and parameter in params and of_script:
            selected.setdefault(params["ranks"], []).append(params[parameter])
    known: dict[int, dict[str, Outcome]] = {}

    def outcome(ranks: int, item: str) -> Outcome:
        if ranks not in known:
            known[ranks] = run_items(script, selected[ranks], ranks, start=start)
        return known[ranks][item]

    return outcome


def start_apart(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> warm.Job:
    """Starts a job each of whose ranks is told that it has a host of its own."""
    at = next(at for at, given in enumerate(arguments) if given.endswith(".py"))
    return warm.start([*arguments[:at], str(FOLDER / "apart.py"), *arguments[at:]], env, cwd)


def pass_checks(
    script: str,
    checks: Iterable[str],
    ranks: int,
    *options: str,
    env: Mapping[str, str] = MappingProxyType({}),
    timeout: float = 400,
) -> None:
    """Runs checks of a script of this folder (see `registry`) in one job; each has to pass on every rank."""
    names = list(checks)
    done = run_ranks(
        ranks, FOLDER / script, [*options, *names], env={**PATHS, **env}, timeout=timeout, warm=True
    ).check()
    missing = [name for name in names if done.stdout.count(f"{name}: passed\n") != ranks]
    assert names and not missing, f"not passed on every rank: {missing}\n{done.stdout}"


Layout = tuple[int, int, Mapping[str, Any], list[str]]
"""Ranks, partitions, settings and checks."""


def pass_layouts(script: str, layouts: Iterable[Layout], folder: Path, timeout: float = 400) -> None:
    """Runs checks in each layout, a job after the other; what one has saved in the folder the next one finds."""
    for ranks, partitions, settings, checks in layouts:
        options = ["--folder", str(folder), "--partitions", str(partitions)]
        pass_checks(script, checks, ranks, *options, env={"WEFT_SET": json.dumps(settings)}, timeout=timeout)


def command(script: str, items: Sequence[str], ranks: int, partitions: int) -> list[str]:
    """The arguments of `weft` that start a worker of this folder."""
    return ["run", "-n", str(ranks), str(FOLDER / script), "--partitions", str(partitions), *items]


def environment() -> dict[str, str]:
    """This process's variables, less those of a launch around it, with one thread for each rank."""
    kept = {key: value for key, value in os.environ.items() if key not in _LAUNCH_VARIABLES}
    kept.pop("WEFT_CONFIG", None)
    path = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    return {**kept, **quiet, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def _attempt(
    arguments: Sequence[str], patience_s: float, start: Start
) -> tuple[dict[str, list[dict[str, Any]]], bool, str]:
    """One job: the result lines by item, whether any item began, and what the job printed."""
    with tempfile.TemporaryDirectory(prefix="weft-parity-") as name:
        folder = Path(name)
        job = start([*arguments, "--results", name], environment(), ROOT)
        note = _wait(job, folder, patience_s)
        text = "".join(job.communicate(30))
        lines, began = _read(folder)
    tail = text if len(text) <= TAIL else text[: TAIL // 2] + "\n ...\n" + text[-TAIL // 2 :]
    return lines, began, f"{note} (exit status {job.returncode})\n{tail}"


def _wait(job: warm.Job, folder: Path, patience_s: float) -> str:
    """Waits for the end of a job, or ends it when no rank has written anything for too long."""
    written, since = -1, time.monotonic()
    while job.poll() is None:
        size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
        if size != written:
            written, since = size, time.monotonic()
        if time.monotonic() - since > patience_s:
            _end(job)
            return f"stuck: no line for {patience_s:.0f} s"
        time.sleep(0.1)
    return "ended"


def _end(job: warm.Job) -> None:
    """Ends a job that this process started, with all that it started."""
    for number, grace_s in ((signal.SIGTERM, 8), (signal.SIGKILL, 8)):
        try:
            os.killpg(job.pid, number)
            job.wait(grace_s)
            return
        except ProcessLookupError:
            job.wait(grace_s)
            return
        except subprocess.TimeoutExpired:
            continue


def _read(folder: Path) -> tuple[dict[str, list[dict[str, Any]]], bool]:
    """Result lines by item, and whether any rank began one."""
    lines: dict[str, list[dict[str, Any]]] = {}
    began = False
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            began = True
            if "ok" in line:
                lines.setdefault(line["case"], []).append(line)
    return lines, began
