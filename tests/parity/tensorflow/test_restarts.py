"""Jobs of TensorFlow that are killed and start again by themselves go on as if nothing had been, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

from tests.launching import ROOT, SOURCE, Completed, run_ranks  # noqa: E402
from tests.long import (
    one_day_in,
    one_in,  # noqa: E402
)
from tests.parity.tensorflow.jobs import WARM  # noqa: E402
from weft.checkpoint.find import in_order  # noqa: E402

JOB = Path(__file__).with_name("restarting.py")
FIT = Path(__file__).with_name("fitting.py")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)])}
STEPS = 17  # in the third epoch of 7 batches


def run(folder: Path, partitions: int, *args: str, restarts: int = 0) -> Completed:
    return run_job(JOB, [str(folder), str(STEPS), "--partitions", str(partitions), *args], folder, restarts)


def run_job(job: Path, given: list[str], folder: Path, restarts: int) -> Completed:
    folder.mkdir(exist_ok=True)
    options = ["--max-restarts", str(restarts)] if restarts else []
    return run_ranks(2, job, given, options=options, env=QUIET, timeout=420, warm=WARM).check()


def losses(folder: Path, rank: int, name: str = "losses") -> dict[int, str]:
    """The last that a rank told of each step."""
    told = {}
    for file in sorted(folder.glob(f"{name}-*-{rank}")):
        told |= {int(line.split()[0]): line for line in file.read_text().splitlines()}
    return told


def check_like(folder: Path, whole: Path) -> None:
    for rank in (0, 1):
        assert losses(folder, rank) == losses(whole, rank)
        assert (folder / f"end-{rank}").read_text() == (whole / f"end-{rank}").read_text()


@pytest.mark.parametrize(("partitions", "more"), one_in(2, [(2, []), (1, ["--asynchronous"])]))
def test_a_kill_changes_nothing(tmp_path, partitions, more):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole, partitions, *more)
    assert [sorted(losses(whole, rank)) for rank in (0, 1)] == [[*range(1, STEPS + 1)]] * 2
    done = run(killed, partitions, *more, "--faults", json.dumps([[1, 13]]), restarts=2)
    assert "weft: 1 of 2 restarts; exit code 0\n" in done.stderr
    assert not (killed / "losses-1-0").read_text().startswith("1 ")
    check_like(killed, whole)
    if partitions == 1:
        return
    newest, before = in_order(whole / "saves", None)
    assert (newest.tag, before.tag) == ("step17", "step15")
    shard = newest.folder / "rank-0001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    again = run(whole, partitions)
    assert "step17_partial/rank-0001.safetensors is truncated" in again.stderr
    assert [line.split()[0] for line in (whole / "losses-0-0").read_text().splitlines()[-2:]] == ["16", "17"]
    check_like(killed, whole)


@one_day_in(2)
@pytest.mark.parametrize(("partitions", "data"), one_in(2, [(2, "dataset"), (1, "endless")]))
def test_fit_goes_on_in_the_middle_of_an_epoch(tmp_path, partitions, data):
    """Losses, metrics, validation and averaged weights are those of a run that nothing befell."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    given = ["--partitions", str(partitions), "--data", data]
    run_job(FIT, [str(whole), *given], whole, 0)
    done = run_job(FIT, [str(killed), *given, "--faults", json.dumps([[1, 13]])], killed, 2)
    assert "weft: 1 of 2 restarts; exit code 0\n" in done.stderr
    assert (killed / "losses-1-0").read_text().startswith("11 ")
    for rank in (0, 1):
        for name, count in (("losses", 21), ("epochs", 3)):
            assert losses(killed, rank, name) == losses(whole, rank, name) != {}
            assert len(losses(whole, rank, name)) == count
        name = f"history-{rank}"
        assert (killed / name).read_text() == (whole / name).read_text()
    assert end(killed, partitions) == end(whole, partitions)
    if partitions == 2:  # once more, when there is nothing to do
        run_job(FIT, [str(killed), *given], killed, 0)
        assert end(killed, partitions) == end(whole, partitions)


def end(folder: Path, partitions: int) -> Any:
    """The variables at the end: of all partitions together, or of each copy."""
    found = [json.loads((folder / f"end-{rank}").read_text()) for rank in (0, 1)]
    return found[0] | found[1] if partitions == 2 else found
