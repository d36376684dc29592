"""A partition chosen by hand: `weft.partition` around construction, `weft.set_partition` afterwards.

    weft run -n 2 examples/train_mlp_manual.py

The network visits partition 0 twice: it holds the encoder and the head, partition 1 what is between.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import weft.torch as weft

STEPS, BATCH, WIDTH = 60, 64, 128


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with weft.partition(0):
            self.encoder = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh())
        with weft.partition(1):
            self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return self.head(x + self.middle(x))


@weft.step
def train_step(model, x, y):
    loss = mse_loss(model(x), y)
    model.backward(loss)
    return loss


def main() -> None:
    weft.init({"partitions": 2, "microbatches": 4, "auto_partition": False, "default_partition": 1})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = Network()
    weft.set_partition(network.head, 0)
    model = weft.DistributedModel(network)
    optimizer = weft.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=3e-3))

    losses = []
    for step in range(STEPS):
        x = torch.randn(BATCH, 8)
        y = x.prod(dim=1, keepdim=True).tanh() + x[:, :1]
        optimizer.zero_grad()
        loss = train_step(model, x, y).reduce_mean()
        optimizer.step()
        losses.append(loss.item())
        if weft.rank() == 0 and step % 20 == 0:
            print(f"step {step:3}  loss {losses[-1]:.3f}", flush=True)
    held = sorted({name.removeprefix("module.").split(".")[0] for name, _ in model.local_named_parameters()})
    print(f"rank {weft.rank()} holds {', '.join(held)}; loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
    if held != (["encoder", "head"] if weft.pp_rank() == 0 else ["middle"]):
        raise SystemExit("a part of the network is not where it was put")
    if not losses[-1] < 0.5 * losses[0]:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
