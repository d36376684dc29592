"""What a script says of modules, and numbers that the ranks do not divide: each with a sentence that names both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft.torch as weft
from tests.parity.tensor_parallel_models import WIDTH, FewKeys, Fused, Mixture
from weft.errors import UsageError
from weft.torch.tensor_parallel import Splits, find

X = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(0))


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def found(net: nn.Module, size: int = 2) -> Splits:
    return find(net, lambda: net(X), size)


def line(splits: Splits, name: str) -> str:
    """What the table says of a module."""
    (row,) = (row for row in splits.text().splitlines() if row.split()[0] == name)
    return " ".join(row.split()[2:])


WANTED = "the script wants it whole"


def test_one_linear_is_kept_whole() -> None:
    for kept, other, reason in (
        ("0", "2", "its results leave the model"),
        ("2", "0", "linear takes the whole"),
    ):
        net = pair()
        weft.set_tensor_parallelism(net.get_submodule(kept), False)
        splits = found(net)
        assert not splits.regions and splits.whole[kept] == WANTED
        assert splits.whole[other] == reason


def test_all_in_a_module_is_kept_whole_but_what_was_set_on_its_own() -> None:
    net = nn.Sequential(pair(), pair())
    weft.set_tensor_parallelism(net[1], True)
    weft.set_tensor_parallelism(net, False)
    splits = found(net)
    assert splits.linears().keys() == {"1.0", "1.2"}
    assert splits.whole == {"0.0": WANTED, "0.2": WANTED}


def test_a_context_around_the_building() -> None:
    with weft.tensor_parallelism(enabled=False):
        first = pair()
        with weft.tensor_parallelism():
            second = pair()
        third = pair()
    weft.set_tensor_parallelism(third)
    splits = found(nn.Sequential(first, second, third, pair()))
    assert {name[0] for name in splits.linears()} == {"1", "2", "3"}
    assert splits.whole == {"0.0": WANTED, "0.2": WANTED}


def test_one_expert_is_kept_whole() -> None:
    net = Mixture()
    weft.set_tensor_parallelism(net.get_submodule("experts.2"), False)
    splits = found(net)
    assert splits.mixtures[""] == "not split by its experts: the script wants it whole"
    assert splits.whole["experts.2.0"] == splits.whole["experts.2.2"] == WANTED
    assert {name.split(".")[1] for name in splits.linears()} == {"0", "1", "3"}


@pytest.mark.parametrize("enabled", ["column", "row", "vocabulary", None, 1])
def test_how_is_not_for_the_script_to_say(enabled: Any) -> None:
    told = f"enabled is {enabled!r}, it must be True or False: how weights are cut follows from what a model computes"
    net = pair()
    with pytest.raises(UsageError) as error:
        weft.set_tensor_parallelism(net, enabled)
    assert str(error.value) == told
    with pytest.raises(UsageError) as error, weft.tensor_parallelism(enabled):
        raise AssertionError("not reached")
    assert str(error.value) == told
    assert found(net).linears(), "nothing was marked"


@pytest.mark.parametrize(
    ("net", "size", "name", "told"),
    [
        (nn.Sequential(nn.Linear(WIDTH, 63), nn.Linear(63, WIDTH)), 2, "0", "its 63 results cannot be divided by 2"),
        (Fused(2), 4, "qkv", "its results are 3 x 2 x 16, and neither 3 nor 2 can be divided by 4"),
        (FewKeys(1), 2, "k", "scaled_dot_product_attention has 1 heads of keys, which cannot be divided by 2"),
        (nn.TransformerEncoderLayer(WIDTH, 2, 64), 4, "self_attn", "its 2 heads cannot be divided by 4"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_divided(net: nn.Module, size: int, name: str, told: str) -> None:
    assert line(found(net, size), name) == f"whole: {told}"
