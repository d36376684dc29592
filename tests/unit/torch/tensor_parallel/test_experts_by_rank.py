"""Which mixtures are shared out by expert, and what keeps others in parts; rows that go to a rank's experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.tensor_parallel_models import (
    WIDTH,
    Gated,
    Mixture,
    Residual,
    Routed,
    Shared,
    Sorted,
    Stacked,
)
from tests.unit.torch.networks import CPU
from weft.torch.session.random_streams import Streams
from weft.torch.tensor_parallel import Splits
from weft.torch.tensor_parallel.experts.sharded_experts import Own, run_own
from weft.torch.tensor_parallel.find import find
from weft.torch.tensor_parallel.splits import Held, Linear
from weft.torch.trace.dry_run import DryRun

X = torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def found(net: nn.Module, size: int = 2, share: str = "auto", **more: Any) -> Splits:
    def run() -> Tensor:
        result = net(X)
        return (result[0] if isinstance(result, tuple) else result).sum()

    return find(net, run, size, experts=share, **more)


def why_in_parts(net: nn.Module, size: int = 2, **more: Any) -> str:
    splits = found(net, size, **more)
    assert not any(linear.by_rank() for linear in splits.linears().values())
    (line,) = splits.mixtures.values()
    assert line in splits.text()
    return line.removeprefix("not expert-parallel: ")


def ranks_of(linear: Linear) -> list[int | None]:
    return [held.rank for held in linear.held]


def test_lists_of_modules() -> None:
    for named in (False, True):
        splits = found(Mixture(named=named))
        assert splits.linears().keys() == {""}
        assert ranks_of(splits.linears()[""]) == [0, 0, 1, 1]
        assert splits.linears()[""].blocks == (1,), "its result is added up"
    assert Splits.from_record(splits.to_record()) == splits
    assert "expert-parallel" in splits.text()


def test_ranks_need_not_divide_them() -> None:
    assert ranks_of(found(Mixture(3)).linears()[""]) == [0, 0, 1]
    assert ranks_of(found(Mixture(5), 4).linears()[""]) == [0, 0, 1, 2, 3]
    parts = found(Routed(Stacked(experts=3), 3), share="expert_parallel").linears()["experts"].parts
    assert {part.name: part.dim for part in parts} == dict.fromkeys(("up", "up_bias", "down", "down_bias"), 0)


def test_a_shared_expert_counts_once_and_is_cut_as_ever() -> None:
    linears = found(Shared()).linears()
    assert linears[""].held[-1] == Held("shared", None)
    assert linears[""].blocks == (1, 0), "scores are the same on all ranks"
    assert linears.keys() == {"", "shared.both", "shared.down"}


def test_both_ways_for_one_weight() -> None:
    net = Routed(Stacked())
    assert not found(net).linears()["experts"].by_rank()
    assert not found(net, share="expert_tensor_parallel").linears()["experts"].by_rank()
    assert found(net, share="expert_parallel").linears()["experts"].by_rank()
    few = found(Routed(Stacked(experts=3), 3), 4, "expert_parallel")
    assert few.notes["experts"] == "not expert-parallel: its 3 experts are fewer than the 4 ranks"


def test_a_residual_path_counts_once() -> None:
    (linear, *_) = found(Residual(0.1)).linears().values()
    assert linear.blocks == (2,) and linear.held[-1].name == "shared"


class Several(nn.Module):
    """Experts whose two linears are in two lists."""

    def __init__(self, shorter: int = 0) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 48) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(48, WIDTH) for _ in range(4 - shorter))

    def forward(self, x: Tensor) -> Tensor:
        which = self.router(x).argmax(-1)
        scores = self.router(x).softmax(-1).amax(-1)
        result = torch.zeros_like(x)
        for number, up in enumerate(self.up):
            place = torch.where(which == number)
            down = self.down[number % len(self.down)]
            result = result.index_put(place, down(up(x[place]).relu()) * scores[place][:, None])
        return result


def test_two_lists() -> None:
    (linear,) = found(Several()).linears().values()
    assert {held.name: held.rank for held in linear.held} == {
        f"{name}.{number}": number // 2 for name in ("up", "down") for number in range(4)
    }
    assert why_in_parts(Several(shorter=1)) == "its lists of experts have several lengths"


class Limited(Mixture):
    """Each word is given to two experts; of one each, a limit would be the same on the rank that has it."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        best, which = self.router(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            samples, words, nth = torch.where(which == number)
            if len(samples):
                share = best[samples, words, nth, None]
                result = result.index_put(
                    (samples, words), expert(x[samples, words]) * share, accumulate=True
                )
        return result.clamp(-self.limit, self.limit)


