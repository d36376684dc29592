"""Replicas that share parameters train as one process on the whole batch; started by `test_sharded.py`.

    sharded.py --folder FOLDER check...

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models, training
from tests.parity.compare import TOLERANCE, Comparison
from tests.parity.registry import Checks
from tests.parity.shares import WIDTH
from tests.parity.together import told
from tests.training import STEPS, squares, start, step_of
from weft.compat.modelparallel import interface as smp
from weft.errors import ConfigError, DivergenceError, UsageError
from weft.torch.activation_checkpointing import set_activation_checkpointing
from weft.torch.gathering.layers import blocks
from weft.torch.replicas.full_tensors import full_tensor, is_sharded, share_of

CHECKS = Checks()
ROWS, WORDS, CLIP = 16, 11, 0.05
given = CHECKS.given


class Net(models.Words):
    """Tied weights, frozen ones, a scalar, a buffer that the forward pass writes, and layers of a kind."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            WORDS, WIDTH, [models.Block(WIDTH, 13) for _ in range(3)]
        )  # 13: no multiple of the ranks
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))
        self.blocks[1].up.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.head(self.body(words) * self.scale)


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    x, y = torch.randint(WORDS, (2, ROWS, 3), generator=numbers)
    return x, y


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def optimizer_of(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    some = [*parameters]
    groups = [
        {"params": [p for p in some if p.dim() > 1]},
        {"params": [p for p in some if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-3)


class Job(training.Job):
    """A model whose parameters as many ranks share as `degree` says."""

    def __init__(self, degree: int, kind: Callable[..., Any] = optimizer_of, **settings: Any) -> None:
        defaults = {"shard_optimizer_state": False, "offload_activations": False, "offload_optimizer": False}
        start(partitions=1, **{**defaults, "sharded_data_parallel_degree": degree, **settings})
        net = Net()
        if settings.get("offload_activations"):
            for block in net.blocks:
                set_activation_checkpointing(block)
        if weft.rank():
            with torch.no_grad():
                net.scale.add_(1)  # a replica takes what the first one has
        super().__init__(net, loss_of, kind, batch, alone=Net(), scale=64.0, decay=0.5)

    def clip(self, most: float) -> Any:
        return weft.clip_grad_norm_(self.model, most)


def named(net: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): full_tensor(p.detach()).clone() for name, p in net.named_parameters()
    }


def close(group: str, actual: dict[str, Any], expected: dict[str, Any]) -> None:
    comparison = Comparison(TOLERANCE)
    comparison.tensors(group, actual, expected, max(v.abs().max().item() for v in expected.values()))
    assert comparison.ok and set(actual) == set(expected), comparison.report()


@CHECKS.check
def trains_as_one_process() -> None:
    numel = sum(p.numel() for p in Net().parameters())
    for degree, settings in ((4, {}), (2, {}), (2, {"offload_activations": True, "offload_optimizer": True})):
        job = Job(degree, **settings)
        assert (
            job.model.sharded
            and len(blocks(Net())) == 3
            and all(is_sharded(p) for p in job.model.parameters())
        )
        for step in range(STEPS):
            found, expected = job.train(1, CLIP), job.train_alone(1, CLIP, first=step)
            assert found == pytest.approx(expected, rel=1e-5)
            assert float(job.norm) == pytest.approx(float(job.norm_alone), rel=1e-5)
            params, alone = job.model.local_named_parameters(), job.alone.named_parameters()
            mine = {n.removeprefix("module."): full_tensor(p.grad) for n, p in params if p.grad is not None}
            close(f"gradients of step {step}", mine, {n: p.grad for n, p in alone if p.grad is not None})
        close("parameters", named(job.model), named(job.alone))
        held = [share_of(p).numel() for p in job.model.parameters()]
        assert sum(held) < 1.3 * numel / degree, (held, numel)
        states = [share_of(v).numel() for s in job.optimizer.state.values() for v in s.values()]
        assert sum(states) < 2.6 * numel / degree
        model = job.model.eval()
        with torch.no_grad():
            model(job.mine(0)[0])
        assert all(is_sharded(p) for p in model.parameters())
        state = model.state_dict()
        assert not any(is_sharded(value) for value in state.values())
        assert state["calls"] == STEPS * 2
        Net().load_state_dict(state)
        del job, model


class Adapted(nn.Module):
    """A frozen linear of another type, and one in whole numbers, below adapters that train."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        self.codes = nn.Parameter(torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.base(x.double()).float() + F.linear(x, self.codes / 40.0)
        return x + torch.tanh(frozen + self.up(self.down(x)))


@CHECKS.check
def layers_of_several_types() -> None:
    """What has another type than most of its layer is whole on each replica; all trains as one process."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Adapted() for _ in range(3)))
    alone = copy.deepcopy(net)
    start(partitions=1, sharded_data_parallel_degree=2)

    def rows(step: int) -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))

    def trained(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return training.adamw([each for each in parameters if each.requires_grad])

    job = training.Job(net, training.next_rows, trained, rows, alone=alone)
    job.trains_as_one_process(max_norm=CLIP)
    shared = {n.removeprefix("module.") for n, p in job.model.named_parameters() if is_sharded(p)}
    assert shared == {
        n for n, p in alone.named_parameters() if n.startswith("0.") or p.dtype == torch.float64
    }


class Even(nn.Module):
    """Two types of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.long = nn.Linear(WIDTH, WIDTH, False).double(), nn.Linear(WIDTH, 2 * WIDTH, False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wide(x.double()).float() + self.long(x)[..., :WIDTH]


@CHECKS.check
def layers_of_two_types_of_one_size() -> None:
    """All replicas share those of the type that comes first."""
    start(partitions=1, sharded_data_parallel_degree=2)
    torch.manual_seed(0)
    net = nn.Sequential(*(Even() for _ in range(4)))
    alone = copy.deepcopy(net)
    job = training.Job(
        net,
        training.next_rows,
        batch_of=lambda n: torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(n)),
        alone=alone,
    )
    job.trains_as_one_process()
    shared = {n.removeprefix("module.") for n, p in job.model.named_parameters() if is_sharded(p)}
    assert shared == {n for n, _ in alone.named_parameters() if "wide" in n}


class Casting(models.Block):
    def forward(self, x: Tensor) -> Tensor:
        self.down = self.down.to(torch.float64)
        return x + self.down(self.up(x).double()).float()


@CHECKS.check
def layers_that_cast_their_weights_are_refused() -> None:
    start(partitions=1, sharded_data_parallel_degree=2, verify="off")
    model = weft.DistributedModel(nn.Sequential(*(Casting(WIDTH) for _ in range(3))))
    with told(UsageError, "a module casts some of its parameters where it runs"):
        step_of(squares)(model, torch.randn(ROWS, WIDTH))


class Differences(torch.optim.Optimizer):
    """By the differences of gradients, with operations that DTensors do not have."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            for weight in weights:
                self.state[weight].setdefault("last", torch.zeros_like(weight))
                self.state[weight]["steps"] = self.state[weight].get("steps", 0) + 1
            last, grads = [self.state[p]["last"] for p in weights], [p.grad for p in weights]
            for weight, before, grad in zip(weights, last, grads, strict=True):
                weight[(grad - before).abs() > 1e-6] -= group["lr"] * self.scale(grad)
                weight.add_(before + grad, alpha=-group["lr"])
            torch._foreach_copy_(last, grads)

    def scale(self, grad: Tensor) -> float:
        return 0.01


class ByMatrix(Differences):
    """Mixes a weight with a plain tensor."""

    def scale(self, grad: Tensor) -> float:
        return float((torch.eye(grad.shape[0]) @ grad).norm()) if grad.dim() > 1 else 0.01


@CHECKS.check
def optimizers_of_ones_own_update_local_rows() -> None:
    """Their operations may be unknown to DTensors; states are whole in saves, and go on from there."""
    hooked: list[bool] = []
    for degree in (2, 4):
        job = Job(degree, Differences)
        job.optimizer.optimizer.register_step_pre_hook(
            lambda optimizer, *_: hooked.append(all(map(is_sharded, optimizer.param_groups[0]["params"])))
        )
        job.trains_as_one_process(2, max_norm=CLIP)
        assert all(is_sharded(entry["last"]) for entry in job.optimizer.state.values())
        state, saved = job.model.state_dict(), copy.deepcopy(job.optimizer.state_dict())
        rates, expected = job.scheduler.state_dict(), job.train(2, CLIP)
        del job
        job = Job(6 - degree, Differences)
        job.model.load_state_dict(state)
        job.optimizer.load_state_dict(saved)
        job.scheduler.load_state_dict(rates)
        job.steps = 2
        assert job.train(2, CLIP) == pytest.approx(expected, rel=1e-5)
        del job
    assert len(hooked) == 8 and all(hooked)
    job = Job(2, ByMatrix)
    with told(UsageError, "ByMatrix looks at whole weights, and PyTorch cannot do that with DTensors"):
        job.train(1, CLIP)


@CHECKS.check
def states_are_whole_and_plain() -> None:
    job = Job(2)
    job.train(2, CLIP)
    state, optimizer = copy.deepcopy(job.model.state_dict()), copy.deepcopy(job.optimizer.state_dict())
    partial = copy.deepcopy(job.optimizer.local_state_dict())
    local = copy.deepcopy(job.model.local_state_dict())
    assert job.model.state_dict(gather_to_rank0=True).keys() == (state.keys() if weft.rank() == 0 else set())
    rates = job.scheduler.state_dict()
    expected = job.train(2, CLIP)
    del job
    for degree, model, saved in ((4, state, optimizer), (2, local, partial), (1, state, optimizer)):
        job = Job(degree)
        job.model.load_state_dict(model)
        job.optimizer.load_state_dict(copy.deepcopy(saved))
        job.scheduler.load_state_dict(rates)
        job.steps = 2
        assert job.train(2, CLIP) == pytest.approx(expected, rel=1e-5)
        del job


@CHECKS.check
def checkpoints_go_to_other_layouts() -> None:
    root = given.folder / "sharded"
    job = Job(2)
    job.train(2, CLIP)
    also = {"scheduler": job.scheduler}
    weft.save_checkpoint(root, "part", model=job.model, optimizer=job.optimizer, also=also)
    weft.save_checkpoint(root, "full", partial=False, model=job.model)
    parameters = named(job.model)
    expected = job.train(2, CLIP)
    del job
    for degree, settings in ((2, {}), (4, {}), (1, {}), (1, {"shard_optimizer_state": True})):
        job = Job(degree, **settings)
        weft.resume_from_checkpoint(
            root, "part", model=job.model, optimizer=job.optimizer, also={"scheduler": job.scheduler}
        )
        job.steps = 2
        assert job.train(2, CLIP) == pytest.approx(expected, rel=1e-5)
        if settings:
            weft.save_checkpoint(root, "shares", model=job.model, optimizer=job.optimizer)
        del job
    job = Job(4)
    weft.resume_from_checkpoint(root, "full", partial=False, model=job.model)
    close("parameters", named(job.model), parameters)
    weft.resume_from_checkpoint(root, "shares", model=job.model)
    del job


class Choosing(nn.Module):
    """Samples decide which one of two layers runs."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = kind([nn.Linear(WIDTH, WIDTH) for _ in range(2)]), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        layers = [*self.layers.children()]
        return self.head(layers[int(x[0, 0] > 0)](x))


def by_name(layers: list[nn.Linear]) -> nn.Module:
    return nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})


OTHERS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "layers": (nn.ModuleList, "rank 0 calls layers.0, rank 1 calls layers.1"),
    "gradients": (
        by_name,
        "rank 0 has a gradient of layers.0.weight, rank 1 has a gradient of layers.1.weight",
    ),
}


@CHECKS.of_each(*OTHERS)
def replicas_use_others(what: str) -> None:
    kind, text = OTHERS[what]
    gc.collect()
    weft.init({"sharded_data_parallel_degree": 4})
    model, step = weft.DistributedModel(Choosing(kind)), step_of(squares)
    step(model, torch.ones(2, WIDTH))
    with told(DivergenceError, text):
        step(model, torch.full((2, WIDTH), weft.rank() % 2 - 0.5))


@CHECKS.check
def what_does_not_fit_is_told() -> None:
    from weft.checkpoint import meeting

    meeting.STUCK_S = 1.0
    job = Job(2)
    if weft.rank() == 0:
        with told(UsageError, "Call it on every rank, and not on one rank of a pipeline alone"):
            weft.save_checkpoint(given.folder / "alone", "t", model=job.model)
    weft.barrier()
    with told(UsageError, "join() does not fit"), job.model.join():
        pass
    with told(UsageError, "a communication hook does not fit sharded_data_parallel_degree"):
        job.model.register_comm_hook(None, lambda state, bucket: None)
    with told(UsageError, "the optimizer has parameters from before they were sharded"):
        weft.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with told(UsageError, "Adafactor reads norms of weights as numbers"):
        weft.DistributedOptimizer(torch.optim.Adafactor(job.model.parameters()))
    with told(ConfigError, "4 processes cannot be divided into groups of 3"):
        weft.init({"sharded_data_parallel_degree": 3})


@CHECKS.check
def scripts_in_16_bits() -> None:
    """As the original does: gradients are clipped in `optimizer.step()`, and 32-bit masters are updated."""
    records = []
    for degree in (1, 4):
        gc.collect()
        smp.init({"partitions": 1, "microbatches": 2, "bf16": True, "sdp_gradient_clipping": CLIP,
                  "shard_optimizer_state": False, "sharded_data_parallel_degree": degree})  # fmt: skip
        model = smp.DistributedModel(Net())
        optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
        step = step_of(loss_of)
        losses, norms = [], []
        for number in range(STEPS):
            optimizer.zero_grad()
            mine = [each.chunk(weft.size())[weft.rank()] for each in batch(number)]
            losses.append(step(model, *mine).reduce_mean().item())
            norm = optimizer.clip_master_grads(CLIP) if degree == 1 else None
            optimizer.step()
            norms.append(float(optimizer._global_grad_norm if norm is None else norm))
        state = optimizer.save_optimizer_backcompat() if degree > 1 else optimizer.state_dict()
        assert not any(is_sharded(value) for value in state["fp32_masters"].values())
        optimizer.load_optimizer_backcompat(state)
        records.append((losses, norms, state["fp32_masters"]))
        if degree > 1:
            with told(UsageError, "cpu() does not fit sharded_data_parallel_degree"):
                model.cpu()
        del model, optimizer
    smp.init({"bf16": False})
    (losses, norms, masters), (sharded_losses, sharded_norms, sharded_masters) = records
    assert min(norms) > CLIP, "nothing is clipped"
    assert all(abs(a - b) < 2e-2 * b for a, b in zip(norms, sharded_norms, strict=True)), records
    assert all(abs(a - b) < 2e-2 * b for a, b in zip(losses, sharded_losses, strict=True)), records
    for number, master in masters.items():
        torch.testing.assert_close(sharded_masters[number], master, rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
