"""Writes a program as Python: what is drawn is a model that somebody could have written.

A model gets words (samples, positions) and gives scores. Its layers get `x` (samples, positions, WIDTH) and the words.
"""

from __future__ import annotations

from typing import Any

from tests.fuzz.layouts.grammar import LAYOUTS, Program
from tests.fuzz.layouts.layers import WIDTH, WORDS, WRITERS, Picks

START = """\
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

SETTINGS = {settings}
STEPS, ROWS, LENGTHS = {steps}, {rows}, {lengths}
CLIP, EVALUATE, CHECKPOINTED, ACCUMULATE = {clip}, {evaluate}, {checkpointed}, {accumulate}
COUNTED = {counted}
EVENTS = {events}


class RMS(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotated(x, places):  # samples, heads, positions, features
    half = x.shape[-1] // 2
    angles = places[:, None] * (0.1 ** torch.arange(half, device=x.device)).to(x.dtype)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

"""


HEADS_OF_MODELS = ("own", "tied", "biased", "mean", "last", "first")
LOSSES = ("mean", "shifted", "ignored", "smoothed", "sums", "squares", "z")
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(parameters{half}, lr=0.1)",
    "momentum": "torch.optim.SGD(parameters{half}, lr=0.1, momentum=0.9)",
    "adam": "torch.optim.AdamW(parameters{half}, lr=0.01, eps=1e-3)",
    "groups": (
        "torch.optim.AdamW(\n"
        "        [{{'params': [each for each in parameters{half} if each.ndim < 2], 'weight_decay': 0.0}},\n"
        "         {{'params': [each for each in parameters{half} if each.ndim > 1], 'weight_decay': 0.1}}],\n"
        "        lr=0.01, eps=1e-3)"
    ),
}
EXTRAS = ("nothing", "hidden", "all hidden", "norms")
"""What a model gives besides its scores, which is added to the loss."""


def model(program: Program) -> str:
    """The classes of the layers, and of the model."""
    parts = [
        WRITERS[layer.kind](f"Layer{number}", Picks(layer.picks))
        for number, layer in enumerate(program.layers)
    ]
    names = ", ".join(f"Block{number}(Layer{number}())" for number in range(len(program.layers)))
    own = "".join(f"class Block{number}(Block):\n    pass\n\n\n" for number in range(len(program.layers)))
    head = HEADS_OF_MODELS[program.head % len(HEADS_OF_MODELS)]
    norm = (f"nn.LayerNorm({WIDTH})", f"RMS({WIDTH})", "nn.Identity()")[program.norms % 3]
    order = program.norms // 3 % 2
    tied = "\n        self.head.weight = self.words.weight" if head == "tied" else ""
    pooled = {"mean": "x.mean(1)", "last": "x[:, -1]", "first": "x[:, 0]"}.get(head, "x")
    inside = "x + layer(norm(x), words)" if order == 0 else "norm(x + layer(x, words))"
    again = " * 2" if program.twice else ""
    frozen = {
        1: "self.words.weight.requires_grad_(False)", 2: "self.blocks[0].requires_grad_(False)",
        3: "self.head.requires_grad_(False)", 4: "self.blocks[-1].layer.requires_grad_(False)",
    }.get(program.frozen, "pass")  # fmt: skip
    extra = {
        "nothing": "0.0", "hidden": "x.square().mean()", "all hidden": "sum(each.square().mean() for each in hidden)",
        "norms": "hidden[0].norm(dim=-1).mean()",
    }[EXTRAS[program.extras % len(EXTRAS)]]  # fmt: skip
    parts += [
        f"""\
class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.norm = layer, {norm}

    def inner(self, x, words):
        layer, norm = self.layer, self.norm
        return {inside}

    def forward(self, x, words):
        if CHECKPOINTED and self.training:
            return checkpoint(self.inner, x, words, use_reentrant=False)
        return self.inner(x, words)


{own}class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding({WORDS}, {WIDTH})
        self.blocks = nn.ModuleList([{names}])
        self.norm, self.head = nn.LayerNorm({WIDTH}), nn.Linear({WIDTH}, {WORDS}, bias={head == "biased"}){tied}
        {frozen}

    def forward(self, words):
        x, hidden = self.words(words), []
        for block in [*self.blocks]{again}:
            x = block(x, words)
            hidden.append(x)
        x = self.norm(x)
        return self.head({pooled}), {extra}
"""
    ]
    return "".join(parts)


