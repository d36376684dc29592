"""A small GPT in plain PyTorch. Nothing in it knows that it may be split over processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class SmallGPT(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(
        self, vocabulary: int, blocks: int = 6, width: int = 128, heads: int = 4, context: int = 128
    ) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model: SmallGPT, ids: list[int], count: int, temperature: float = 0.8) -> list[int]:
    """`count` ids that the model continues `ids` with, drawn from the 40 likeliest each time."""
    generator = torch.Generator().manual_seed(1)
    ids = list(ids)
    for _ in range(count):
        logits = model(torch.tensor([ids[-model.context :]]))[0, -1] / temperature
        likeliest, where = logits.topk(min(40, logits.numel()))
        ids.append(int(where[torch.multinomial(likeliest.softmax(0), 1, generator=generator)]))
    return ids[-count:]
