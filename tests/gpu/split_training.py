"""Worker: two processes that share a GPU train a small model; prints how far they are from one process."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import weft.torch as weft


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), *(Block(64) for _ in range(4)), nn.Linear(64, 8))
    weft.init({"partitions": 2, "microbatches": 4})
    alone = copy.deepcopy(net).cuda()
    model = weft.DistributedModel(net)

    @weft.step
    def train_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y.to(f"cuda:{torch.cuda.current_device()}"))
        model.backward(loss)
        return loss

    x, y = torch.randn(16, 16), torch.randn(16, 8)
    loss = train_step(model, x, y).reduce_mean()
    for part, target in zip(x.cuda().chunk(4), y.cuda().chunk(4), strict=True):
        (F.mse_loss(alone(part), target) / 4).backward()
    wanted = dict(alone.named_parameters())
    worst = 0.0
    for name, parameter in model.local_named_parameters():
        assert parameter.device.type == "cuda" and parameter.grad is not None
        grad = wanted[name.removeprefix("module.")].grad
        assert grad is not None
        worst = max(worst, ((parameter.grad - grad).abs().max() / grad.abs().max()).item())
    print(f"rank {weft.rank()} loss {loss.item():.6f} worst {worst:.2e}")
    assert worst < 1e-5


if __name__ == "__main__":
    main()
