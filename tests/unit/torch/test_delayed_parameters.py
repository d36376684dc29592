"""Parameters made late, whose values came by unusual ways; the usual ones: `tests/parity`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import weft.torch as weft
from weft.errors import UsageError
from weft.torch.delayed_parameters import materialise
from weft.torch.session.random_streams import Streams

SHAPE = 200, 150


def made(make: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Parameters that are made late, after that."""
    with weft.delay_param_initialization():
        net = nn.ParameterList(nn.Parameter(each) for each in make())
    cpu = torch.device("cpu")
    materialise(net, lambda name: True, cpu, Streams(cpu))
    return [each.detach() for each in net]


def test_pairs_of_real_numbers_are_read_as_complex_ones() -> None:
    def make() -> list[torch.Tensor]:
        pairs = torch.empty(*SHAPE, 2)
        pairs[..., 0].fill_(1.0)
        pairs[..., 1].fill_(2.0)
        return [torch.view_as_complex(pairs), torch.view_as_complex(pairs).t()]

    whole, turned = made(make)
    assert whole.dtype == turned.dtype == torch.complex64 and turned.shape == (150, 200)
    assert (whole == 1 + 2j).all() and (turned == 1 + 2j).all()


def test_memory_that_is_read_as_another_type_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"is torch.float16, and reads the memory of one that is torch.float32"
    ):
        made(lambda: [torch.ones(SHAPE).view(torch.float16)])


def test_they_have_the_default_type_of_the_time_at_which_they_were_built() -> None:
    """As transformers 4 builds a model of another type than single precision."""

    def make() -> list[torch.Tensor]:
        torch.set_default_dtype(torch.float64)
        try:
            return [torch.ones(SHAPE), torch.full(SHAPE, 3).div(2)]
        finally:
            torch.set_default_dtype(torch.float32)

    ones, halves = made(make)
    assert ones.dtype == halves.dtype == torch.float64
    assert (ones == 1).all() and (halves == 1.5).all()


def test_values_that_the_model_asks_for_are_those_that_it_gets() -> None:
    """As GPT-BigCode fills a mask that has memory; and a scale that a weight decides."""
    seen: list[torch.Tensor] = []

    def make() -> list[torch.Tensor]:
        weight = torch.empty(SHAPE).normal_()
        mask = torch.zeros(1, dtype=torch.bool, device="cpu").expand(SHAPE).contiguous()
        mask.copy_(torch.tril(torch.ones(SHAPE)).bool())
        seen[:] = [mask, torch.tensor(weight.abs().max().item()), torch.zeros(1, device="cpu") + weight.sum()]
        return [weight, weight / weight.abs().max().item()]

    weight, scaled = made(make)
    mask, largest, total = seen
    assert torch.equal(mask, torch.ones(SHAPE).tril().bool())
    assert largest == weight.abs().max() and total == weight.sum()
    assert torch.equal(scaled, weight / largest)
