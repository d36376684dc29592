"""Training on digits as scripts for smdistributed do it: the loss is computed in the step, all ranks read the data."""

from __future__ import annotations

import argparse
import json

import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset, random_split


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return torch.flatten(F.max_pool2d(x, 2), 1)


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(128, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        with smp.partition(0):
            self.first = First()
        with smp.partition(1):
            self.second = Second()

    def forward(self, x):
        return self.second(self.first(x))


@smp.step
def train_step(model, scaler, data, target):
    with torch.cuda.amp.autocast(enabled=scaler is not None):
        output = model(data)
    loss = F.nll_loss(output.float(), target, reduction="mean")
    model.backward(scaler.scale(loss) if scaler is not None else loss)
    return output, loss


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    correct = (
        output.argmax(dim=1, keepdim=True).eq(target.view_as(output.argmax(dim=1, keepdim=True))).sum().item()
    )
    return loss, correct


def digits():
    """Each class is a fixed picture under noise."""
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(10, 1, 12, 12, generator=generator)
    labels = torch.randint(10, (96,), generator=generator)
    return TensorDataset(pictures[labels] + 0.3 * torch.randn(96, 1, 12, 12, generator=generator), labels)


def train(model, device, loader, optimizer, scaler):
    model.train()
    losses = []
    for data, target in loader:
        data, target = data.to(device, non_blocking=True), target.to(device)
        optimizer.zero_grad()
        output, loss_mb = train_step(model, scaler, data, target)
        assert output.concat().shape == (len(data), 10)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif len(list(model.local_parameters())) > 0:
            optimizer.step()
        losses.append(loss_mb.reduce_mean().item())
    return losses


def test(model, device, loader):
    model.eval()
    total, right = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            loss_batch, correct_batch = test_step(model, data.to(device), target.to(device))
            total += sum(loss_batch)
            right += sum(correct_batch)
    return total / len(loader.dataset), right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", type=int, default=0)
    parser.add_argument("--mp_parameters", type=str, default="")
    args = parser.parse_args()
    torch.manual_seed(5)
    smp.init()
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")
    data, _ = random_split(digits(), [64, 32], generator=torch.Generator().manual_seed(2))
    if smp.dp_size() > 1:
        data = torch.utils.data.Subset(data, range(smp.dp_rank(), len(data), smp.dp_size()))
    loader = DataLoader(data, batch_size=16 // smp.dp_size(), pin_memory=True, drop_last=True)
    model = smp.DistributedModel(Net().to(device), trace_device="gpu")
    plain = optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scheduler = StepLR(plain, step_size=1, gamma=0.7)
    optimizer = smp.DistributedOptimizer(plain)
    scaler = smp.amp.GradScaler() if args.amp else None
    losses = []
    for _ in range(3):
        losses += train(model, device, loader, optimizer, scaler)
        scheduler.step()
    mean, accuracy = test(model, device, loader)
    everywhere = smp.allgather(mean, smp.CommGroup.MP_GROUP)
    assert len(set(everywhere)) == 1, everywhere
    smp.barrier()
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] < 0.04
    print("RESULT", json.dumps([smp.rank(), losses, mean, accuracy]))


if __name__ == "__main__":
    main()
