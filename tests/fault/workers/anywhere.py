"""A short job that goes through everything that a job does, and says where it is; `tests.fault.campaign` strikes it.

FOLDER/rank-R      the process of rank R, then each phase that it enters, a line each
FOLDER/child       a process that rank 0 started, in a session of its own
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
PARTITIONS = int(sys.argv[2])
RANK = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]


def enter(phase: str) -> None:
    with (FOLDER / f"rank-{RANK}").open("a") as file:
        file.write(f"{phase}\n")


def main() -> None:
    enter(str(os.getpid()))
    if RANK == "0" and "WEFT_SHARED_FD" in os.environ:  # other launchers leave that to the script
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (FOLDER / "child").write_text(str(child.pid))
    enter("import")
    import torch
    from torch import nn

    import weft.torch as weft

    torch.set_num_threads(1)
    enter("init")
    weft.init({"partitions": PARTITIONS, "microbatches": 2})
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)], nn.Linear(16, 1))
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    @weft.step
    def step(model, x):
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    enter("trace")
    for number in range(40):
        if number == 1:
            enter("train")
        optimizer.zero_grad()
        step(model, torch.randn(8, 16))
        optimizer.step()
    enter("save")
    for number in range(3):
        weft.save_checkpoint(
            FOLDER / "saves", f"tag{number}", model=model, optimizer=optimizer, asynchronous=number == 1
        )
    enter("shutdown")
    weft.shutdown()
    enter("end")


main()
