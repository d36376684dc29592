"""A pipelined evaluation: a step without `backward`. Its outputs are on every rank.

    weft run -n 2 examples/evaluate_classifier.py

A small convolutional network learns which quarter of a picture is bright; the test set's last
mini-batch does not divide by the microbatches, which `allow_uneven=True` permits.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import weft.torch as weft

STEPS, BATCH = 40, 32


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, 1, 16, 16, generator=generator)
    labels = torch.randint(4, (count,), generator=generator)
    rows, columns = torch.arange(16).view(1, 16, 1) // 8, torch.arange(16).view(1, 1, 16) // 8
    bright = rows * 2 + columns == labels.view(-1, 1, 1)
    return noise + 0.7 * bright.unsqueeze(1), labels


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(512, 4)),
    )


@weft.step
def train_step(model, x, labels):
    loss = cross_entropy(model(x), labels)
    model.backward(loss)
    return loss


@weft.step(allow_uneven=True)
def evaluation_step(model, x):
    return model(x).argmax(dim=1)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    model.eval()
    parts = [evaluation_step(model, part).concat() for part in x.split(BATCH)]
    model.train()
    return float((torch.cat(parts) == labels).float().mean())


def main() -> None:
    weft.init({"partitions": 2, "microbatches": 4})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = weft.DistributedModel(network())
    optimizer = weft.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=3e-3))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = train_step(model, *pictures(BATCH, seed=step)).reduce_mean()
        optimizer.step()
        if weft.rank() == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}", flush=True)
    found = accuracy(model, *pictures(250, seed=-1))
    print(f"rank {weft.rank()}: {found:.0%} of 250 unseen pictures told right", flush=True)
    if not found > 0.8:
        raise SystemExit("the network did not learn; guessing gives 25%")


if __name__ == "__main__":
    main()
