"""Steps of models whose layers see other positions than by attention; started by `test_positions.py`.

    positions.py --folder FOLDER --partitions 2 check...       with context_parallel_degree in WEFT_SET

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity import sequences
from tests.parity.recurrent_models import RECURRENT, WINDOWED
from tests.parity.registry import Checks
from tests.parity.sequences import HEADS, WORDS, Job, Layer, Sent, Words, case_trains
from weft.torch.activation_checkpointing import set_activation_checkpointing
from weft.torch.context_parallel import Sequences

CHECKS = Checks()
CHECKS.given = sequences.CHECKS.given
WIDTH = 12


def padded_both_sides(layer: Mixer, x: Tensor) -> Tensor:
    return layer.conv(x.mT)[..., : x.shape[1]].mT


def padded_in_front(layer: Mixer, x: Tensor) -> Tensor:
    conv = layer.conv
    return F.conv1d(F.pad(x.mT, (3, 0)), conv.weight, conv.bias, groups=WIDTH).mT


def dilated(layer: Mixer, x: Tensor) -> Tensor:
    conv = layer.conv
    return F.conv1d(F.pad(x.mT, (6, 0)), conv.weight, conv.bias, dilation=2, groups=WIDTH).mT


def both_ways(layer: Mixer, x: Tensor) -> Tensor:
    return F.conv1d(x.mT, layer.conv.weight[..., 1:], padding=1, groups=WIDTH).mT


def mixed_channels(layer: Mixer, x: Tensor) -> Tensor:
    return F.conv1d(x.mT, layer.full, padding="same").mT


def shifted_by_pad(layer: Mixer, x: Tensor) -> Tensor:
    return x - F.pad(x, (0, 0, 1, -1)) * layer.places


def shifted_by_cat(layer: Mixer, x: Tensor) -> Tensor:
    head = layer.places.expand(len(x), 2, WIDTH)
    return x * torch.cat([head, x[:, :-2]], 1)


def shifted_to_front(layer: Mixer, x: Tensor) -> Tensor:
    return x + F.pad(x[:, 1:], (0, 0, 0, 1)) * layer.places


def summed(layer: Mixer, x: Tensor) -> Tensor:
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(-1, 1)


FUNCTIONS: dict[str, Callable[[Mixer, Tensor], Tensor]] = {
    function.__name__: function
    for function in (
        padded_both_sides, padded_in_front, dilated, both_ways, mixed_channels, shifted_by_pad, shifted_by_cat,
        shifted_to_front, summed,
    )
}  # fmt: skip


class Mixer(nn.Module):
    """A layer that sees other positions in one way, and has a linear on both sides."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.full, self.places = (
            nn.Parameter(torch.randn(WIDTH, WIDTH, 3) * 0.3),
            nn.Parameter(torch.randn(WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed = FUNCTIONS[self.kind](self, self.inner(self.norm(x)))
        return x + self.outer(F.silu(mixed))


class Mixed(nn.Module):
    """Words, layers that see other positions, with causal attention between them if ``attends``, and scores."""

    def __init__(self, *kinds: str, attends: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        layers: list[nn.Module] = [Mixer(kind) for kind in kinds]
        self.layers = nn.ModuleList([*layers, Layer(0.0)] if attends else layers)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Recurrent(nn.Module):
    """A recurrence of PyTorch's with two layers, between linears; ``time_first``: positions are the first dim."""

    def __init__(self, kind: type[nn.RNNBase], time_first: bool = False) -> None:
        super().__init__()
        self.norm, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rnn = kind(WIDTH, WIDTH, num_layers=2, batch_first=not time_first)

    def forward(self, x: Tensor) -> Tensor:
        mixed, last = self.rnn(self.norm(x))
        state = last[0] if isinstance(last, tuple) else last
        return x + self.outer(mixed) * state[-1].unsqueeze(int(self.rnn.batch_first))


class Sentences(nn.Module):
    """Words, recurrences, and scores. ``time_first``: layers get positions first; ``attends``: the last attends."""

    def __init__(self, kind: type[nn.RNNBase], time_first: bool = False, attends: bool = False) -> None:
        super().__init__()
        self.words, self.head, self.time_first = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, WORDS),
            time_first,
        )
        layers: list[nn.Module] = [Recurrent(kind, time_first) for _ in range(2)]
        self.layers = nn.ModuleList([*layers, Layer(0.0)] if attends else layers)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words.T if self.time_first else words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.transpose(0, 1) if self.time_first else x)


