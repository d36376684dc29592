"""A script that is right, of which each test changes a line."""

from __future__ import annotations

from weft.check import Finding, Given
from weft.check.script import parse_script
from weft.check.table import look

RIGHT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
import weft.torch as weft

BATCH = 32
weft.init({"partitions": 2, "microbatches": 4})
torch.manual_seed(0)
data = load()
sampler = DistributedSampler(data, num_replicas=weft.dp_size(), rank=weft.dp_rank())
loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
model = weft.DistributedModel(net)
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@weft.step
def train_step(model, x, y):
    loss = (model(x) - y).square().mean()
    model.backward(loss)
    return loss

for epoch in range(3):
    sampler.set_epoch(epoch)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = train_step(model, x, y).reduce_mean()
        optimizer.step()
        if weft.rank() == 0 and step % 10 == 0:
            print(loss.item())
state = model.state_dict()
if weft.rank() == 0:
    torch.save(state, "model.pt")
"""

COPIES = """\
import os
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

torch.distributed.init_process_group("gloo")
rank = int(os.environ["RANK"])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)
model = DDP(nn.Linear(8, 1).to(rank), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * torch.distributed.get_world_size())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
"""


def found(text: str, given: Given | None = None) -> list[Finding]:
    """The findings in a script's text."""
    return look(parse_script(text, given=given))


def changed(text: str, *changes: tuple[str, str]) -> str:
    """A script with other lines; each must be there."""
    for old, new in changes:
        assert old in text, f"the script has no {old!r}"
        text = text.replace(old, new)
    return text
