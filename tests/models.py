"""Small models, for what a split must get right. Shapes: B batch, S sequence, W width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
TOKENS = 32


class Composed(nn.Module):
    """Parts by name, and a forward pass that is a function of this module and its inputs."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


class Stack(nn.Module):
    """Parts by name, one after the other; the code between them is the model's, unlike that of `nn.Sequential`."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


class Block(nn.Module):
    """A residual block [B, *, W] -> [B, *, W], the size of part that a partition holds: a norm and two linears.

    ``inside``: features between the linears. ``norm``: its kind, None for none. ``rate``: of dropout, None for none.
    """

    def __init__(
        self, width: int = WIDTH, inside: int | None = None, between: Callable[[Tensor], Tensor] = F.gelu,
        norm: Callable[[int], nn.Module] | None = nn.LayerNorm, rate: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        inside = 2 * width if inside is None else inside
        self.norm = None if norm is None else norm(width)
        self.up, self.down = nn.Linear(width, inside), nn.Linear(inside, width)
        self.dropout = None if rate is None else nn.Dropout(rate)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.norm is None else self.norm(x)
        y = self.down(self.between(self.up(y)))
        return x + (y if self.dropout is None else self.dropout(y))


class Chain(nn.Module):
    """Blocks one after the other."""

    def __init__(self, depth: int = 4, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Words(nn.Module):
    """Scores for words, of words: an embedding, blocks and a head, whose weight is the embedding's where it is tied."""

    def __init__(
        self, words: int, width: int, blocks: Iterable[nn.Module], tied: bool = True, **embedding: Any
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, **embedding)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, words, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def body(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.body(words))


class Mixture(nn.Module):
    """Four experts, of which each row [B, W] goes to two, by a router's scores."""

    def __init__(self, width: int = WIDTH, expert: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == number)
            if len(rows):
                total.index_add_(0, rows, expert(x[rows]) * weights[rows, nth, None])
        return total


class Adapter(nn.Module):
    """A low-rank addition to a linear layer, which is frozen."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Repeated(nn.Module):
    """One block used three times with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Block()
        self.other = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        x = self.shared(self.other(x))
        return self.shared(x)


class Ladder(nn.Module):
    """Skips of a U-Net: what went down joins, in opposite order, what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(3))
        self.bottom = Block()
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        x = self.bottom(x)
        for block in self.up:
            x = block(torch.cat([x, kept.pop()], dim=-1))
        return x


class LongSkips(nn.Module):
    """The first result reaches every later block, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.blocks = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x, first)) + 0.5 * first
        return x - first


