"""Models of the tests' own for axis `tp`: habits that the zoo's models have not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parity.zoo.case import VOCABULARY, Batch, Case, generator, network
from tests.parity.zoo.inputs import causal
from weft.compat.modelparallel.tensor_parallel import (
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
)
from weft.torch import set_tensor_parallelism

WIDTH, LENGTH, SAMPLES, HEADS = 32, 6, 8, 4


class Gated(nn.Module):
    """Gate and values in one projection, taken apart in the way that is told."""

    def __init__(self, apart: str = "chunk") -> None:
        super().__init__()
        self.both, self.down, self.apart = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), apart

    def forward(self, x: Tensor) -> Tensor:
        both = self.both(x)
        if self.apart == "chunk":
            gate, values = both.chunk(2, dim=-1)
        elif self.apart == "slices":
            gate, values = both[..., : 2 * WIDTH], both[..., 2 * WIDTH :]
        elif self.apart == "clamped":
            gate, values = both.clamp(-3.0, 3.0).split([2 * WIDTH, 2 * WIDTH], -1)
        else:
            gate, values = both.view(*x.shape[:-1], 2, 2 * WIDTH).unbind(-2)
        return self.down(F.silu(gate) * values)


class Fused(nn.Module):
    """Attention whose queries, keys and values are seen as (samples, length, 3, heads, size of a head)."""

    def __init__(self, heads: int = HEADS, eager: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.eager, self.dropout = heads, eager, dropout
        self.size = WIDTH // heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * heads * self.size), nn.Linear(heads * self.size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        qkv = self.qkv(x).reshape(samples, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        if self.eager:
            weights = (q @ k.transpose(-2, -1) * self.size**-0.5).softmax(-1)
            mixed = F.dropout(weights, self.dropout, self.training) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(samples, length, -1))


class FewKeys(nn.Module):
    """Attention with fewer heads of keys than of queries."""

    def __init__(self, keys: int = 1, grouped: bool = True, fused: bool = False) -> None:
        super().__init__()
        self.keys, self.grouped, self.fused, self.size = keys, grouped, fused, WIDTH // HEADS
        rest = keys * self.size
        if fused:
            self.qkv = nn.Linear(WIDTH, WIDTH + 2 * rest)
        else:
            self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, rest), nn.Linear(WIDTH, rest)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH, LENGTH))
        self.norm = nn.Parameter(torch.ones(self.size))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        rest = self.keys * self.size
        parts = (
            self.qkv(x).split([WIDTH, rest, rest], -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        )
        q, k, v = (each.view(samples, length, -1, self.size).transpose(1, 2) for each in parts)
        q = q * self.norm
        if not self.grouped and k.shape[1] > 1:
            k, v = (each.repeat_interleave(HEADS // self.keys, 1) for each in (k, v))
        grouped = self.grouped and self.keys > 1
        mixed = F.scaled_dot_product_attention(q, k, v, self.bias[None], enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Lower(nn.Module):
    """Two linears, the first of which is called inside of an activation checkpoint, or written in place."""

    def __init__(self, inside: bool = False, in_place: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.inside, self.in_place = (
            nn.Linear(WIDTH, 64),
            nn.Linear(64, WIDTH),
            inside,
            in_place,
        )
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def middle(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        middle = checkpoint(self.middle, x, use_reentrant=False) if self.inside else self.middle(x)
        if self.inside:
            middle = checkpoint(torch.tanh, middle, use_reentrant=False)
        if self.in_place:
            middle = middle.clone().mul_(2.0)
        return self.down(middle)


class ByHand(nn.Module):
    """Two linears, and what the script says of each."""

    def __init__(self, up: Any, down: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        set_tensor_parallelism(self.up, up)
        set_tensor_parallelism(self.down, down)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.0))


BY_HAND = [("column", "row"), ("column", False), ("row", "column"), ("row", "row"), ("column", "column")]


class Adapted(nn.Module):
    """Frozen linears with small ones beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.c, self.d = nn.Linear(64, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        middle = F.gelu(self.up(x) + self.b(self.a(x)))
        return self.down(middle) + self.d(self.c(middle))


class Translator(nn.Module):
    """PyTorch's own encoder and decoder layers, with masks of all kinds."""

    def __init__(self, first: bool = True) -> None:
        super().__init__()
        shape: dict[str, Any] = dict(
            d_model=WIDTH, nhead=HEADS, dim_feedforward=64, dropout=0.0, batch_first=first
        )
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**shape), 2, enable_nested_tensor=first
        )
        self.decoder = nn.TransformerDecoderLayer(**shape, norm_first=True, bias=False)
        self.shown = nn.MultiheadAttention(WIDTH, HEADS, batch_first=first)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(2, 2 + len(x)).clamp(max=LENGTH)
        padding = torch.arange(LENGTH) >= lengths[:, None]
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        heads = torch.linspace(-1, 1, len(x) * HEADS)[:, None, None] * torch.ones(LENGTH, LENGTH)
        x = x if self.first else x.transpose(0, 1)
        memory = self.encoder(x, src_key_padding_mask=padding)
        x = self.decoder(x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)
        y, average = self.shown(x, memory, memory, need_weights=True, attn_mask=heads)
        z, each = self.shown(y, x, memory, need_weights=True, average_attn_weights=False)
        y = y + z + average.mean() + each.pow(2).sum() * 0.01
        return y if self.first else y.transpose(0, 1)


