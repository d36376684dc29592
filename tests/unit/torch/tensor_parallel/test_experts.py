"""Modules of experts are split by what their parts add up to, whichever way they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.tensor_parallel_models import WIDTH, Routed, Stacked
from tests.unit.torch.networks import CPU
from weft.torch.session.random_streams import Streams
from weft.torch.tensor_parallel import Splits
from weft.torch.tensor_parallel.experts.sharded_experts import run
from weft.torch.tensor_parallel.find import find
from weft.torch.trace.dry_run import DryRun

X = torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(0))


def found(net: nn.Module, size: int = 2, x: Tensor = X) -> Splits:
    return find(net, lambda: net(x).sum(), size)


def why_whole(experts: nn.Module, size: int = 2, share: str = "expert_tensor_parallel") -> str:
    net = Routed(experts)
    splits = find(net, lambda: net(X).sum(), size, experts=share)
    assert not splits.linears()
    return splits.whole["experts"]


@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_those_of_transformers(name: str, how: str) -> None:
    import transformers

    inner = 25 if (name, how) == ("Mixtral", "eager") else 24  # ranks may have uneven parts

    config: Any = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=4,
        head_dim=8, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    net: Any = getattr(transformers, f"{name}ForCausalLM")(config)
    net.set_experts_implementation(how)
    ids = torch.arange(40).view(4, 10)
    splits = find(net, lambda: net(input_ids=ids, labels=ids, use_cache=False).loss, 2)
    experts = splits.linears()["model.layers.0.mlp.experts"]
    places = {part.name: part.dim for part in experts.parts}
    if name == "Mixtral":
        assert places == {"gate_up_proj": 1, "down_proj": 2}
        assert experts.parts[0].blocks == (inner, inner), "gates and values behind each other"
    else:
        assert places == {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1, "down_proj_bias": -1}
    assert "model.layers.*.mlp.experts" in splits.text() and "expert tensor parallel" in splits.text()
    assert Splits.from_record(splits.to_record()) == splits


def test_sizes_that_do_not_divide() -> None:
    """Gates and values beside each other: a rank cannot have seven of twenty."""
    parts = found(Routed(Stacked(inner=10))).linears()["experts"].parts
    assert {part.name: part.dim for part in parts} == {"up": 2, "down": 1, "up_bias": 1, "down_bias": -1}
    assert why_whole(Stacked(inner=10), 3) == (
        "its parts on 3 ranks do not add up to what it computes, and 10 and 20 cannot be divided by 3"
    )


def test_more_ranks_than_an_expert_has_rows() -> None:
    assert why_whole(Stacked(inner=1, width=WIDTH), 64) == (
        f"its experts' matrices have {WIDTH} rows and columns at most, fewer than the 64 ranks"
    )


def test_without_data() -> None:
    with torch.device("meta"):
        net, x = Routed(Stacked(how="all")), torch.empty(6, 5, WIDTH)
    assert "experts" in found(net, x=x).linears()
    assert all(value.is_meta for value in net.parameters())


def test_what_does_not_add_up() -> None:
    told = "its parts on 2 ranks do not add up to what it computes"
    assert why_whole(Stacked(how="spoilt")) == told
    splits = found(Routed(Stacked(how="spoilt")))
    assert splits.linears()["experts"].by_rank()
    assert f"expert-parallel; not expert tensor parallel: {told}" in splits.text()


class Limited(Stacked):
    def forward(self, x: Tensor, which: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, which, weights).clamp(-50, 50)


@pytest.mark.parametrize("share", ["expert_tensor_parallel", "expert_parallel"])
def test_a_limit_that_only_large_sums_reach(share: str) -> None:
    assert "do not add up" in why_whole(Limited(), share=share)


class Odd(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(3, 2, 2))


class Normed(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)


class Written(Stacked):
    def forward(self, x: Tensor, which: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x.mul_(2), which, weights)


class Rewritten(Stacked):
    def forward(self, x: Tensor, which: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.mul_(1)
        return super().forward(x, which, weights)


class Frozen(Stacked):
    """With weights of whole numbers, as quantised ones are."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(4, WIDTH, 40, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor, which: Tensor, weights: Tensor) -> Tensor:
        return x * (self.up.float().mean() + self.down.mean() * weights.mean())


def test_what_is_not_tried() -> None:
    assert why_whole(Odd()).endswith(
        f"experts: up [4, {WIDTH}, 40] and down [4, 20, {WIDTH}] and other [3, 2, 2]"
    )
    assert why_whole(Normed()) == "it has modules with weights inside"
    assert "writes into its inputs" in why_whole(Written())
    assert "writes into its inputs or weights" in why_whole(Rewritten())
    assert why_whole(Frozen()) == "its weights are no plain floating-point numbers"
    shared = Stacked()
    net = nn.Sequential(Routed(shared), Routed(Stacked()))
    net[1].experts.up = shared.up
    assert found(net).whole["0.experts"] == "it shares parameters with another module"


def test_the_model_stays_as_it_is() -> None:
    net = Routed(Stacked())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    with DryRun([net], Streams(CPU)).forward(lambda: None):
        assert found(net).linears()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


class Counting(Stacked):
    """Tells how many rows were large."""

    def forward(self, x: Tensor, which: Tensor, weights: Tensor) -> Any:  # type: ignore[override]
        result = super().forward(x, which, weights)
        return result, (result.norm(dim=-1) > 1).sum()


class Told(Routed):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, which = self.router(flat).softmax(-1).topk(2, -1)
        result, count = self.experts(flat, which, weights=weights)
        return (result * count).view(x.shape)


def test_whole_numbers_that_ranks_would_not_agree_on() -> None:
    splits = find(net := Told(Counting()), lambda: net(X).sum(), 2, experts="expert_tensor_parallel")
    assert splits.whole["experts"].startswith("its parts on 2 ranks do not add up")


def test_what_is_kept_in_an_attribute() -> None:
    net = Routed(Stacked())
    splits = find(net, lambda: net(X).sum(), 2, leaking={"experts"})
    assert splits.whole["experts"] == "tensors get out of it by another way than its result"


def test_what_is_written_into_attributes_stays() -> None:
    class Called(Stacked):
        calls = 0

        def forward(self, *given: Any, **named: Any) -> Tensor:
            self.calls += 1
            return super().forward(*given, **named)

    module = Called()
    for number in range(2):
        run(module, dict(module.named_parameters()), (X[0], torch.zeros(5, 1).long(), torch.ones(5, 1)), {})
        assert module.calls == number + 1


def test_wishes() -> None:
    from weft.torch import set_tensor_parallelism

    net = Routed(Stacked())
    set_tensor_parallelism(net.experts, False)
    assert found(net).whole["experts"] == "the script wants it whole"
    set_tensor_parallelism(net.experts, True)
    assert found(net).linears()