def test_a_limit_that_only_large_sums_reach() -> None:
    assert why_in_parts(Limited(50.0)) == "the results of its experts are not just summed"
    assert found(Limited(torch.inf)).linears()[""].by_rank()


class Watched(Mixture):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.router(x)


def test_what_keeps_them_in_parts() -> None:
    assert why_in_parts(Mixture(3), 4) == "its 3 experts are fewer than the 4 ranks"
    assert why_in_parts(Shared(normed=True)) == "the results of its experts are not just summed"
    told = "tensors get out of it by another way than its result"
    assert why_in_parts(nn.Sequential(Mixture()), leaking={"0.router"}) == told
    net = Mixture()
    net.router.register_forward_hook(lambda *given: None)
    assert why_in_parts(net) == "router has hooks"
    net = Mixture()
    net.get_submodule("experts.1.0").weight = net.get_submodule("experts.0.0").weight  # type: ignore[assignment]
    assert why_in_parts(net) == "modules in it share parameters"
    net = Mixture()
    net.spare = nn.Linear(WIDTH, 2)
    assert why_in_parts(net) == "its spare.bias gets no gradient"
    assert not found(Mixture(), share="expert_tensor_parallel").mixtures


def test_layers_of_one_class_may_compute_other_things() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Shared(), Shared(normed=True)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)[0]
            return x

    splits = found(Two())
    assert splits.linears()["layers.0"].by_rank()
    assert splits.mixtures.keys() == {"layers.1"}


class ByObject(Mixture):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x if isinstance(x, Tensor) else x.rows)


class Rows:
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


def test_tensors_in_objects_keep_them_in_parts() -> None:
    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixture = ByObject()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.mixture(Rows(x))
            return result

    assert why_in_parts(Calling()).startswith("it gets tensors in an object")

    class Experts(Stacked):
        def forward(self, given: Any) -> Tensor:  # type: ignore[override]
            return super().forward(*given.rows)

    class Called(Routed):
        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, -2)
            weights, which = self.router(flat).softmax(-1).topk(2, -1)
            return self.experts(Rows((flat, which, weights))).view(x.shape)  # type: ignore[arg-type]

    for share in ("expert_tensor_parallel", "expert_parallel"):
        splits = found(Called(Experts()), share=share)
        assert splits.whole["experts"].startswith("it gets tensors in an object")


class Dropping(Mixture):
    def __init__(self, drop: nn.Module, inside: nn.Module) -> None:
        super().__init__()
        self.drop = drop
        self.experts = nn.ModuleList(nn.Sequential(each[0], inside, each[2]) for each in self.experts)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.drop(super().forward(x))
        return result


def test_random_numbers_behind_the_sum_are_drawn_as_in_a_step() -> None:
    (linear,) = found(Dropping(nn.Dropout(0.5), nn.Identity())).linears().values()
    assert linear.blocks == (1,) and not any(each.draws for each in linear.held)
    (linear,) = found(Dropping(nn.AlphaDropout(0.5), nn.Identity())).linears().values()
    assert linear.blocks == (2,), "what it puts in the place of zeros counts once"


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), nn.Dropout(0.0), Functional()], ids=str)
def test_experts_may_draw_in_training_only(drop: nn.Module) -> None:
    (linear,) = found(Dropping(nn.Identity(), drop).eval()).linears().values()
    assert all(each.draws for each in linear.held)


