"""Runs parts of the suite on several versions of PyTorch, each in an environment of its own, and prints a table.

    python -m tests.versions                          all versions, all parts (two hours)
    python -m tests.versions --only 2.15 --short      the newest, what CI runs there

Environments are made once, in `.venv-versions/`; `requirements/` has what goes into each. Where there is no Python of
the wanted version, the one that runs this is taken. The table says which it was.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-versions"


@dataclass(frozen=True)
class Version:
    """A PyTorch, the Python it is tried with, and the file of versions of everything else."""

    torch: str
    python: str
    constraints: str


VERSIONS = (
    Version("2.11", "3.10", "requirements/torch-2.11.txt"),
    Version("2.13", "3.11", "constraints.txt"),
    Version("2.14", "3.12", "requirements/torch-2.14.txt"),
    Version("2.15", "3.13", "requirements/torch-2.15.txt"),
)

PARITY = "tests/parity/test_"
PARTS: dict[str, list[str]] = {
    # without the benchmarks: they also run peers, which are chosen for the version of development
    "units": ["tests/unit", "tests/bugs", "tests/golden", "src", "--ignore", "tests/unit/test_benchmarks.py"],
    "behaviour": [
        f"{PARITY}behaviour.py",
        f"{PARITY}memory.py",
        f"{PARITY}rehearse.py",
        f"{PARITY}together.py",
    ],
    "zoo": [f"{PARITY}zoo.py"],
    "schedules": [f"{PARITY}schedules.py"],
    "replicas": [
        f"{PARITY}{name}.py"
        for name in ("data_parallel", "replicas", "reductions", "sharded", "shares", "expert_parallel")
    ],
    "checkpoints": [f"{PARITY}checkpoints.py"],
    "smdistributed": [f"{PARITY}smdistributed.py"],
    "faults": ["tests/fault"],
    "browser": ["tests/browser"],
}
SHORT = {
    "what uses PyTorch's insides, without long tests": [
        "tests/unit/torch", "tests/unit/transport", "tests/unit/reduce", "src/weft/torch", "-m", "not long",
        *(path for name in ("behaviour", "zoo", "schedules", "replicas", "checkpoints") for path in PARTS[name]),
    ],
}  # fmt: skip
"""What CI runs on the newest version."""


def python_of(version: str) -> str:
    """The command of a Python of that version; this one's, if there is none that runs."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for command in (f"python{version}", *map(str, pyenv)):
        path = shutil.which(command)
        if path and subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0:
            return path
    return sys.executable


def prepared(version: Version) -> Path:
    """The environment's folder of commands, made if it is not there."""
    at = FOLDER / f"torch-{version.torch}"
    mark = at / ".ready"
    text = "".join((ROOT / name).read_text() for name in (version.constraints, "pyproject.toml"))
    if not mark.exists() or mark.read_text() != text:
        shutil.rmtree(at, ignore_errors=True)
        subprocess.run([python_of(version.python), "-m", "venv", str(at)], check=True)
        pip = [str(at / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        constraints = str(ROOT / version.constraints)
        environ = {**os.environ, "PIP_CONSTRAINT": constraints}
        wanted = re.search(r"^torch==.*$", (ROOT / version.constraints).read_text(), re.MULTILINE)
        assert wanted is not None, f"{version.constraints} names no torch"
        subprocess.run([*pip, wanted[0]], check=True, env=environ)
        subprocess.run([*pip, "-e", f"{ROOT}[dev]"], check=True, env=environ)
        mark.write_text(text)
    return at / "bin"


def run(version: Version, bin: Path, name: str, arguments: Sequence[str], processes: int) -> str:
    """The counts of a part's tests that passed, failed and were skipped."""
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "VIRTUAL_ENV", "PIP_"))
    }
    environ |= {"PATH": f"{bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    pytest = [
        str(bin / "python"),
        "-m",
        "pytest",
        "-q",
        "-r",
        "fs",
        "--dist",
        "loadfile",
        "-n",
        str(processes),
    ]
    began = time.monotonic()
    done = subprocess.run([*pytest, *arguments], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.rstrip().splitlines() or ["no output"]
    if done.returncode:
        print(done.stdout, flush=True)
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped|xfailed)", lines[-1])
    print(f"torch {version.torch}: {name}: {lines[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
    return ", ".join([*counts, *([f"exit code {done.returncode}"] if done.returncode else [])])


def versions_in(bin: Path) -> str:
    """Python, PyTorch and transformers of an environment."""
    code = (
        "import platform, torch; from importlib.metadata import version; print(platform.python_version(), "
        "torch.__version__, *map(version, ('transformers', 'accelerate', 'numpy')))"
    )
    found = subprocess.run([str(bin / "python"), "-c", code], check=True, capture_output=True, text=True)
    return " | ".join(found.stdout.split())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", help="a version of PyTorch, such as 2.15; any number")
    parser.add_argument("--part", action="append", choices=[*PARTS], help="a part of the suite; any number")
    parser.add_argument("--short", action="store_true", help="what CI runs, instead of parts")
    parser.add_argument("--exists", action="store_true", help="only say whether the environments are there")
    parser.add_argument("--processes", type=int, default=3, help="files of tests at a time")
    options = parser.parse_args()
    known = {version.torch: version for version in VERSIONS}
    unknown = [name for name in options.only or () if name not in known]
    if unknown:
        parser.error(f"there is no environment for torch {', '.join(unknown)}: known are {', '.join(known)}")
    if options.exists:
        return (
            0 if all((FOLDER / f"torch-{name}" / ".ready").exists() for name in options.only or known) else 1
        )
    parts = SHORT if options.short else {name: PARTS[name] for name in options.part or PARTS}
    rows = ["| Python | torch | transformers | accelerate | numpy | " + " | ".join(parts) + " |"]
    rows.append("| --- " * (5 + len(parts)) + "|")
    failed = False
    for version in [known[name] for name in options.only or known]:
        bin = prepared(version)
        results = [run(version, bin, part, parts[part], options.processes) for part in parts]
        failed = failed or any(
            "failed" in result or "error" in result or "code" in result for result in results
        )
        rows.append(f"| {versions_in(bin)} | {' | '.join(results)} |")
    print("\n".join(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
