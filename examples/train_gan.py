"""A generator, a discriminator with a gradient penalty, and a learned temperature outside of both, in one step."""

import torch
from torch import nn
from torch.nn.functional import softplus

import weft.torch as weft

weft.init({"partitions": 2, "microbatches": 4, "auto_partition": False})
torch.manual_seed(0)


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        with weft.partition(1):
            self.discriminator = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


model = weft.DistributedModel(Gan())
temperature = nn.Parameter(torch.zeros(()))
optimizer = weft.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2))


@weft.step
def train_step(model, noise, real):
    gan = model.module
    fake = gan.generator(noise)
    between = (0.5 * real + 0.5 * fake.detach()).requires_grad_()
    (slope,) = torch.autograd.grad(gan.discriminator(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    losses = softplus(gan.discriminator(fake.detach())) + softplus(-gan.discriminator(real))
    judged = losses.mean() + penalty
    model.backward(judged)
    loss = softplus(-gan.discriminator(fake) * temperature.exp()).mean()
    model.backward(loss)
    return judged


found = []
for _ in range(40):
    optimizer.zero_grad()
    found.append(train_step(model, torch.randn(32, 8), 2 + torch.randn(32, 8)).reduce_mean().item())
    optimizer.step()
assert temperature.grad is not None  # the same on both ranks
if weft.rank() == 0:
    print(f"loss {found[0]:.3f} to {found[-1]:.3f}")
assert found[-1] < found[0], "the loss does not fall"
