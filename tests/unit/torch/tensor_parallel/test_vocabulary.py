"""Which embeddings and heads are cut by vocabulary, found in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from weft.errors import UsageError
from weft.torch.tensor_parallel import Splits
from weft.torch.tensor_parallel.find import find

WORDS, WIDTH = 51, 8


class Model(nn.Module):
    """An embedding, something, and scores for its words."""

    def __init__(
        self,
        head: Callable[[Model, Tensor], Tensor] | None = None,
        words: int = WORDS,
        **settings: bool | float,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH, **settings)  # type: ignore[arg-type]
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words)
        self.compute = head

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.embedding(words))
        return self.head(x) if self.compute is None else self.compute(self, x)


def found(net: nn.Module, size: int = 2) -> Splits:
    words = torch.tensor([[0, 1, 2]])
    return find(net, lambda: net(words), size)


CUT = {"embedding": "vocabulary", "head": "vocabulary"}


def kinds(splits: Splits) -> dict[str, str]:
    return {name: how.kind for name, how in splits.linears().items()}


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_and_its_head(tied: bool):
    net = Model()
    if tied:
        net.head.weight = net.embedding.weight
    splits = found(net)
    assert kinds(splits) == CUT and not splits.whole
    assert "vocabulary-parallel" in splits.text()
    assert Splits.from_record(splits.to_record()) == splits


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_norm": 1.0}, "max_norm writes into rows as they are looked up"),
        ({"sparse": True}, "its gradient is sparse"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq counts the words"),
    ],
)
def test_embeddings_whose_rows_belong_together(settings: dict[str, bool | float], reason: str):
    splits = found(Model(**settings))
    assert splits.whole == {"embedding": reason} and kinds(splits) == {"head": "vocabulary"}


@pytest.mark.parametrize(
    "head",
    [
        lambda net, x: F.linear(x, net.embedding.weight),
        lambda net, x: x @ net.embedding.weight.t(),
        lambda net, x: net.head(x) + net.embedding.weight.shape[0],
        lambda net, x: F.embedding(torch.tensor([[0]]), net.embedding.weight) + net.head(x).mean(),
    ],
)
def test_a_weight_that_the_model_reads_by_itself(head: Callable[[Model, Tensor], Tensor]):
    assert found(Model(head)).whole["embedding"] == "the model reads its weight by itself"


def test_a_tied_head_goes_as_its_embedding_does():
    net = Model(max_norm=1.0)
    net.head.weight = net.embedding.weight
    splits = found(net)
    assert not splits.regions and splits.whole["head"] == "its weight is that of embedding, too"
    net = Model()
    net.head.weight = net.embedding.weight
    weft.set_tensor_parallelism(net.head, False)
    assert found(net).whole == dict.fromkeys(CUT, "the script wants it whole")


def test_hooks_get_the_whole_so_they_are_no_obstacle():
    net = Model()
    net.embedding.register_forward_hook(lambda *_: None)
    net.head.register_full_backward_hook(lambda *_: None)
    assert kinds(found(net)) == CUT
    net.embedding.forward = lambda words: F.embedding(words, net.embedding.weight)
    assert found(net).whole == {"embedding": "it has hooks, or its forward was replaced"}


def test_few_rows_and_small_tables():
    assert found(Model(words=3), 4).whole["embedding"] == "its 3 rows are fewer than the 4 ranks"
    net = nn.Sequential(Model(), nn.Linear(WORDS, 1000))
    assert not found(net).linears().keys() & {
        "0.embedding",
        "0.head",
    }  # a fiftieth of the model's weights is the least
    assert "0.embedding" not in found(net).whole


def test_an_embedding_of_another_class_may_do_more():
    class Scaled(nn.Embedding):
        def forward(self, words: Tensor) -> Tensor:
            return super().forward(words) * 3.0

    net = Model()
    net.embedding = Scaled(WORDS, WIDTH)
    assert kinds(found(net)) == CUT


def test_a_linear_with_as_many_results_as_no_embedding_has_rows():
    net = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS - 1))
    splits = found(net)
    assert kinds(splits) == {"0": "vocabulary"} and "cannot be divided" not in splits.whole.get("0", "")


def test_modules_that_are_built_whole():
    with weft.tensor_parallelism(enabled=False):
        net = Model()
        with weft.tensor_parallelism():
            net.head = nn.Linear(WIDTH, WORDS)
    net.later = nn.Identity()
    assert kinds(found(net)) == {"head": "vocabulary"}
    assert found(net).whole == {"embedding": "the script wants it whole"}
    weft.set_tensor_parallelism(net)
    assert kinds(found(net)) == CUT  # what is said of a module afterwards wins
    weft.set_tensor_parallelism(net.embedding, False)
    weft.set_tensor_parallelism(net, True)
    assert kinds(found(net)) == {"head": "vocabulary"}  # unless it is said of the inner one
    assert kinds(found(copy.deepcopy(net))) == {"head": "vocabulary"}
    with weft.partition(0), weft.tensor_parallelism(False):
        assert not found(Model()).regions
    assert kinds(found(Model())) == CUT and nn.Module.__init__.__name__ == "__init__"
    with (
        pytest.raises(UsageError, match="enabled is 'memory', it must be True or False"),
        weft.tensor_parallelism(
            "memory"  # type: ignore[arg-type]
        ),
    ):
        pass
