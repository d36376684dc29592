"""What a script says of modules, and numbers that the ranks do not divide: each with a sentence that names both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft.torch as weft
from tests.parity.tensor_parallel_models import WIDTH, FewKeys, Fused, Mixture
from weft.errors import UsageError
from weft.torch.tensor_parallel import Splits, refuse_whole
from weft.torch.tensor_parallel.find import find

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
    assert splits.mixtures[""] == "not expert-parallel: the script wants it whole"
    assert splits.whole["experts.2.0"] == splits.whole["experts.2.2"] == WANTED
    assert {name.split(".")[1] for name in splits.linears()} == {"0", "1", "3"}


@pytest.mark.parametrize("enabled", ["columns", None, 1])
def test_other_words_are_refused(enabled: Any) -> None:
    net = pair()
    with pytest.raises(UsageError) as error:
        weft.set_tensor_parallelism(net, enabled)
    assert (
        str(error.value) == f'enabled is {enabled!r}, it must be True, False, "column", "row" or "vocabulary"'
    )
    with pytest.raises(UsageError) as error, weft.tensor_parallelism(enabled):
        raise AssertionError("not reached")
    assert str(error.value) == f"enabled is {enabled!r}, it must be True or False"
    assert found(net).linears(), "nothing was marked"


BY_HAND = "column-parallel; as the script says"


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        # a pair, and one of which one linear is found
        (("column", "row"), (BY_HAND, "row-parallel; as the script says")),
        (("column", True), (BY_HAND, "row-parallel")),
        # alone
        (("column", False), (f"{BY_HAND}, all-gathered", f"whole: {WANTED}")),
        (("column", "column"), (f"{BY_HAND}, all-gathered",) * 2),
        ((False, "row"), (f"whole: {WANTED}", "row-parallel; as the script says")),
        (("row", "row"), ("row-parallel; as the script says",) * 2),
        (("row", "column"), ("row-parallel; as the script says", f"{BY_HAND}, all-gathered")),
        (("vocabulary", False), ("vocabulary-parallel; as the script says, logits all-gathered for linear",
                                 f"whole: {WANTED}")),
    ],
)  # fmt: skip
def test_the_script_says_how(words: tuple[Any, Any], lines: tuple[str, str]) -> None:
    net = pair()
    for name, word in zip(("0", "2"), words, strict=True):
        weft.set_tensor_parallelism(net.get_submodule(name), word)
    splits = found(net)
    assert (line(splits, "0"), line(splits, "2")) == lines
    alone = [region.name for region in splits.regions if region.name]
    assert alone == [name for name, word in zip(("0", "2"), words, strict=True) if word] or not alone


def test_layers_that_are_alike_follow_their_own_words() -> None:
    net = nn.Sequential(pair(), pair(), pair())
    for name, word in (("0.0", "column"), ("0.2", False), ("1.0", "column"), ("1.2", "row")):
        weft.set_tensor_parallelism(net.get_submodule(name), word)
    assert [region.name for region in found(net).regions] == ["0.0", "1", "2"]


def test_uncalled_linears_are_cut_alone() -> None:
    net = pair()
    net.add_module("spare", nn.Linear(WIDTH, WIDTH))
    weft.set_tensor_parallelism(net.get_submodule("spare"), "row")
    splits = find(net, lambda: net[2](net[1](net[0](X))), 2)
    assert line(splits, "spare") == "row-parallel; as the script says"


def test_words_are_cut_of_any_size() -> None:
    net = nn.Sequential(nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 60 * WIDTH), nn.Linear(60 * WIDTH, WIDTH))
    ids = torch.arange(6)[None]
    assert "0" not in find(net, lambda: net(ids), 2).linears()
    weft.set_tensor_parallelism(net[0], "vocabulary")
    assert line(find(net, lambda: net(ids), 2), "0") == "vocabulary-parallel; as the script says"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("column", "its 63 results cannot be divided by 2"),
        ("row", "its 33 inputs cannot be divided by 2"),
        ("vocabulary", "it has hooks, or its forward was replaced"),
    ],
)
def test_what_cannot_be_is_one_error(word: str, told: str) -> None:
    net = nn.Sequential(nn.Linear(33, 63), nn.Linear(63, 33))
    net[0].forward = net[0].forward  # type: ignore[method-assign]
    if word != "vocabulary":
        del net[0].__dict__["forward"]
    weft.set_tensor_parallelism(net[0], word)
    with pytest.raises(UsageError) as error:
        find(net, lambda: net(torch.randn(2, 33)), 2)
    assert str(error.value) == (
        f'not all modules can be cut as weft.set_tensor_parallelism says: 0 is set to "{word}", and {told}. Write '
        "True to let weft decide, or False to keep it whole"
    )


def test_all_that_cannot_be_is_named() -> None:
    net = nn.Sequential(nn.Linear(33, 63), nn.Linear(63, 33))
    weft.set_tensor_parallelism(net[0], "column")
    weft.set_tensor_parallelism(net[1], "row")
    with pytest.raises(
        UsageError, match=r'0 is set to "column", and its 63 .*; 1 is set to "row", and its 63 inputs'
    ):
        find(net, lambda: net(torch.randn(2, 33)), 2)


def test_what_another_reason_keeps_whole_is_refused_too() -> None:
    net = pair()
    weft.set_tensor_parallelism(net[0], "column")
    refuse_whole(net, {"2": "too far apart"})
    with pytest.raises(UsageError, match='0 is set to "column", and too far apart. Write True to'):
        refuse_whole(net, {"0": "too far apart", "2": "too far apart"})


def test_shared_weights_are_cut_by_rows_only() -> None:
    net = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8, bias=False))
    net[1].weight = net[0].weight
    ids = torch.arange(6)[None]
    weft.set_tensor_parallelism(net[1], "column")
    with pytest.raises(UsageError, match=r'1 is set to "column", and its weight is that of 0, too'):
        find(net, lambda: net(ids), 2)
    weft.set_tensor_parallelism(net[1], "vocabulary")
    assert find(net, lambda: net(ids), 2).linears().keys() == {"0", "1"}


@pytest.mark.parametrize(
    ("module", "word", "told"),
    [
        (nn.Sequential(nn.Linear(2, 2)), "column", "takes a torch.nn.Linear, not a Sequential"),
        (nn.Embedding(2, 2), "row", "takes a torch.nn.Linear, not a Embedding"),
        (nn.LayerNorm(2), "vocabulary", "takes a torch.nn.Linear or an embedding, not a LayerNorm"),
    ],
)
def test_other_modules_cannot_be_told_how(module: nn.Module, word: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        weft.set_tensor_parallelism(module, word)
    assert told in str(error.value)


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
