"""Training on digits with replicas only, in three styles: both of smdistributed.dataparallel, and PyTorch's own.

data_parallel.py old|new|torch
"""

from __future__ import annotations

import json
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STYLE = sys.argv[1]
if STYLE == "old":
    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP
else:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
if STYLE == "new":
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.fc = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc(torch.flatten(x, 1)), 1)


def digits():
    """Each class is a fixed picture under noise."""
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(10, 1, 12, 12, generator=generator)
    labels = torch.randint(10, (96,), generator=generator)
    return TensorDataset(pictures[labels] + 0.3 * torch.randn(96, 1, 12, 12, generator=generator), labels)


def begin():
    if STYLE == "old":
        dist.init_process_group()
        torch.cuda.set_device(dist.get_local_rank())
    else:
        dist.init_process_group(backend="smddp" if STYLE == "new" else "nccl")


def main():
    begin()
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda")
    torch.manual_seed(5 + rank)  # DDP hands on the first process's weights
    data = digits()
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=16 // size, sampler=sampler, pin_memory=True)
    model = DDP(Net().to(device), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            x, y = x.to(device, non_blocking=True), y.to(device)
            optimizer.zero_grad()
            if number == 2:  # two half batches, of which only the second meets the other process
                with model.no_sync():
                    (F.nll_loss(model(x[::2]), y[::2]) / 2).backward()
                x, y, weight = x[1::2], y[1::2], 0.5
            else:
                weight = 1.0
            loss = F.nll_loss(model(x), y)
            (weight * loss).backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / size)
    dist.barrier()
    print("RESULT", json.dumps([rank, losses]))


if __name__ == "__main__":
    main()
