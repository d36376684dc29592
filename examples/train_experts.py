"""Two mixtures of experts on two ranks: each holds some of the experts, and the router stays whole."""

import torch
from torch import nn

import weft.torch as weft


class Mixture(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, nth = torch.where(chosen == number)
            result = result.index_add(0, row, expert(x[row]) * weights[row, nth, None])
        return x + result


weft.init({"tensor_parallel_degree": 2, "microbatches": 2})
torch.manual_seed(0)
model = weft.DistributedModel(nn.Sequential(Mixture(16, 4), Mixture(16, 3)))
optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


@weft.step
def train_step(model, x):
    loss = (model(x) - x.roll(1, 1)).square().mean()
    model.backward(loss)
    return loss


x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
losses = []
for _ in range(20):
    optimizer.zero_grad()
    losses.append(train_step(model, x).reduce_mean().item())
    optimizer.step()
if weft.rank() == 0:
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
assert losses[-1] < losses[0], "the loss does not fall"
held = [len(model.module[0].experts[number][0].weight) for number in range(4)]
assert held == ([64, 64, 0, 0] if weft.tp_rank() == 0 else [0, 0, 64, 64])
assert model.state_dict()["0.experts.3.0.weight"].shape == (64, 16)