def test_a_later_step_may_use_autocast() -> None:
    (linear,) = found(Mixture()).linears().values()
    assert all(each.rounded for each in linear.held)

    class Exact(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    exact = Mixture()
    exact.experts = nn.ModuleList(nn.Sequential(each, Exact()) for each in exact.experts)
    (linear,) = found(exact).linears().values()
    assert not any(each.rounded for each in linear.held)


def test_other_results_count_as_well() -> None:
    (linear,) = found(Watched()).linears().values()
    assert linear.blocks == (1, 0)

    class Told(Mixture):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None, {"choices": self.router(x).argmax(-1), "scores": self.router(x)}

    (linear,) = found(Told()).linears().values()
    assert linear.blocks == (1, -1, -1, 0)


def test_other_lists_are_no_mixtures() -> None:
    layers = nn.Sequential(*(Gated() for _ in range(3)))

    class Layers(nn.Module):
        def __init__(self, skip: bool) -> None:
            super().__init__()
            self.layers, self.skip = nn.ModuleList(layers), skip

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[: 2 if self.skip else 3]:
                x = layer(x)
            return x

    class Branches(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return sum(layer(x) for layer in self.layers)

    for net in (Layers(False), Layers(True), Branches(False)):
        splits = found(net)
        assert not splits.mixtures and not any(linear.by_rank() for linear in splits.linears().values())


def test_a_weight_that_is_alone_has_a_line() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x @ each for each in self.weight]).sum(0)

    told = f"its weight, 4 x {WIDTH} x {WIDTH}, is the only one, so there is no sum in it"
    assert found(nn.Sequential(Alone(), Gated())).whole["0"] == told


def test_weights_that_are_each_alone_are_cut_where_a_module_adds_up() -> None:
    for share in ("auto", "expert_parallel"):
        (linear,) = found(Sorted(), share=share).linears().values()
        assert {part.name: part.dim for part in linear.parts} == {
            "up.weight": 1,
            "down.weight": 2,
            "bias": -1,
        }
        assert linear.parts[0].blocks == (24, 24)
    splits = found(Sorted(), leaking={"router"})
    told = "tensors get out of it by another way than its result"
    assert splits.whole["up"] == splits.whole["down"] == told


def test_the_model_stays_as_it_is() -> None:
    net = Shared().train()
    net.shared.eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    with DryRun([net], Streams(CPU)).forward(lambda: None):
        assert found(net).linears()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not any("forward" in vars(module) for module in net.modules())
    assert net.training and not net.shared.training


class Chosen(nn.Module):
    """A matrix for each expert; of each row the chosen ones, weighted."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.number_of_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 3, 3, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor, which: Tensor, weights: Tensor) -> Tensor:
        assert len(self.up) == self.number_of_experts and which.max() < self.number_of_experts
        products = (x.view(len(x), 1, 1, 3) @ self.up[which.view(len(x), -1)])[..., 0, :]
        return (products * weights.view(len(x), -1, 1)).sum(1)


@pytest.mark.parametrize("shape", [(7, 2), (7, 1), (7,), (1, 2)], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_run_their_own_rows(shape: tuple[int, ...], size: int) -> None:
    numbers = torch.Generator().manual_seed(2)
    module = Chosen(5)
    x = torch.randn(shape[0], 3, generator=numbers)
    which, weights = torch.randint(5, shape, generator=numbers), torch.rand(shape, generator=numbers)
    expected = module(x, which, weights)
    parts = []
    for rank in range(size):
        own = Own.of(5, rank, size)
        up = module.up[own.first : own.first + own.count]
        parts.append(run_own(module, own, {"up": up}, (x, which), {"weights": weights}))
    torch.testing.assert_close(sum(parts), expected)
    assert module.number_of_experts == 5


def test_a_rank_without_rows_gives_zeros_and_gradients() -> None:
    module = Chosen(4)
    x = torch.randn(3, 3, requires_grad=True)
    weights = torch.rand(3, 2, requires_grad=True)
    up = module.up[2:].detach().requires_grad_()
    result = run_own(
        module, Own.of(4, 1, 2), {"up": up}, (x, torch.zeros(3, 2, dtype=torch.long), weights), {}
    )
    assert torch.equal(result, torch.zeros(3, 3))
    result.sum().backward()
    assert all(each.grad is not None and not each.grad.any() for each in (x, weights, up))


def test_a_result_without_rows_is_refused() -> None:
    class Total(Chosen):
        def forward(self, *given: Tensor) -> Tensor:
            return super().forward(*given).sum()

    with pytest.raises(ValueError, match="something else than a row for each row"):
        run_own(Total(2), Own.of(2, 0, 2), {"up": torch.ones(1, 3, 3)},
                (torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)), {})  # fmt: skip
