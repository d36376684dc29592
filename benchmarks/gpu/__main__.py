"""All that one wants to know of weft on a machine with GPUs, in one command and a few minutes.

    python -m benchmarks.gpu --minutes 9
    python -m benchmarks.gpu --dry

The README beside this file says what the parts are. The most valuable comes first. A part that fails, or has no time
left, is a line of the table; the others run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine

NO_GPU = 2
"""The exit code where there is nothing to measure."""
ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("rank.py")
LEAST_S = 15.0
"""With less time left no part begins."""
HEADER = "| part | what | figure | beside | its figure | ratio | note |\n| --- | --- | ---: | --- | ---: | ---: | --- |"


@dataclass(frozen=True)
class Run:
    """The way in which parts are run here."""

    gpus: int
    dry: bool
    folder: Path

    @property
    def ranks(self) -> int:
        """One for each GPU, and two where there is one."""
        return max(self.gpus, 2)

    def worker(self, ranks: int, part: str, seconds: float) -> list[str]:
        arguments = [part, str(self.folder / "rows.jsonl"), str(seconds), *(["--dry"] if self.dry else [])]
        device = ["--device", "cpu"] if self.dry else []
        return ["-m", "weft", "run", "-n", str(ranks), "--quiet", *device, str(WORKER), *arguments]


@dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Attributes:
        name: As the table has it.
        share: Of the minutes, at most; what one part leaves the next ones have.
        command: From how parts are run, and the seconds for measuring, to arguments of Python.
        sees_one: The part sees the first GPU alone.
    """

    name: str
    share: float
    command: Callable[[Run, float], list[str]]
    sees_one: bool = False


def _tests(run: Run, seconds: float) -> list[str]:
    files = ["tests/gpu/test_recording.py", "tests/gpu/test_training.py"]
    return [
        "-m",
        "pytest",
        "-v",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *files,
        "-k",
        "recording or failure or 0",
    ]


def _rehearsed(run: Run, seconds: float) -> list[str]:
    """Rehearses the worker's script, then runs it."""
    return [str(WORKER), "rehearsed", *run.worker(1, "memory", seconds)]


def _measured(run: Run, seconds: float) -> list[str]:
    file = str(run.folder / "machine.json")
    return ["-m", "weft", "plan", "--measure", file, "-n", str(max(run.gpus, 1))]


PARTS = [
    Part("one partition", 0.16, lambda run, s: run.worker(1, "eager", s), sees_one=True),
    Part("one partition, compiled", 0.22, lambda run, s: run.worker(1, "compiled", s), sees_one=True),
    Part("tests/gpu", 0.25, _tests),
    Part("memory", 0.15, _rehearsed, sees_one=True),
    Part("two ranks on one GPU", 0.15, lambda run, s: run.worker(2, "pipeline", s), sees_one=True),
    Part("replicas", 0.15, lambda run, s: run.worker(run.ranks, "replicas", s)),
    Part("tensor parallel", 0.15, lambda run, s: run.worker(2, "tensor_parallel_degree", s)),
    Part("context parallel", 0.15, lambda run, s: run.worker(2, "context_parallel_degree", s)),
    Part("host and kernels", 0.10, lambda run, s: run.worker(1, "host", s), sees_one=True),
    Part("machine for weft plan", 0.20, _measured),
]


def rows_of(part: Part, run: Run, limit_s: float) -> list[dict[str, Any]]:
    """The rows that the part found within so many seconds; those until then, if it ends badly."""
    file, environ = run.folder / "rows.jsonl", dict(os.environ)
    file.unlink(missing_ok=True)
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    visible = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(run.gpus))))
    environ["CUDA_VISIBLE_DEVICES"] = (
        "" if run.dry else visible.partition(",")[0] if part.sees_one else visible
    )
    command = [sys.executable, *part.command(run, limit_s / 2)]
    with (run.folder / "output").open("w+") as output:
        job = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        ended = _wait(job, limit_s)
        output.seek(0)
        text = output.read()
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if part.command is _tests:
        return [*rows, _counted(text, ended)]
    if part.command is _measured and job.returncode == 0:
        content = json.loads((run.folder / "machine.json").read_text())
        return [
            {"what": "measured", "note": text.strip().rpartition("machine.json: ")[2], "machine": content}
        ]
    if job.returncode:
        why = f"exit code {job.returncode}: {_cause(text)}" if ended else f"ended after {limit_s:.0f} s"
        rows.append({"what": "failed", "note": why, "failed": True, "output": text[-4000:]})
    return rows


