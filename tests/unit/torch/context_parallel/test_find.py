"""Which modules can compute on parts of sequences, found in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.torch.networks import CPU
from weft.errors import FormatError
from weft.torch.context_parallel import Sequences
from weft.torch.context_parallel.find import find
from weft.torch.session.random_streams import Streams
from weft.torch.trace.dry_run import DryRun


class Layer(nn.Module):
    """A linear, something on positions, and causal attention."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.qkv, self.out, self.between = nn.Linear(8, 24), nn.Linear(8, 8), between

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.between(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Holder(nn.Module):
    """A layer with two modules, of which the second cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), nn.GRU(8, 4, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))[0]
        return result


def found(*layers: nn.Module, size: int = 2, x: Tensor | None = None) -> Sequences:
    net = nn.Sequential(*layers)
    given = torch.randn(3, 6, 8) if x is None else x
    return find(net, lambda: net(given).sum(), size)


def test_layers_are_cut_along_their_positions():
    notes = {"0": "kept sharded", "1": "kept sharded"}
    assert found(Layer(), Layer()) == Sequences(2, {"0": 1, "1": 1}, kept=("0", "1"), notes=notes)


def test_batch_may_come_second():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)
    assert found(layer).regions == {"0": 0}


def test_layers_of_another_kind_have_their_own_fate():
    class Flipped(Layer):
        """Looks at other positions."""

    splits = found(Flipped(lambda x: x.flip(1)), Layer(), Layer())
    assert splits.regions == {"1": 1, "2": 1}
    assert splits.whole == {"0": "flip takes whole sequences"}


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda x: x.flip(1), "flip takes whole sequences"),
        (lambda x: x.cumprod(1), "cumprod takes whole sequences"),
        (lambda x: x - x.mean(1, keepdim=True), "mean takes whole sequences"),
        (lambda x: x.softmax(1), "softmax takes whole sequences"),
        (lambda x: F.pad(x[:, :-1].sin(), (0, 0, 1, 0)), "sin takes some positions"),
        (lambda x: x[:, ::2].repeat(1, 2, 1), "getitem takes some positions"),
        (lambda x: F.pad(x[:, 1:], (0, 0, 1, 0)), "pad pads a part of a sequence"),
        (
            lambda x: F.conv1d(x.mT, torch.ones(8, 8, 2), stride=2).mT.repeat(1, 2, 1),
            "conv1d takes some positions",
        ),
        (lambda x: F.conv1d(x.mT, torch.ones(8, 8, 9), padding=8)[..., :6].mT, "getitem sees more positions"),
        (
            lambda x: F.batch_norm(x.flatten(0, 1), None, None, training=True).view(x.shape),
            "batch_norm keeps",
        ),
        (lambda x: torch.from_numpy(x.detach().numpy()), "numpy"),
    ],
)
def test_what_looks_at_other_positions_is_left_whole(between: Callable[[Tensor], Tensor], reason: str):
    splits = found(Layer(between), Layer())
    assert not splits.regions and splits.whole["0"].startswith(reason), splits.whole


@pytest.mark.parametrize(
    "between",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: x * torch.linspace(0, 1, x.shape[1])[:, None],
        lambda x: x.masked_fill(torch.ones(x.shape[1], 1).tril() == 0, 0.0),
        lambda x: x.pow(2).mean(-1, keepdim=True).rsqrt() * x,
        lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
        lambda x: x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2).transpose(1, 2).flatten(2),
        lambda x: x.cumsum(1),
        lambda x: x + F.pad(x[:, :-1], (0, 0, 1, 0)),
        lambda x: x + F.pad(x, (0, 0, 2, -2)),
        lambda x: torch.cat([torch.zeros(3, 2, 8), x.narrow(1, 0, 4)], 1),
        lambda x: F.conv1d(x.mT, torch.ones(8, 8, 4), padding=3)[..., :6].mT,
        lambda x: F.conv1d(x.mT, torch.ones(8, 1, 3), padding="same", groups=8).mT,
    ],
)
def test_what_acts_on_each_position_is_cut(between: Callable[[Tensor], Tensor]):
    splits = found(Layer(between))
    assert splits.regions == {"0": 1}, splits.whole


def test_modules_inside_of_one_that_cannot_are_tried():
    splits = found(Holder(), Holder())
    assert splits.regions == {"0.first": 1, "1.first": 1}
    assert splits.whole["0"].startswith("gru goes along positions both ways")


def test_few_positions_and_no_positions():
    assert (
        found(Layer(), size=4, x=torch.randn(3, 5, 8)).whole["0"]
        == "it gets 5 positions, too few for 4 ranks"
    )
    assert found(Layer(), size=4, x=torch.randn(3, 7, 8)).regions  # 2, 2, 2 and 1
    assert "no tensor of samples" in found(nn.Linear(8, 8), x=torch.randn(3, 8)).whole["0"]
    assert found(nn.LayerNorm(8)).whole["0"] == "it has no products of matrices"


def test_a_tensor_that_is_kept_somewhere_is_a_reason():
    class Keeping(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    layer = Keeping()
    assert found(layer).whole["0"] == "it keeps a tensor in an attribute"


def test_the_model_is_as_before():
    net = nn.Sequential(Layer(lambda x: F.dropout(x, 0.5)), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    with DryRun([net], Streams(CPU)).forward(
        lambda: net[1](net[0](torch.ones(2, 4, 8)).flatten(0, 1))
    ) as run:
        find(net, run, 2)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any("forward" in vars(module) for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_what_the_model_raises_comes_out():
    def fail(x: Tensor) -> Tensor:
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        found(Layer(fail))


def test_records_and_texts():
    splits = Sequences(2, {"h.0": 1, "h.1": 1}, {"wte": "it gets no sequences"})
    assert Sequences.from_record(splits.to_record()) == splits
    assert splits.text().splitlines()[1:] == [
        "  h.*    2  cut along dim 1",
        "  wte    1  whole: it gets no sequences",
    ]
    with pytest.raises(FormatError, match="no record of what shares sequences"):
        Sequences.from_record({"size": 2})


def test_writing_into_what_it_gets_is_a_reason():
    class Writing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x += 1.0  # which the caller sees
            return super().forward(x)

    class Careful(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2.0
            x += 1.0
            return super().forward(x)

    net = nn.Sequential(Writing())
    given = torch.randn(3, 6, 8)
    whole = find(net, lambda: net(given.clone()).sum(), 2).whole
    assert whole == {"0": "it writes into what it gets"}
    assert found(Careful()).regions == {"0": 1}


def test_no_graph_is_left():
    net = nn.Sequential(Layer())
    find(net, lambda: net(torch.randn(3, 8, 8)).sum(), 2)
    for parameter in net.parameters():
        parameter.data = parameter.data[:2].clone()
        (parameter * 1).sum().backward()  # a node of an older graph would know another shape


def test_a_mask_without_values_is_no_window():
    class Masked(Layer):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            q, k, v = self.qkv(x).chunk(3, -1)
            return x + self.out(F.scaled_dot_product_attention(q, k, v, mask))

    net = nn.Sequential(Masked().to("meta"))
    assert find(net, lambda: net(torch.randn(3, 6, 8, device="meta")).sum(), 2).regions == {"0": 1}
