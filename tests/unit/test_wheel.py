"""What is built is whole: every file of the package is in the wheel, and what is installed from it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.launching import FOREIGN
from tests.long import one_day_in
from tests.unit.test_docs import blocks

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"

pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install hatchling")


def built(kind: str, folder: Path, source: Path) -> Path:
    """The file that the backend makes, without a network."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


def contents(wheel: Path) -> set[str]:
    """The package's files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}


def tracked() -> set[str]:
    """Those of the checkout, new ones too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("this is no checkout of git")
    return {name.removeprefix("src/") for name in done.stdout.split("\n") if name and (ROOT / name).exists()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("wheel"), ROOT)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, timeout=300)
    return folder


def run(installed: Path, folder: Path, *command: str) -> str:
    """What a command prints that finds weft where it was installed, and nowhere else."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_has_every_file_of_the_package(wheel):
    assert contents(wheel) == tracked()
    assert {"weft/py.typed", "weft/compat/path/sitecustomize.py"} <= contents(wheel)


def test_the_source_distribution_gives_the_same_wheel(wheel, tmp_path):
    archive = built("sdist", tmp_path / "sdist", ROOT)
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    again = built("wheel", tmp_path / "wheel", tmp_path / archive.name.removesuffix(".tar.gz"))
    assert contents(again) == contents(wheel)


def test_what_was_installed_runs(installed, tmp_path):
    assert "start a script" in run(installed, tmp_path, str(installed / "bin" / "weft"), "--help")
    where = run(installed, tmp_path, sys.executable, "-c", "import weft; print(weft.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    (program,) = blocks(ROOT / "README.md", "python")
    (tmp_path / "train.py").write_text(program.text)
    weft = (sys.executable, "-m", "weft")
    assert "rank 1: loss" in run(installed, tmp_path, *weft, "run", "-n", "2", "--record", "seen", "train.py")
    run(installed, tmp_path, *weft, "draw", "seen", "--out", "seen.html")
    assert "<svg" in (tmp_path / "seen.html").read_text()


@one_day_in(3)
def test_smdistributed_is_in_what_was_installed(installed, tmp_path):
    (tmp_path / "old.py").write_text(
        "import smdistributed.modelparallel.torch as smp\nsmp.init()\nprint('pp', smp.pp_rank(), smp.__file__)\n"
    )
    options = ("run", "-n", "2", "--device", "cpu", "--smdistributed", "old.py")
    printed = run(installed, tmp_path, sys.executable, "-m", "weft", *options)
    assert "pp 0" in printed and "pp 1" in printed and str(installed) in printed
    printed = run(
        installed, tmp_path, str(installed / "bin" / "weft-python"), "-c", "import smdistributed; print(1)"
    )
    assert printed == "1\n"