def loss(program: Program) -> str:
    """The function of scores and words that gives the loss of each sample: (samples,)."""
    head = HEADS_OF_MODELS[program.head % len(HEADS_OF_MODELS)]
    kind = LOSSES[program.loss % len(LOSSES)]
    if head in ("mean", "last", "first"):
        lines = {
            "squares": ["return scores.square().mean()"],
            "smoothed": ["return F.cross_entropy(scores, words[:, 0], label_smoothing=0.1)"],
            "z": ["return F.cross_entropy(scores, words[:, 0]) + 0.1 * scores.logsumexp(-1).square().mean()"],
        }.get(kind, ["return F.cross_entropy(scores, words[:, 0])"])
    else:
        lines = {
            "mean": ["return F.cross_entropy(scores.flatten(0, 1), words.flatten())"],
            "shifted": [
                f"return F.cross_entropy(scores[:, :-1].reshape(-1, {WORDS}), words[:, 1:].reshape(-1))"
            ],
            "ignored": [
                "labels = words.masked_fill(words == 0, -100)",
                f"return F.cross_entropy(scores.view(-1, {WORDS}), labels.view(-1), reduction='sum') / words.numel()",
            ],
            "smoothed": ["return F.cross_entropy(scores.transpose(1, 2), words, label_smoothing=0.1)"],
            "sums": [
                "each = F.log_softmax(scores, -1).gather(-1, words[..., None]).squeeze(-1)",
                "return -each.sum(1).mean() / 8",
            ],
            "squares": [
                "return (scores - F.one_hot(words, scores.shape[-1]).to(scores.dtype)).square().mean()"
            ],
            "z": [
                "found = F.cross_entropy(scores.flatten(0, 1), words.flatten())",
                "return found + 0.1 * torch.logsumexp(scores, -1).square().mean()",
            ],
        }[kind]
    return "\n".join(["def loss_of(scores, words):", *(f"    {line}" for line in lines)]) + "\n\n\n"


def written(program: Program) -> str:
    """The program's source. Its names are what `beside` runs."""
    settings = settings_of(program, program.layout)
    start = START
    for name, value in (
        ("settings", settings), ("rows", 8), ("lengths", lengths(program)), ("steps", 3 if program.events else 2),
        ("clip", program.clip), ("evaluate", program.evaluate), ("checkpointed", program.checkpointed),
        ("accumulate", program.accumulate), ("counted", counted(program)), ("events", events(program)),
    ):  # fmt: skip
        start = start.replace(f"{{{name}}}", repr(value))
    kinds = [*OPTIMIZERS.values()] * 2
    first = program.optimizer % len(OPTIMIZERS)
    if program.several:
        made = ", ".join(kinds[first + n].format(half=half) for n, half in enumerate(("[::2]", "[1::2]")))
    else:
        made = kinds[first].format(half="")
    ending = f"""\
def optimizers_of(parameters):
    parameters = [*parameters]
    return [{made}]


if __name__ == "__main__":  # weft run -n {program.ranks} this_file.py
    import tests.fuzz.layouts.beside as beside

    beside.main(dict(globals()))
"""
    return start + "\n" + model(program) + "\n\n" + loss(program) + ending


def settings_of(program: Program, layout: int) -> dict[str, Any]:
    """Those of the job in one of the layouts."""
    return {
        "microbatches": 2, **LAYOUTS[layout % len(LAYOUTS)][1],
        "pipeline": ("1f1b", "gpipe", "zb_h1")[program.schedule % 3],
        "verify": "losses" if program.verify else "off",
    }  # fmt: skip


def lengths(program: Program) -> tuple[int, ...]:
    """Positions in the batch of each step."""
    return [(8, 8, 8), (9, 9, 9), (8, 6, 8), (7, 10, 7), (4, 4, 4), (5, 12, 5)][program.length % 6]


def counted(program: Program) -> list[bool] | None:
    """Which quarters of the samples of a copy count in the loss; None: all, without a word of it."""
    return [bool(program.counted >> quarter & 1) for quarter in range(4)] if program.counted else None


def events(program: Program) -> list[tuple[Any, ...]]:
    """What happens before which step, whether one rank alone does it, and what of; a layout instead, if it changes."""
    others = [number for number, (ranks, _) in enumerate(LAYOUTS) if ranks == program.ranks]
    return [
        (
            e.kind,
            e.at,
            e.alone,
            settings_of(program, others[e.pick % len(others)]) if e.kind == "resumed" else e.pick,
        )
        for e in sorted(program.events, key=lambda event: event.at)
    ]
