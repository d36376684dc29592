"""Models of the tests' own whose sequences are cut: all kinds of positions, and lengths that make blocks enough."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.recurrent_models import RECURRENT, WINDOWED
from tests.parity.tensor_parallel_models import HEADS, OWN, WIDTH, Stack
from tests.parity.zoo import CASES
from tests.parity.zoo.case import Batch, Case, generator

LENGTH = 24
LONGER = (
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "BertForMaskedLM",
    "BloomForCausalLM",
    "T5ForConditionalGeneration",
)


class Attention(nn.Module):
    """Attention that knows positions in one of many ways; the first of a list of them is causal by itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.late = how, False
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.relative = nn.Parameter(torch.randn(HEADS, 2 * LENGTH) * 0.3)  # by distance
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.3)
        self.turn = nn.Parameter(torch.randn(max(LENGTH, WIDTH), WIDTH // HEADS) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        at = torch.arange(length)
        if self.how == "places":
            x = x + self.places[:length]
        if self.how.startswith("windows"):
            x = x.view(samples, -1, int(self.how.split()[-1]), WIDTH)
            x = x + self.qkv(x)[..., :WIDTH].mean(2, keepdim=True)
            x = x.view(samples, length, -1)
        if self.how == "surprises" and self.late:  # other positions, which the first step has not shown
            windows = x.view(samples, -1, 4, WIDTH)
            x = x + (windows - windows.mean(2, keepdim=True)).view(x.shape) + x.flip(1) + x.cumsum(1) * 0.1
            x = x + x.argmax(1, keepdim=True) * 0.01 + F.pad(x, (0, 0, 1, 0))[:, :-1] * self.places[:length]
            x = x + F.conv1d(
                x.transpose(1, 2), self.turn[:WIDTH, None, :3], padding=1, groups=WIDTH
            ).transpose(1, 2)
        fused = self.qkv(x)
        if self.how == "surprises" and self.late:
            fused = fused + fused.flip(1) * 0.1
        qkv = fused.view(samples, length, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.how == "rotary":
            cos, sin = self.turn[:length].cos(), self.turn[:length].sin()
            q, k = (each * cos + torch.cat([-each[..., 4:], each[..., :4]], -1) * sin for each in (q, k))
        if self.how == "relative":
            bias = self.relative[:, at[:, None] - at + LENGTH]
            mixed = F.scaled_dot_product_attention(q, k, v, bias[None])
        elif self.how == "written":
            scores = q @ k.transpose(-2, -1) - (at[:, None] - at).abs() * 0.1
            scores = scores.masked_fill(torch.ones(length, length).tril() == 0, float("-inf"))
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Scores(nn.Module):
    """The stack with another number for each position in the loss."""

    def __init__(self, layers: Callable[[], list[nn.Module]]) -> None:
        super().__init__()
        self.net = Stack(layers)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.net.layers:
            layer.late = bool(labels[0, 0] > 0)
        for norm, layer in zip(self.net.norms, self.net.layers, strict=True):
            x = x + layer(norm(x))
        scores = self.head(x * torch.linspace(0.5, 1.5, x.shape[1])[:, None])
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _batch(step: int) -> Batch:
    numbers = generator(step)
    labels = torch.randint(5, (8, LENGTH), generator=numbers)
    labels[:, 0] = step  # is in no loss
    return {"x": torch.randn(8, LENGTH, WIDTH, generator=numbers), "labels": labels}


def _case(*how: str) -> Case:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Scores(lambda: [Attention(each) for each in how])

    return Case(", ".join(how), build, _batch, loss=lambda loss: loss, optimizer="adamw")


def _longer(case: Case) -> Case:
    """The same with sequences of 12."""

    def batch(step: int) -> Batch:
        return {
            name: torch.cat([value, value[:, : 12 - value.shape[1]]], 1)
            for name, value in case.batch(step).items()
        }

    return dataclasses.replace(case, name=f"{case.name}, 12", batch=batch)


ALL = {
    **CASES,
    **OWN,
    **RECURRENT,
    **WINDOWED,
    **{
        case.name: case
        for case in (
            *(_longer(CASES[name]) for name in LONGER),
            _case("causal", "rotary", "places"),
            _case("causal", "relative", "written"),
            _case("causal", "surprises"),
            _case("causal", "windows of 2"),
            _case("causal", "windows of 4"),
        )
    },
}
