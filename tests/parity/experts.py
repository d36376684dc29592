"""Steps of mixtures whose experts ranks share out; started by `test_experts.py`.

    experts.py --folder FOLDER --partitions 2 check...       with tensor_parallel_degree in WEFT_SET

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft.torch as weft
from tests import training
from tests.parity.registry import Checks
from tests.parity.tensor_parallel_models import WIDTH, Mixture, Residual, Routed, Shared, Sorted, Stacked
from tests.training import next_rows, start
from weft.errors import UsageError
from weft.torch.delayed_parameters import materialise
from weft.torch.session import current
from weft.torch.tensor_parallel import Splits, axes_of, is_cut

CHECKS = Checks()
given = CHECKS.given
ROWS, LENGTH = 8, 5


class Layer(nn.Module):
    """A mixture with a residual path; scores of its router add to what comes out, as losses that balance do."""

    def __init__(self, mixture: nn.Module, rate: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mixture, self.dropout = nn.LayerNorm(WIDTH), mixture, nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        result = self.mixture(self.norm(x))
        if isinstance(result, tuple):
            result, scores = result
            result = result + 0.01 * scores.logsumexp(-1).view(*x.shape[:-1], 1)
        return x + self.dropout(result)


def network() -> nn.Sequential:
    """Mixtures of modules, with a shared expert and without; weights that are one tensor, and that are each alone."""
    torch.manual_seed(0)
    mixtures = [Shared(), Mixture(), Routed(Stacked(experts=3), 3), Sorted(), Residual()]
    return nn.Sequential(*map(Layer, mixtures))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003, eps=1e-5)


class Job(training.Job):
    """Layers of mixtures, and what trains them; and the same in one process."""

    def __init__(self, net: nn.Module | None = None, alone: nn.Module | None = None, **settings: Any) -> None:
        start(**{"partitions": given.partitions, "experts": "expert_parallel", **settings})
        super().__init__(net or network(), next_rows, optimizer_of, alone=alone)

    def batch(self, number: int) -> Tensor:
        return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(number))

    def splits(self) -> Splits:
        return Splits.from_record(self.model.plan.tensors)

    def by_rank(self) -> list[str]:
        return [name for name, linear in self.splits().linears().items() if linear.by_rank()]


@CHECKS.check
def steps_give_the_weights_and_states_of_one_process() -> None:
    for pipeline in ("1f1b", "zb_h1")[: given.partitions]:
        job = Job(pipeline=pipeline, verify="gradients")
        assert job.train(max_norm=0.5) == pytest.approx(job.train_alone(max_norm=0.5), rel=1e-5)
        assert job.by_rank() == ["0.mixture", "1.mixture", "2.mixture.experts", "4.mixture"]
        assert "3.mixture" in job.splits().linears()
        assert float(job.norm) == pytest.approx(float(job.norm_alone), rel=1e-5)
        job.compare()


@CHECKS.check
def norms_of_all_kinds_are_those_of_the_whole() -> None:
    Job().has_norms_of_one_process()


@CHECKS.check
def a_rank_holds_its_experts() -> None:
    job = Job()
    job.train(1)
    held = {
        name: parameter.numel() / job.alone.get_parameter(name.removeprefix("module.")).numel()
        for name, parameter in job.model.local_named_parameters()
        if is_cut(parameter)
    }
    one = [share for name, share in held.items() if ".mixture.experts." in name and ".2." not in name]
    assert set(one) <= {0.0, 1.0} and all(
        "tp" in axes_of(p) for p in job.model.local_parameters() if not p.numel()
    )
    uneven = [share for name, share in held.items() if name.endswith("experts.up")]
    assert all(share == pytest.approx((2 - weft.tp_rank()) / 3) for share in uneven)


@CHECKS.check
def a_whole_state_is_loaded_into_parts() -> None:
    Job().gives_its_states_to(Job)


@CHECKS.check
def saves_go_to_other_layouts() -> None:
    """The first layout saves, and trains on; all others go on from there as it did, also with experts in parts."""
    folder = given.folder / "saves"
    first = not (folder / "newest").exists()
    for experts in ("expert_parallel",) if first else ("expert_parallel", "expert_tensor_parallel"):
        job = Job(experts=experts)
        if first:
            job.train(2)
            weft.save_checkpoint(folder, "two", model=job.model, optimizer=job.optimizer)
            job.train(2)
            torch.save(job.model.state_dict(), given.folder / f"after-{weft.rank()}.pt")
            return
        weft.resume_from_checkpoint(folder, "two", model=job.model, optimizer=job.optimizer)
        job.steps = 2
        job.train(2)
        state = torch.load(given.folder / "after-0.pt")
        torch.testing.assert_close(job.model.state_dict(), state, rtol=1e-5, atol=1e-6)


@CHECKS.check
def tokens_are_in_parts_around_them() -> None:
    job = Job(sequence_parallel=True)
    assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
    job.compare()


@CHECKS.check
def chance_is_the_same_outside_of_experts() -> None:
    """Experts draw for themselves: what is whole stays equal, and goes on as before."""
    net = nn.Sequential(Layer(Mixture(), 0.1), Layer(Mixture(), 0.1))
    for layer in net:
        layer.mixture.experts = nn.ModuleList(
            nn.Sequential(each[0], nn.Dropout(0.5), each[2]) for each in layer.mixture.experts
        )
    job = Job(net)
    torch.manual_seed(weft.rank())
    job.train()
    assert job.by_rank() == ["0.mixture", "1.mixture"]
    assert all(held.draws for name in job.by_rank() for held in job.splits().linears()[name].held)
    state = job.model.state_dict()
    for name, parameter in job.model.local_named_parameters():
        if not is_cut(parameter):
            own = state[name.removeprefix("module.")]
            torch.testing.assert_close(parameter.detach(), own, rtol=0, atol=0)


@CHECKS.check
def weights_made_late_are_shared_out() -> None:
    weft.init({"partitions": given.partitions, "microbatches": 2, "experts": "expert_parallel"})
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        with weft.delay_param_initialization():
            nets.append(nn.Sequential(*(Layer(Routed(Stacked(inner=160, how="all"))) for _ in range(2))))
    net, alone = nets
    materialise(alone, lambda name: True, torch.device("cpu"), current.session().streams)
    model = weft.DistributedModel(net)

    @weft.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)))
    cut = {name: p for name, p in model.local_named_parameters() if is_cut(p)}
    assert cut and all(len(p) == 4 // weft.tp_size() for p in cut.values())
    torch.testing.assert_close(model.state_dict(), dict(alone.state_dict()), rtol=0, atol=0)


class Remembered(Mixture):
    """Keeps what its router gives as an attribute, for a loss that balances experts."""

    def forward(self, x: Tensor) -> Tensor:
        self.scores = self.router(x)
        return super().forward(x)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(Remembered()), Layer(Remembered()))

    def forward(self, x: Tensor) -> Tensor:
        result = self.layers(x)
        balance = sum(layer.mixture.scores.logsumexp(-1).square() for layer in self.layers)
        return result + 0.1 * balance[..., None]


@CHECKS.check
def what_gets_out_otherwise_keeps_experts_in_parts() -> None:
    job = Job(Remembering())
    assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
    assert job.by_rank() == []
    job.compare()
    reasons = set(job.splits().mixtures.values())
    assert reasons == {"not expert-parallel: tensors get out of it by another way than its result"}


def equal_on_ranks(job: Job) -> None:
    """What is whole on the ranks that share experts is the same on all."""
    group = weft.get_tp_process_group()
    for name, parameter in job.model.local_named_parameters():
        if not is_cut(parameter):
            others = [torch.empty_like(parameter) for _ in range(weft.tp_size())]
            dist.all_gather(others, parameter.detach().contiguous(), group=group)
            assert all(torch.equal(others[0], each) for each in others), name


@CHECKS.check
def an_evaluation_may_come_first() -> None:
    """It shows no random numbers, which experts draw in training."""
    torch.manual_seed(0)
    net = nn.Sequential(Layer(Mixture(), 0.1), Layer(Mixture(), 0.1))
    for layer in net:
        layer.mixture.experts = nn.ModuleList(
            nn.Sequential(each[0], nn.Dropout(0.5), each[2]) for each in layer.mixture.experts
        )
    job = Job(net)

    @weft.step
    def evaluate(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    job.model.eval()
    with torch.no_grad():
        evaluate(job.model, job.batch(0))
    job.model.train()
    job.train(2)
    assert job.by_rank() == ["0.mixture", "1.mixture"]
    equal_on_ranks(job)


class Dropping(Residual):
    """Random numbers are drawn in a module beside the experts, and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(self.shared, nn.Dropout(0.5))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


