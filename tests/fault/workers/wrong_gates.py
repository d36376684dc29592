"""Jobs whose ranks do not all make the same call; started by `test_saving.py`.

    wrong_gates.py FOLDER

Each case says what every rank does, and what the ranks that call are told. The others are killed when those have ended.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import weft.torch as weft
from tests.warm import Ranks
from weft.checkpoint import meeting
from weft.errors import CheckpointError

WAIT_S = 60
Act = Callable[["Rank"], None]


class Rank:
    """What one rank has to act with."""

    def __init__(self, root: Path, partitions: int) -> None:
        torch.set_num_threads(1)
        meeting.STUCK_S = 1.0
        weft.init({"partitions": partitions, "microbatches": 2, "ddp": True})
        torch.manual_seed(0)
        self.root = root
        self.model = weft.DistributedModel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
        self.function = weft.step(self.forward)
        self.train()

    @staticmethod
    def forward(model: weft.DistributedModel, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def train(self) -> None:
        self.function(self.model, torch.randn(4, 4))


def save(tag: str = "bad", **options: object) -> Act:
    return lambda rank: weft.save_checkpoint(rank.root, tag, model=rank.model, **options)


def elsewhere(rank: Rank) -> None:
    weft.save_checkpoint(rank.root / "other", "bad", model=rank.model)


def later(rank: Rank) -> None:
    save(asynchronous=True)(rank)
    weft.finish_checkpoint()


def load(tag: str | None = "good", **options: object) -> Act:
    return lambda rank: weft.resume_from_checkpoint(rank.root, tag, **options)


def train(rank: Rank) -> None:
    rank.train()


def wait(rank: Rank) -> None:
    weft.barrier()


def end(rank: Rank) -> None:
    weft.shutdown()


ONLY = r"was called by rank {} only: rank {} {}"
ON, ENDED, WAITING = "went on without it", "has come to its end without it", "waits for others without it"

# What each rank does (from rank 0 on), the number of partitions, and what the ranks that called are told.
CASES: list[tuple[tuple[Act, ...], int, str]] = [
    ((save(), end), 2, ONLY.format(0, 1, ENDED)),
    ((train, save()), 2, ONLY.format(1, 0, ON)),
    ((end, save()), 2, ONLY.format(1, 0, ENDED)),
    ((wait, save()), 2, ONLY.format(1, 0, WAITING)),
    ((save(), wait), 2, ONLY.format(0, 1, WAITING)),
    ((later, train), 2, ONLY.format(0, 1, ON)),
    ((save(partial=False), train), 2, ONLY.format(0, 1, ON)),
    ((load(), train), 2, ONLY.format(0, 1, ON)),
    ((save(), save(), wait), 3, ONLY.format("0, 1", 2, WAITING)),
    ((wait, save(), save()), 3, ONLY.format("1, 2", 0, WAITING)),
    ((save("a"), save("b")), 2, "the tag must be the same on every rank, it is 'a' on rank 0, 'b' on rank 1"),
    ((save("a", partial=False), save("b", partial=False)), 2, "it is 'a' on rank 0, 'b' on rank 1"),
    ((save(), elsewhere), 2, "the path must be the same on every rank"),
    ((save(), save(partial=False)), 2, "the call must be the same on every rank, it is 'save_checkpoint' on rank 0, "
     "'save_checkpoint(partial=False)' on rank 1"),
    ((load(), save()), 2, "the call must be the same on every rank, it is 'resume_from_checkpoint' on rank 0"),
    ((load(), load(None)), 2, "the tag must be the same on every rank, it is 'good' on rank 0, '' on rank 1"),
    ((wait, wait, save(), save()), 2, " only: rank 0 " + WAITING),
]  # fmt: skip
CALLS = (train, wait, end)


def run(root: Path, number: int) -> None:
    acts, partitions, text = CASES[number]

    def work(at: int) -> None:
        rank = Rank(root, partitions)
        save("good")(rank)
        acts[at](rank)
        if acts[at] is not end:
            weft.barrier()

    job = Ranks(len(acts), work, root / "output")
    callers = [at for at, act in enumerate(acts) if act not in CALLS]
    began = time.monotonic()
    ends = job.wait(WAIT_S, *callers)
    assert all(ends[at] for at in callers), job.text()
    job.kill()
    job.wait(WAIT_S)
    job.close()
    told = [(root / "output" / f"rank-{at}.txt").read_text() for at in callers]
    assert any("UsageError: " in one and text in one for one in told), job.text()
    assert (root / "newest").read_text() == "good\n" and not list(root.glob("bad*"))
    print(f"case {number} after {time.monotonic() - began:.1f} s: {text}", flush=True)


def one_rank_cannot_write(root: Path) -> None:
    """Rank 1 may write no large files, as on a full disk of its own: all hear of it, and go on."""

    def work(rank: int) -> None:
        at = Rank(root, 2)
        save("good")(at)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000 if rank else -1, resource.RLIM_INFINITY))
        for background in (False, True):
            with pytest.raises(CheckpointError, match=r"bad was not saved: rank 1: .*Earlier checkpoints in"):
                save("bad", asynchronous=background)(at)
                weft.finish_checkpoint()
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, resource.RLIM_INFINITY))
        at.train()
        assert sorted(path.name for path in root.iterdir() if path.name != "output") == [
            ".lock", "good_partial", "newest"
        ]  # fmt: skip
        weft.barrier()
        save("better")(at)
        weft.resume_from_checkpoint(root, "better")
        weft.shutdown()

    Ranks(2, work, root / "output").check(WAIT_S)


def main() -> None:
    one_rank_cannot_write(Path(sys.argv[1]) / "limited")
    wanted = [int(number) for number in sys.argv[2:]] or range(len(CASES))
    for number in wanted:
        run(Path(sys.argv[1]) / str(number), number)
    print("passed")


if __name__ == "__main__":
    main()