def _wait(job: subprocess.Popen[bytes], limit_s: float) -> bool:
    """True if the job ended by itself; else it is ended, with all that it started."""
    try:
        job.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(job.pid, number)
            try:
                job.wait(5)
                break
            except subprocess.TimeoutExpired:
                continue
        return False


def _cause(text: str) -> str:
    """The line of a job's output that says why it failed."""
    lines = [line for line in text.splitlines() if line.strip()] or ["no output"]
    return next((line for line in lines if line.startswith("weft: ")), lines[-1])[:200]


def _counted(text: str, ended: bool) -> dict[str, Any]:
    """Tests by what became of them, also where there was no time for all."""
    counts = {kind: text.count(f" {kind} ") for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    told = ", ".join(f"{count} {kind.lower()}" for kind, count in counts.items() if count) or _cause(text)
    failed = bool(counts["FAILED"] + counts["ERROR"])
    lines = [line for line in text.splitlines() if " FAILED " in line or " ERROR " in line]
    return {
        "what": "tests",
        "note": told + ("" if ended else ", then no time"),
        "failed": failed,
        "output": lines,
    }


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def line_of(row: dict[str, Any]) -> str:
    """The row in the table's columns."""
    value, base, unit = row.get("value"), row.get("base"), row.get("unit", "")
    ratio = f"{value / base:.3f}" if value is not None and base else ""
    note = str(row.get("note", "")).replace("|", "/")
    cells = [
        row["part"],
        row["what"],
        _figure(value, unit),
        row.get("beside", ""),
        _figure(base, unit),
        ratio,
        note,
    ]
    return f"| {' | '.join(cells)} |"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="it ends in time, with what it has")
    parser.add_argument("--only", help="parts by their names, comma-separated", default="")
    parser.add_argument(
        "--json", type=Path, help="also write the rows, with the output of what failed, into this file"
    )
    parser.add_argument(
        "--dry", action="store_true", help="every part on the CPU with tiny sizes: to see that it runs"
    )
    given = parser.parse_args(arguments)
    known = [part.name for part in PARTS]
    given.only = given.only.split(",") if given.only else known
    if unknown := set(given.only) - set(known):
        parser.error(f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return given


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    gpus = 0 if given.dry else torch.cuda.device_count()
    if not gpus and not given.dry:
        print(
            "there is no GPU here that PyTorch can use: nothing was measured (--dry runs every part on the CPU)"
        )
        return NO_GPU
    end_s = time.monotonic() + 60 * given.minutes
    here = (
        f"{gpus} x {torch.cuda.get_device_name()}"
        if gpus
        else "a dry run on the CPU, whose figures mean nothing"
    )
    print(f"{here}, {machine.machine_name()}, PyTorch {torch.__version__}\n\n{HEADER}", flush=True)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        run = Run(gpus, given.dry, Path(folder))
        for part in (each for each in PARTS if each.name in given.only):
            limit_s = min(part.share * 60 * given.minutes, end_s - time.monotonic() - 10)
            began_s = time.monotonic()
            rows = [{"what": "not run", "note": "no time was left", "failed": True}]
            if limit_s >= LEAST_S:
                rows = rows_of(part, run, limit_s)
            for row in rows:
                row |= {"part": part.name, "took_s": round(time.monotonic() - began_s, 1)}
                print(line_of(row), flush=True)
            found += rows
    if given.json:
        given.json.write_text(
            json.dumps({"machine": here, "torch": torch.__version__, "rows": found}, indent=1)
        )
    return 1 if any(row.get("failed") for row in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
