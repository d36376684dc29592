"""Scripts that import nothing of weft start under `weft run`, and ranks that no launcher tells of hosts start too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.launching import FOREIGN, SOURCE, run_ranks

PLAIN = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
dist.barrier()
print(f"{dist.get_rank()} of {dist.get_world_size()}: {total.item()}", flush=True)
dist.destroy_process_group()
"""
BOTH = """
import os
import sys
import torch.distributed as dist
import weft.torch as weft
if "first" in sys.argv:
    dist.init_process_group("gloo")
weft.init({"partitions": 2})
own = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, weft.rank() == 0)
own.set(str(weft.rank()), "here")
assert own.get(str(1 - weft.rank())) == b"here"
print(f"{weft.local_rank()} of {weft.local_size()}", flush=True)
weft.barrier()
"""
ALONE = """
import weft.torch as weft
weft.init({"partitions": 2})
print(f"{weft.local_rank()} of {weft.local_size()}", flush=True)
"""
ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model, data = torch.nn.Linear(4, 1), TensorDataset(torch.randn(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
for (x,) in loader:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print(f"{type(model).__name__} {accelerator.process_index} of {accelerator.num_processes}: "
      f"{[round(p, 5) for p in torch.cat([p.flatten() for p in model.parameters()]).tolist()]}")
"""
SAME_ALONE = """
import torch
torch.manual_seed(0)
model, data = torch.nn.Linear(4, 1), torch.randn(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in data.split(8):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
print([round(p, 5) for p in torch.cat([p.flatten() for p in model.parameters()]).tolist()])
"""
LIGHTNING = """
import warnings
warnings.simplefilter("ignore")
import torch
import lightning
from torch.utils.data import DataLoader, TensorDataset

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

torch.manual_seed(0)
module = Module()
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4))
print(f"{trainer.global_rank} of {trainer.world_size}: "
      f"{[round(p, 5) for p in torch.cat([p.flatten() for p in module.parameters()]).tolist()]}")
"""
QUIET = {"PYTHONWARNINGS": "ignore"}


def lines(text: str) -> list[str]:
    return sorted(line.removeprefix("[rank 1] ") for line in text.splitlines() if " of " in line)


def test_plain_pytorch_under_weft_run():
    found = run_ranks(2, PLAIN).check()
    assert lines(found.stdout) == ["0 of 2: 3.0", "1 of 2: 3.0"]


def test_plain_pytorch_under_mpirun_of_weft_run():
    root = " --allow-run-as-root" if os.getuid() == 0 else ""
    if not any(os.access(os.path.join(folder, "mpirun"), os.X_OK) for folder in os.get_exec_path()):
        pytest.skip("mpirun is not installed")
    options = ["--engine", "mpirun", f"--mpi-options=--oversubscribe{root}"]
    assert lines(run_ranks(2, PLAIN, options=options).check().stdout) == ["0 of 2: 3.0", "1 of 2: 3.0"]


@pytest.mark.parametrize("args", [[], ["first"]])
def test_a_script_may_use_the_port_beside_weft(args):
    if args:  # the script's group holds the store there already
        script = BOTH.replace("2, weft.rank() == 0", "2, False")
    else:
        script = BOTH
    assert lines(run_ranks(2, script, args, warm=True).check().stdout) == ["0 of 2", "1 of 2"]


def test_accelerate_without_an_import_of_weft():
    weights = run_ranks(1, SAME_ALONE, warm=True).check().stdout.strip()
    expected = [f"DistributedDataParallel {rank} of 2: {weights}" for rank in range(2)]
    assert lines(run_ranks(2, ACCELERATE, warm=True, env=QUIET).check().stdout) == expected


def test_lightning_without_an_import_of_weft():
    pytest.importorskip("lightning")
    found = lines(run_ranks(2, LIGHTNING, warm=True, env=QUIET).check().stdout)
    first, second = (line.partition(": ")[2] for line in found)
    assert first == second and [line[:6] for line in found] == ["0 of 2", "1 of 2"]


def test_ranks_that_no_launcher_tells_of_hosts():
    """As under Kubeflow: number, count and where rank 0 is; weft finds out who shares a host."""
    for script in (ALONE, BOTH.replace("2, weft.rank() == 0", "2, False")):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = [_start(rank, port, script, "first") for rank in range(2)]
        outputs = [process.communicate(timeout=120) for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], outputs
        assert [out.strip() for out, _ in outputs] == ["0 of 2", "1 of 2"]


def _start(rank: int, port: int, script: str, *args: str) -> subprocess.Popen[str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        env={**kept, **own, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
