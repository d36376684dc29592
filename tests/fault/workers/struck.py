"""A training job that saves as it goes, struck once at one moment; `tests.fault.matrix` starts it.

    struck.py FOLDER --fault NAME --ranks R[,R] --when MOMENT

FOLDER/began-ATTEMPT-R    when rank R began, by the monotonic clock, and its process
FOLDER/struck-R           when rank R was struck, by the same clock
FOLDER/losses-ATTEMPT     `step loss` of each step, by rank 0
FOLDER/saves              the checkpoints, one every 4 steps of 12
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, EVERY, STRUCK_AT = 12, 4, 6
WIDTH = 16
GROUP = "/sys/fs/cgroup/memory/weft-struck-{}"
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", os.environ.get("WEFT_ATTEMPT", "0")))
ME, WORLD = (
    next(int(os.environ[name]) for name in names if name in os.environ)
    for names in (
        ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
        ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
    )
)
"""Nothing of weft's is imported before the job is: its launcher may die meanwhile."""
BETWEEN = ("handler waits", "handler saves")
"""Faults that come between two steps, and not in one."""


def fail() -> None:
    raise ValueError("injected")


def stand_still() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


def run_out_of_memory() -> None:
    """In a control group of little memory where there may be one (the kernel kills), else by a limit (an error)."""
    group = GROUP.format(os.getpid())
    try:
        os.mkdir(group)
        Path(group, "memory.limit_in_bytes").write_text(str(64 << 20))
        Path(group, "cgroup.procs").write_text("0")
    except OSError:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    _ = [bytearray(64 << 20) for _ in range(64)]


def fill_the_disk(folder: Path) -> None:
    assert os.path.ismount(folder), "only a disk of the job's own is filled"
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass


FAULTS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "exception": fail,
    "exit 0": lambda: sys.exit(0),
    "SIGSTOP": stand_still,
    "frozen interpreter": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
    "memory limit": run_out_of_memory,
    "waits": lambda: time.sleep(3),
    "handler waits": fail,
    "handler saves": fail,
}
"""What a rank does to itself. `waits` marks the moment for whoever strikes from outside."""


class Blow:
    """What comes when; `now` counts the steps."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.now, self.done = given, 0, False

    def reached(self, moment: str) -> None:
        given = self.given
        first = STRUCK_AT if given.when == "restart" and ATTEMPT == 0 else None
        if self.done or ATTEMPT > (given.when == "restart"):
            return
        if first is not None:  # there must be a failure before there is a restart
            if moment == "step" and self.now == first and ME == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return
        hits = {"first step": 1, "step": STRUCK_AT, "save": 2 * EVERY}.get(given.when)
        word = "step" if given.when == "first step" else given.when
        if given.fault in BETWEEN:
            word = "between"
        if moment == word and (hits is None or hits == self.now) and ME in given.ranks:
            self.done = True
            (given.folder / f"struck-{ME}").write_text(str(time.monotonic()))
            if given.fault == "full disk":
                fill_the_disk(given.folder / "saves")
            else:
                FAULTS[given.fault]()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", choices=[*FAULTS, "full disk"], default="none")
    parser.add_argument("--ranks", type=lambda text: [int(rank) for rank in text.split(",")], default=[1])
    parser.add_argument(
        "--when", choices=["import", "rendezvous", "first step", "step", "save", "restart"], default="step"
    )
    parser.add_argument("--heartbeat", type=float, default=60.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    given = parser.parse_args()
    blow = Blow(given)
    (given.folder / f"began-{ATTEMPT}-{ME}").write_text(f"{time.monotonic()} {os.getpid()}")

    blow.reached("import")
    import torch
    from torch import Tensor, nn

    import weft.torch as weft
    from weft.torch.checkpoint import save

    torch.set_num_threads(1)
    blow.reached("rendezvous")
    weft.init(
        {"partitions": WORLD, "microbatches": 2, "auto_partition": False, "deterministic": True,
         "heartbeat_timeout": given.heartbeat, "wait_timeout": 60.0}
    )  # fmt: skip

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            if not weft.is_tracing():
                blow.reached("step")
            return torch.tanh(self.drop(self.inner(x)))

    def in_save(phase: str) -> None:
        if phase == "flush":
            blow.reached("save")

    save.reached = in_save
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(WORLD)))
    for index, block in enumerate(net):
        weft.set_partition(block, index)
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2))

    @weft.step
    def train_step(model: Any, x: Tensor) -> Tensor:
        loss = (model(x) - x).square().mean()
        model.backward(loss)
        return loss

    blow.reached("restart")
    with weft.checkpoints(given.folder / "saves", every=EVERY) as run:
        for number in run.steps(STEPS):
            blow.now = number
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            try:
                blow.reached("between")
            except ValueError:
                if given.fault == "handler waits":
                    weft.barrier()
                weft.save_checkpoint(given.folder / "saves", "last", model=model, optimizer=optimizer)
                raise
            optimizer.zero_grad()
            loss = train_step(model, x).reduce_mean()
            optimizer.step()
            if ME == 0:
                with open(given.folder / f"losses-{ATTEMPT}", "a") as file:
                    file.write(f"{number} {loss.item().hex()}\n")
            time.sleep(given.pause)


if __name__ == "__main__":
    main()
