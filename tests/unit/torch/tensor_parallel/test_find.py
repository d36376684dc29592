"""What can be split, found in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.tensor_parallel_models import OWN
from tests.unit.torch.networks import CPU
from weft.torch.session.random_streams import Streams
from weft.torch.tensor_parallel import Splits
from weft.torch.tensor_parallel.find import find
from weft.torch.trace.dry_run import DryRun


class Block(nn.Module):
    """Two linears with something between, and something after."""

    def __init__(
        self, between: Callable[[Tensor], Tensor] = F.gelu, after: Callable[[Tensor], Tensor] = torch.sum
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.between, self.after = between, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.down(self.between(self.up(x))))


def found(net: nn.Module, size: int = 2, x: Tensor | None = None) -> Splits:
    given = torch.randn(4, 6, 8) if x is None else x
    return find(net, lambda: net(given), size)


def kinds(splits: Splits) -> dict[str, str]:
    return {name: how.kind for name, how in splits.linears().items()}


SPLIT = {"up": "column", "down": "row"}


def test_two_linears_are_a_pair():
    splits = found(Block())
    assert kinds(splits) == SPLIT and not splits.whole
    assert [region.name for region in splits.regions] == [""]


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda x: F.layer_norm(x, (16,)), "layer_norm takes the whole"),
        (lambda x: x.softmax(-1), "softmax takes the whole"),
        (lambda x: x * x.pow(2).mean(-1, keepdim=True), "mean takes the whole"),
        (lambda x: x.flip(-1), "flip takes the whole"),
        (lambda x: torch.zeros(4, 6, 16).copy_(x), "copy writes its parts into a full tensor"),
        (lambda x: torch.from_numpy(x.detach().numpy()), "numpy takes the whole"),
    ],
)
def test_what_takes_the_whole_is_left_whole(between: Callable[[Tensor], Tensor], reason: str):
    splits = found(Block(between))
    assert reason in splits.whole["up"], splits.whole
    assert "up" not in splits.linears()


def filled_in_two(x: Tensor) -> Tensor:
    """As keys of heads are made of two kinds."""
    heads = x.view(4, 6, 4, 4).transpose(1, 2)
    made = heads.new_empty(*heads.shape[:-1], 4)
    made[..., :3].copy_(heads[..., :3])
    made[..., 3:].copy_(torch.ones(4, 1, 6, 1).expand(-1, 4, -1, -1))
    return made.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: F.dropout(F.gelu(x), 0.5, True),
        lambda x: x.view(4, 6, 4, 4).softmax(-1).flatten(2),
        lambda x: (x * 2 + torch.ones(16)).clamp(0.0),
        lambda x: x.view(4, 6, 2, 8).transpose(1, 2).contiguous().transpose(1, 2).reshape(4, 6, 16),
        lambda x: x.masked_fill(torch.rand(4, 6, 1) > 0.5, 0.0),
        lambda x: x.float().to(torch.float64).to(torch.float32),
        lambda x: x.new_zeros(4, 6, 16).add_(x),
        lambda x: x.new_empty(x.shape).copy_(x),
        filled_in_two,
    ],
)
def test_what_parts_can_do_is_split(between: Callable[[Tensor], Tensor]):
    assert kinds(found(Block(between))) == SPLIT


def test_gradients_are_tried_as_well():
    """`cumsum` along another dimension works in parts; a function that fails backwards does not."""

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("there is no way back")

    assert kinds(found(Block(lambda x: x.cumsum(1)))) == SPLIT
    assert "there is no way back" in found(Block(Forward.apply)).whole["up"]


def test_results_that_lead_nowhere():
    splits = found(Block(after=lambda x: F.layer_norm(x, (8,)).sum()))
    assert kinds(splits) == SPLIT
    alone = found(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)))
    assert alone.whole == {"0": "layer_norm takes the whole"} and not alone.regions
    assert found(nn.Linear(8, 16)).whole == {"": "its results leave the model"}


def test_sizes_that_cannot_be_divided():
    assert found(Block(), 3).whole["up"] == "its 16 results cannot be divided by 3"
    case = OWN["three heads"]
    net, batch = case.build(), case.batch(0)
    assert find(net, lambda: net(**batch), 2).whole["net.layers.0.qkv"] == (
        "its results are 3 x 3 x 10, and 3 cannot be divided by 2"
    )
    assert find(net, lambda: net(**batch), 3).linears()["net.layers.0.qkv"].blocks == (30, 30, 30)


def test_shared_hooked_and_replaced_linears_stay_whole():
    net = nn.Sequential(*(Block(after=lambda x: x) for _ in range(5)))
    net[1].down.weight = nn.Parameter(net[0].down.weight.detach())
    net[1].up.weight = net[0].up.weight
    net[2].up.register_forward_hook(lambda *_: None)
    net[3].up.forward = lambda x: F.linear(x, net[3].up.weight)
    nn.utils.parametrizations.weight_norm(net[4].up)
    whole = find(net, lambda: net(torch.randn(4, 6, 8)).sum(), 2).whole
    assert (
        whole["0.up"] == "its weight is that of 1.up, too"
        and whole["1.up"] == "its weight is that of 0.up, too"
    )
    assert whole["2.up"] == whole["3.up"] == "it has hooks, or its forward was replaced"
    assert "ParametrizedLinear" in whole["4.up"]


def test_layers_that_are_alike_go_alike():
    layers = nn.ModuleList(Block(F.gelu if n else lambda x: x.softmax(-1)) for n in range(3))
    splits = find(layers, lambda: [layer(torch.randn(4, 6, 8)) for layer in layers], 2)
    assert {name: splits.whole[name] for name in ("0.up", "1.up", "2.up")} == dict.fromkeys(
        ("0.up", "1.up", "2.up"), "softmax takes the whole"
    )


def test_the_model_is_as_before():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Block())
    x = torch.randn(4, 8)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    with DryRun([net], Streams(CPU)).forward(lambda: net(torch.rand(4, 8))) as run:
        find(net, run, 2)
    assert torch.equal(state, torch.get_rng_state()) and not dist.is_initialized()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all("forward" not in vars(module) for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())
    net(x)


def test_the_models_own_error_is_raised():
    def fail() -> None:
        raise ValueError("the model's own")

    net = Block()
    with pytest.raises(ValueError, match="the model's own"):
        find(net, fail, 2)
    assert all("forward" not in vars(module) for module in net.modules())


def test_a_model_that_fails_with_parts_alone():
    def check(x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise TypeError("plain tensors only")
        return x

    assert "plain tensors only" in found(Block(check)).whole["up"]


def test_a_model_without_data():
    net = Block().to("meta")
    assert kinds(find(net, lambda: net(torch.empty(4, 6, 8, device="meta")), 2)) == SPLIT


def test_one_rank_splits_nothing():
    assert found(Block(), 1) == Splits(1)