def trained(net: Callable[[], nn.Module], lengths: tuple[int, ...] = (24, 23, 16)) -> Sequences:
    """The layout found for a model that trains as in one process, on batches of unlike lengths."""
    job = Job(net=net, lengths=lengths, verify="gradients")
    job.trains_as_one_process()
    return Sequences.from_record(job.model.plan.sequences)


@CHECKS.of_each(*FUNCTIONS)
def positions_beside_ones_own(kind: str) -> None:
    found = trained(partial(Mixed, kind, kind))
    assert {"layers.0", "layers.1"} <= found.regions.keys(), found.text()


RECURRENCES: dict[str, type[nn.RNNBase]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


@CHECKS.of_each(*RECURRENCES)
def states_go_from_rank_to_rank(kind: str) -> None:
    for time_first in (False, True):
        found = trained(partial(Sentences, RECURRENCES[kind], time_first))
        assert {"layers.0", "layers.1"} <= found.regions.keys(), found.text()
    beside = trained(partial(Sentences, RECURRENCES[kind], attends=True))
    assert "layers.2" in beside.regions and "goes from one position to the next" in beside.order, (
        beside.text()
    )


@CHECKS.check
def beside_causal_attention_blocks_are_from_both_ends() -> None:
    found = trained(partial(Mixed, *FUNCTIONS, attends=True), (48, 47, 72))
    assert {f"layers.{n}" for n in range(len(FUNCTIONS) + 1)} <= found.regions.keys(), found.text()
    assert found.balanced, found.text()


@CHECKS.check
def blocks_may_be_smaller_than_what_is_seen() -> None:
    trained(partial(Mixed, "dilated", "shifted_by_cat"), (24, 8, 9, 10, 11))


class InWindows(Layer):
    """Attention in a sliding window, which is as long as the batch's first word says."""

    window: int
    numbers = False

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(samples, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        at = torch.arange(length)
        mask = (at <= at[:, None]) & (at > at[:, None] - self.window)
        if self.numbers:
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        mixed = F.scaled_dot_product_attention(q, k, v, mask)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Windows(Words):
    """Layers with attention in windows: one that is causal besides, if ``balanced``."""

    def __init__(self, balanced: bool = False) -> None:
        super().__init__(0.0, places=96)
        self.layers = nn.ModuleList(InWindows(0.0) for _ in range(3))
        self.layers[1].numbers = True
        if balanced:
            self.layers.append(Layer(0.0))

    def forward(self, words: Tensor) -> Tensor:
        for layer in self.layers:
            layer.window = {96: 9, 95: 5, 64: 60}[words.shape[1]]
        return super().forward(words)


@CHECKS.check
def windows_get_the_keys_that_they_show() -> None:
    """Also where a later mask shows more."""
    sent = {}
    for balanced in (False, True):
        job = Job(net=partial(Windows, balanced), lengths=(96, 95, 64), verify="gradients")
        job.trains_as_one_process()
        assert Sequences.from_record(job.model.plan.sequences).balanced == balanced
    job = Job(net=Windows, lengths=(96, 64), verify="off", context_parallel_attention="all_gather")
    job.train(1)
    for length in (96, 64):
        job.lengths = (length,)
        with Sent() as counted:
            job.train(1)
        sent[length] = counted.bytes["reduce_scatter"]
    print(f"gradients of keys and values: {sent} bytes", flush=True)
    assert sent[96] < 0.6 * sent[64]


@CHECKS.check
def layers_may_be_checkpointed() -> None:
    nets: dict[Any, tuple[int, ...]] = {
        partial(Mixed, *FUNCTIONS, attends=True): (48, 47),
        partial(Sentences, nn.LSTM): (24, 23),
        partial(Windows, True): (96, 64),
    }
    for net, lengths in nets.items():
        job = Job(net=net, lengths=lengths)
        for layer in job.model.module.layers:
            set_activation_checkpointing(layer)
        job.trains_as_one_process()
        assert "layers.0" in job.regions()


@CHECKS.of_each(*RECURRENT, *WINDOWED)
def a_model_trains(name: str) -> None:
    model, layers = case_trains({**RECURRENT, **WINDOWED}[name])
    if CHECKS.given.partitions == 1:
        assert len(layers) >= 2, Sequences.from_record(model.plan.sequences).text()


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