class Tied(Words):
    """Tokens [B, S] -> their loss, with logits by the matrix that embeds them."""

    def __init__(self) -> None:
        super().__init__(TOKENS, WIDTH, [Block() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(ids).flatten(0, 1), ids.flatten())


class TiedInPart(Tied):
    """The embedding is tied to one piece of a larger head."""

    def __init__(self) -> None:
        super().__init__()
        decoder = nn.Linear(WIDTH, TOKENS)
        decoder.weight = self.embed.weight
        self.head = Composed(
            lambda head, x: head.decoder(torch.tanh(head.transform(x))),
            transform=nn.Linear(WIDTH, WIDTH), decoder=decoder,
        )  # fmt: skip


class ThreeWays(nn.Module):
    """Parts with several tensors in and several out."""

    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.project(x).chunk(3, dim=-1)

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return self.out(torch.sigmoid(q) * k + v), q * v

    def __init__(self) -> None:
        super().__init__()
        self.fork = self.Fork()
        self.join = self.Join()
        self.again = self.Fork()
        self.last = self.Join()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.fork(x)
        y, side = self.join(k, q, v)
        return self.last(*self.again(y))[0], side


@dataclass
class Carried:
    """A structure that passes between parts: tensors, None, and plain values."""

    hidden: Tensor
    nothing: Tensor | None
    extra: dict[str, Any]


class Pair(NamedTuple):
    """The other kind of record."""

    left: Tensor
    right: Tensor


class Nested(nn.Module):
    """Dicts, None, a dataclass, a named tuple and lists between the parts."""

    class Wrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)
            self.b = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> dict[str, Any]:
            pair = Pair(self.a(x), torch.tanh(self.b(x)))
            inner = {"pair": pair, "list": [x * 2, None, 3], "name": "wrap", "none": None}
            return {"carried": Carried(x + pair.left, None, inner), "flag": True}

    class Unwrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Linear(WIDTH, WIDTH)

        def forward(self, given: dict[str, Any], scale: float, missing: Tensor | None = None) -> Carried:
            carried, inner = given["carried"], given["carried"].extra
            assert given["flag"] is True and inner["name"] == "wrap" and missing is None
            assert carried.nothing is None and inner["list"][1:] == [None, 3]
            hidden = self.c(carried.hidden + inner["pair"].right) * scale + inner["list"][0]
            return Carried(hidden, inner["pair"].left, {})

    def __init__(self) -> None:
        super().__init__()
        self.wrap = self.Wrap()
        self.unwrap = self.Unwrap()
        self.rewrap = self.Wrap()
        self.last = self.Unwrap()

    def forward(self, x: Tensor) -> Tensor:
        first = self.unwrap(self.wrap(x), 0.5)
        second = self.last(self.rewrap(first.hidden), scale=0.25, missing=None)
        return second.hidden + first.nothing


class Keywords(nn.Module):
    """Parts called with positions, names, defaults and plain values of many types."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(
            self,
            x: Tensor,
            /,
            y: Tensor | None = None,
            *rest: Tensor,
            mode: str = "add",
            power: int = 1,
            **more: Any,
        ) -> Tensor:
            x = self.inner(x) if y is None else self.inner(x) + y
            for other in rest:
                x = x * torch.sigmoid(other)
            x = x + more["bias"] if more.get("bias") is not None else x
            return x**power if mode == "power" else x

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(4))

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        a = self.parts[0](x)
        b = self.parts[1](a, y=x, mode="power", power=2)
        c = self.parts[2](b, a, a, b, bias=shift, unused=[1, "two", None])
        return self.parts[3](c, bias=a, y=b)


class CrossAttending(nn.Module):
    """Every decoder block reads the encoder's result; one table of angles and one mask serve all blocks."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

        def forward(
            self, x: Tensor, source: Tensor, table: tuple[Tensor, Tensor], mask: Tensor | None
        ) -> Tensor:
            q, (k, v) = turn(self.q(x), table), self.kv(source).chunk(2, dim=-1)
            return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(self.Attention() for _ in range(2))
        self.decoder = nn.ModuleList(self.Attention() for _ in range(4))
        self.register_buffer("speeds", 1.0 / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH))

    def forward(self, source: Tensor, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.speeds
        table = (angles.cos(), angles.sin())
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril().log()
        for layer in self.encoder:
            source = layer(source, source, table, None)
        for number, layer in enumerate(self.decoder):
            x = layer(x, x if number % 2 else source, table, mask if number % 2 else None)
        return x


class Reader(nn.Module):
    """Scores [B, S, TOKENS] for words [B, S]. Each attends to all of its row, or to those that a mask [B, S] allows."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            wide = None if mask is None else mask[:, None].bool().expand(-1, x.shape[1], -1)
            return x + F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), attn_mask=wide)

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.attention = nn.ModuleList(self.Attention() for _ in range(depth))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(words)
        for attention, block in zip(self.attention, self.blocks, strict=True):
            x = block(attention(x, mask))
        return self.head(x)


def turn(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: pairs of features of `x` [B, S, W] turned by angles, given as cosines and sines."""
    cos, sin = table
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1) / math.sqrt(2)


class Scales:
    """Numbers that hang on a weight, and are no parameters."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.turned = numbers, False