class Mixture(nn.Module):
    """Experts of their own modules, of which each word is given to one."""

    def __init__(self, experts: int = 4, named: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        made = [nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(experts)]
        self.experts = (
            nn.ModuleDict({f"expert_{n}": m for n, m in enumerate(made)}) if named else nn.ModuleList(made)
        )

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(-1)
        best, which = chances.max(-1)
        result = torch.zeros_like(x)
        experts = self.experts.values() if isinstance(self.experts, nn.ModuleDict) else self.experts
        for number, expert in enumerate(experts):
            samples, words = torch.where(which == number)
            if len(samples):
                result = result.index_put(
                    (samples, words), expert(x[samples, words]) * best[samples, words, None]
                )
        return result


class Shared(nn.Module):
    """Three routed experts, whose gates are sigmoids, and one for all words, in one module; scores come out, too."""

    def __init__(self, experts: int = 3, normed: bool = False) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(experts, WIDTH) * 0.2)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(Lower() for _ in range(experts))
        self.shared = Gated()
        self.normed = normed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = self.norm(x).view(-1, WIDTH)
        scores = F.linear(flat, self.gate)
        weights, which = scores.sigmoid().topk(2, -1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, nth = torch.where(which == number)
            if len(rows):
                result.index_add_(0, rows, expert(flat[rows]) * weights[rows, nth, None])
        if self.normed:
            result = F.layer_norm(result, result.shape[-1:])
        return result.view_as(x) + self.shared(x), scores


class Residual(Shared):
    """What goes in is added in the same module; ``noise``: the router sees it with other numbers each time."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__(4)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        noisy = x * (1 + self.noise * torch.rand(len(x), 1, 1)) if self.noise else x
        return x + super().forward(noisy)[0]


class Balanced(nn.Module):
    """A mixture and what is added to a loss so that experts get equally many words."""

    def __init__(self, mixture: Shared) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        result, scores = self.mixture(x)
        chances = scores.softmax(-1)
        return result + 0.1 * (chances.mean(0) * chances.detach().mean(0)).sum()


class Stacked(nn.Module):
    """Weights and biases of all experts in one tensor each, inputs first, gates and values one beside the other."""

    def __init__(self, experts: int = 4, inner: int = 20, width: int = WIDTH, how: str = "") -> None:
        super().__init__()
        self.experts, self.how = experts, how
        self.up = nn.Parameter(torch.randn(experts, width, 2 * inner) * 0.2)
        self.up_bias = nn.Parameter(torch.randn(experts, 2 * inner))
        self.down = nn.Parameter(torch.randn(experts, inner, width) * 0.2)
        self.down_bias = nn.Parameter(torch.randn(experts, width))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, which: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number in range(self.experts):
            if self.how == "all":  # whichever are needed
                rows, share = torch.arange(len(x), device=x.device), (weights * (which == number)).sum(-1)
            else:
                rows, nth = torch.where(which == number)
                share = weights[rows, nth]
            both = (x[rows] * self.scale) @ self.up[number] + self.up_bias[number]
            gate, values = both[..., ::2], both[..., 1::2].clamp(-3, 3)
            found = (F.silu(gate) * values) @ self.down[number] + self.down_bias[number]
            if self.how == "spoilt":
                found = found.tanh()
            result = result.index_add(0, rows, found * share[:, None])
        return result


class Apart(nn.Module):
    """One weight for all experts and nothing else: rows are in the order of experts, so many for each."""

    def __init__(self, results: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, results, inputs) * 0.2)

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(sizes), self.weight, strict=True)])


class Sorted(nn.Module):
    """A mixture that puts rows in the order of experts, and calls two such modules."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.bias = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(WIDTH))
        self.up, self.down = Apart(48, WIDTH), Apart(WIDTH, 24)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        best, which = self.router(flat).softmax(-1).max(-1)
        order, sizes = which.argsort(stable=True), which.bincount(minlength=4).tolist()
        gate, values = self.up(flat[order], sizes).chunk(2, -1)
        found = self.down(F.silu(gate) * values, sizes) * best[order, None]
        return (torch.zeros_like(flat).index_add(0, order, found) + self.bias).view(x.shape)


class Routed(nn.Module):
    """A router in front of such experts."""

    def __init__(self, experts: nn.Module, number: int = 4) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, number), experts

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, which = self.router(flat).softmax(-1).topk(2, -1)
        return self.experts(flat, which, weights=weights).view(x.shape)


SHAPE: dict[str, Any] = {
    "num_attention_heads": HEADS, "attention_head_size": WIDTH // HEADS, "hidden_size": WIDTH, "intermediate_size": 64,
    "attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
}  # fmt: skip


