"""Jobs of two ranks that are killed in saves, one after the other, on one folder; started by `test_saving.py`.

    killed_saves.py FOLDER

A rank is killed at each phase of a save that it goes through, of a synchronous save and of one beside the training;
then ranks are killed at RANDOM random moments; then a process is killed at each phase of a full save. The other rank is
killed too, as a launcher would. Every job begins by resuming from what the ones before it left. Of the last save, bytes
are flipped and files truncated and removed.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weft.torch as weft
from tests.warm import Ranks
from weft.checkpoint.find import faults, look, saves
from weft.torch.checkpoint import save, whole_file

PHASES = (
    "stage", "mkdir", "write", "flush", "checksum", "report", "barrier", "index", "folder", "rename", "parent",
    "newest", "prune",
)  # fmt: skip
PHASES_OF_RANK = {0: PHASES, 1: ("stage", "write", "flush", "checksum", "report")}
PHASES_OF_FULL = ("mkdir", "write", "flush", "rename", "parent", "newest")
RANDOM, SEED, FLIPS = 50, 20, 50
WAIT_S = 60


class State:
    """What a rank has in `also`: a tensor with the save's number, different on each rank."""

    def __init__(self) -> None:
        self.value = torch.zeros(100)

    def state_dict(self) -> Mapping[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        self.value = content["value"]


def killer(phase: str) -> Callable[[str], None]:
    def reached(now: str) -> None:
        if now == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


def work(folder: Path, rank: int, number: int, ready: int, victim: int, phase: str, background: bool) -> None:
    """Resume, save once well, say so, and save until something happens; the numbers in all saves count up."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    weft.init({"partitions": 2})
    state = State()
    count = 0
    if number:
        count = weft.resume_from_checkpoint(folder, also={"state": state})
        assert torch.equal(state.value, torch.full((100,), 10.0 * count + rank)), (count, state.value)
    for repeat in range(10_000):
        count += 1
        state.value = torch.full((100,), 10.0 * count + rank)
        tag = f"t{count % 3}"
        weft.save_checkpoint(folder, tag, user_content=count, also={"state": state}, asynchronous=background)
        if repeat == 0:
            weft.finish_checkpoint()
            if rank == victim:
                save.reached = killer(phase)
                os.write(ready, b"x")


def strike(folder: Path, number: int, victim: int, phase: str, background: bool, after_s: float) -> str:
    """One job, killed in a save; the newest tag that it left. Everything that is there is whole."""
    told, ready = os.pipe()
    job = Ranks(
        2,
        lambda rank: work(folder / "saves", rank, number, ready, victim, phase, background),
        folder / "output",
    )
    os.close(ready)
    assert os.read(told, 1), job.text()
    os.close(told)
    if not phase:
        time.sleep(after_s)
        job.kill(victim)
    assert job.wait(WAIT_S, victim)[victim] == -signal.SIGKILL, job.text()
    job.kill()
    job.wait(WAIT_S)
    job.close()
    if number:
        assert "resuming from " in (folder / "output" / "rank-0.txt").read_text(), job.text()
    found = saves(folder / "saves")
    wrong = [save.fault for save in found if save.index is None]
    wrong += [fault for save in found if save.index for fault in faults(save.folder, save.index)]
    assert found and not wrong, wrong
    return found[0].tag


def main() -> None:
    folder = Path(sys.argv[1])
    number, left = 0, set()
    for background in (False, True):
        for victim, phases in PHASES_OF_RANK.items():
            for phase in phases:
                print(f"rank {victim} at {phase}, background={background}", flush=True)
                left.add(strike(folder, number, victim, phase, background, 0.0))
                number += 1
    moments = random.Random(SEED)
    for _ in range(RANDOM):
        victim, background, after_s = moments.randrange(2), moments.random() < 0.5, moments.uniform(0, 0.08)
        print(f"rank {victim} after {after_s:.4f} s, background={background}", flush=True)
        left.add(strike(folder, number, victim, "", background, after_s))
        number += 1
    assert left == {"t0", "t1", "t2"}
    damage(folder / "saves")
    Ranks(1, lambda rank: clean(folder / "saves"), folder / "output").check(WAIT_S)
    for phase in PHASES_OF_FULL:
        strike_full(folder, phase)
    Ranks(1, lambda rank: clean(folder / "full"), folder / "output").check(WAIT_S)
    print("passed")


def clean(root: Path) -> None:
    """A save that nobody disturbs leaves nothing of those that were."""
    weft.init({})
    weft.save_checkpoint(root, "last")
    hidden = [path.name for path in root.iterdir() if path.name.startswith(".")]
    assert hidden == [".lock"], hidden
    assert len(list(root.glob("last_partial*"))) == 1
    weft.shutdown()


def damage(root: Path) -> None:
    """FLIPS bytes of each file flipped; each file truncated, and gone. Unit tests flip every byte of a manifest."""
    save = saves(root)[0]
    assert save.index is not None and len(save.index.shards) == 2
    moments = random.Random(SEED)
    for name in ("index.json", "DONE", *save.index.shards):
        file = save.folder / name
        whole = file.read_bytes()
        places = moments.sample(range(len(whole)), FLIPS)
        altered = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in places]
        for content in (*altered, whole[:-1], whole[: len(whole) // 2], b"", None):
            if content is None:
                file.unlink()
            else:
                file.write_bytes(content)
            found = look(save.folder)
            told = [found.fault] if found.index is None else faults(save.folder, found.index)
            assert any(name in text for text in told), (name, told, content)
        file.write_bytes(whole)
    assert faults(save.folder, save.index) == []


def strike_full(folder: Path, phase: str) -> None:
    root = folder / "full"

    def work(rank: int) -> None:
        weft.init({})
        torch.manual_seed(0)
        model = weft.DistributedModel(nn.Linear(2, 2))
        if root.exists():
            weft.resume_from_checkpoint(root, partial=False, model=model)
        weft.save_checkpoint(root, "a", False, model=model, user_content=phase)
        weft.save_checkpoint(root, "b", False, model=model, user_content=phase)
        with torch.no_grad():
            model.module.weight.fill_(7.0)
        save.reached = killer(phase)
        weft.save_checkpoint(root, "b", False, model=model, user_content=phase)

    job = Ranks(1, work, folder / "output")
    assert job.wait(WAIT_S) == {0: -signal.SIGKILL}, job.text()
    job.close()
    for tag in ("a", "b"):
        assert whole_file.faults(root, tag) == [], phase
        assert set(torch.load(root / tag, weights_only=True)) == {"weight", "bias"}


if __name__ == "__main__":
    main()