@CHECKS.check
def random_numbers_behind_a_shared_expert_are_those_of_one_run() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Dropping())
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "experts" in name or "shared" in name:
                parameter.zero_()
    job = Job(net)

    @weft.step
    def results(model: nn.Module, x: Tensor) -> Tensor:
        result = model(x)
        model.backward(result.square().mean())
        return result

    x = job.batch(0)
    found = torch.cat([*results(job.model, x).outputs]).detach()
    assert job.splits().linears()["0"].blocks == (2,)
    assert {*(found / x).round(decimals=4).flatten().tolist()} == {0.0, 2.0}


class Scored(Mixture):
    """In training scores come first; in evaluation there are none, or, with ``bare``, no place for them."""

    bare = False

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        if self.bare:
            return result
        return (self.router(x) if self.training else None), result


class Scoring(Layer):
    def forward(self, x: Tensor) -> Tensor:
        scores, result = self.mixture(self.norm(x))
        return x + result + (0.01 * scores.logsumexp(-1, keepdim=True) if self.training else 0)


@CHECKS.check
def evaluation_may_give_less_or_copy() -> None:
    torch.manual_seed(0)
    job = Job(nn.Sequential(Scoring(Scored()), Scoring(Scored())), verify="gradients")
    assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
    assert job.by_rank() == ["0.mixture", "1.mixture"]
    if given.partitions > 1 or weft.rdp_size() > 1:
        return
    net, x = job.model.module.eval(), job.batch(9)
    copied, expected = copy.deepcopy(net), dict(job.alone.eval().named_modules())
    with torch.no_grad():
        for one in (net, copied):
            torch.testing.assert_close(one(x), job.alone(x), rtol=1e-4, atol=1e-5)
        for parameter in copied.parameters():
            parameter.zero_()
        torch.testing.assert_close(net(x), job.alone(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(net[0].mixture(x)[1], expected["0.mixture"](x)[1], rtol=1e-4, atol=1e-5)
        with pytest.raises(
            UsageError, match=r"experts\.3, an expert that one rank has, is called by other code"
        ):
            net[0].mixture.experts[3](x)
        net[0].mixture.bare = True
        with pytest.raises(UsageError, match="1 tensors of 1 results, and there were 2 of 2"):
            net[0].mixture(x)


class Kept(Stacked):
    """Experts that keep a tensor for a loss, and count."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.calls = torch.zeros(()), 0

    def forward(self, x: Tensor, which: Tensor, weights: Tensor) -> Tensor:
        result = super().forward(x, which, weights)
        self.kept = result.square().mean()
        self.calls += 1
        return result


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(Routed(Kept())) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros(())
        for layer in self.layers:
            x = layer(x)
            kept = kept + layer.mixture.experts.kept
        return x + kept


@CHECKS.check
def what_experts_of_one_weight_keep_is_whole() -> None:
    for how in ("expert_parallel", "expert_tensor_parallel"):
        torch.manual_seed(0)
        job = Job(Keeping(), verify="gradients", experts=how)
        job.train(1)
        assert "layers.0.mixture.experts" in job.splits().whole


class Around(Mixture):
    """A mixture whose module has something of its own besides: an embedding, scores, attention, a pair of linears."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("words", "scores"):
            self.embed = nn.Embedding(41, WIDTH)
        if kind == "attention":
            self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        if kind in ("scores", "linears"):
            self.up = nn.Linear(WIDTH, 41 if kind == "scores" else 64)
            self.down = nn.Linear(self.up.out_features, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("words", "scores"):
            x = x + self.embed((8 * x.detach().abs().sum(-1)).long() % 41)
        if self.kind == "attention":
            x = x + self.attend(x, x, x, need_weights=False)[0]
        if self.kind in ("scores", "linears"):
            x = x + self.down(self.up(x).tanh())
        return x + super().forward(x)


@CHECKS.of_each("words", "scores", "attention", "linears")
def modules_beside_experts_stay_whole(kind: str) -> None:
    torch.manual_seed(0)
    job = Job(nn.Sequential(*(Layer(Around(kind)) for _ in range(2))), verify="gradients")
    assert job.train() == pytest.approx(job.train_alone(), rel=1e-5)
    assert [*job.splits().linears()] == ["0.mixture", "1.mixture"]
    job.compare()


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