class Original(nn.Module):
    """A layer for scripts that were written for smdistributed: states and masks in one tuple."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.layer = DistributedTransformerLayer(**SHAPE, **more)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(LENGTH) >= torch.arange(2, 2 + len(x)).clamp(max=LENGTH)[:, None]
        mask = padding[:, None, None] * torch.finfo(x.dtype).min
        inputs = (x, x.flip(1), mask, None) if self.layer.add_cross_attention else (x, mask)
        hidden: Tensor = self.layer(inputs)[0]
        return hidden


class OriginalHead(nn.Module):
    """Its transformer with embeddings and head."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.model = DistributedTransformerLMHead(
            2, **SHAPE, vocab_size=40, num_positions=LENGTH, causal_mask_size=LENGTH, pre_layernorm=True,
            post_layernorm=False, **more,
        )  # fmt: skip

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        ids = x.abs().mul(10).long()[..., 0].clamp(max=39)
        loss: Tensor = self.model((ids, None, None, None, (ids + labels[:, None]) % 40))[0]
        return loss


class Stack(nn.Module):
    """Layers with a norm and a residual path, and a head for a class."""

    def __init__(
        self, layers: Callable[[], list[nn.Module]], around: bool = False, bf16: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers())
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.layers)
        self.head = nn.Linear(WIDTH, 5)
        self.around, self.bf16 = around, bf16

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            for norm, layer in zip(self.norms, self.layers, strict=True):
                given = norm(x)
                x = x + (checkpoint(layer, given, use_reentrant=False) if self.around else layer(given))
            return self.head(x.mean(1)).float()


class Loss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), labels)


def _batch(step: int) -> Batch:
    numbers = generator(step)
    return {
        "x": torch.randn(SAMPLES, LENGTH, WIDTH, generator=numbers),
        "labels": torch.randint(5, (SAMPLES,), generator=numbers),
    }


def _original_head(name: str, **more: Any) -> Case:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return OriginalHead(**more)

    return Case(name, build, _batch, loss=lambda loss: loss, optimizer="adamw")


def _case(name: str, layers: Callable[[], list[nn.Module]], **more: Any) -> Case:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Loss(Stack(layers, **more))

    return Case(name, build, _batch, loss=lambda loss: loss, optimizer="adamw")


def _jetmoe(name: str, balanced: bool) -> Case:
    """Weights of experts that are each alone in a module: a mixture calls two of these; attention has methods."""
    build = network(
        "JetMoeForCausalLM", "JetMoeConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48,
        num_hidden_layers=2, num_key_value_heads=HEADS, kv_channels=8, num_local_experts=4, num_experts_per_tok=2,
        use_cache=False, output_router_logits=balanced, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Case(name, build, causal())


OWN: dict[str, Case] = {
    case.name: case
    for case in (
        _case("gated by chunk", lambda: [Gated(), Gated()]),
        _case("gated by slices", lambda: [Gated("slices"), Gated("clamped")]),
        _case("gated by view", lambda: [Gated("view")]),
        _case("fused attention", lambda: [Fused(), Fused(eager=True)], around=True),
        _case("three heads", lambda: [Fused(3), Gated()]),
        _case("one head of keys", lambda: [FewKeys(), FewKeys(grouped=False)]),
        _case("two heads of keys", lambda: [FewKeys(2), FewKeys(2, grouped=False), FewKeys(2, fused=True)]),
        _case("one fused head of keys", lambda: [FewKeys(1, fused=True)]),
        _case("checkpoints inside", lambda: [Lower(inside=True), Lower(in_place=True)]),
        _case("by hand", lambda: [ByHand(*words) for words in BY_HAND]),
        _case("adapters", lambda: [Adapted()]),
        _case("layers of PyTorch", lambda: [Translator()]),
        _case("layers of PyTorch, batch second", lambda: [Translator(False)]),
        _case(
            "layers of smdistributed",
            lambda: [
                Original(causal_mask_size=LENGTH, pre_layernorm=True, use_alibi=True),
                Original(add_cross_attention=True),
            ],
        ),
        _original_head("head of smdistributed"),
        _original_head(
            "head as that of GPT-J",
            rotary_dim=4,
            use_parallel_residual=True,
            qkv_bias=False,
            dense_bias=False,
            tie_word_embeddings=False,
            lm_head_bias=True,
            attention_in_fp32=True,
        ),
        _original_head(
            "head as that of GPT-Neo",
            window_size=3,
            attention_layers=("global", "local"),
            qkv_bias=False,
            scale_attention_scores=False,
        ),
        _case("mixture", lambda: [Mixture(), Mixture(named=True), Gated()]),
        _case("shared expert", lambda: [Balanced(Shared()), Gated(), Balanced(Shared(4))]),
        _case("residual mixture", lambda: [Residual()]),
        _case("normed mixture", lambda: [Balanced(Shared(normed=True))]),
        _case("stacked experts", lambda: [Routed(Stacked()), Routed(Stacked(inner=WIDTH // 2))], around=True),
        _case("spoilt experts", lambda: [Routed(Stacked(how="spoilt")), Gated()]),
        _jetmoe("JetMoe", False),
        _jetmoe("JetMoe, balanced", True),
        _case("bf16", lambda: [Fused(), Gated(), Lower(inside=True), FewKeys(2)], bf16=True),
    )
}
