"""Replicas that share parameters train as one process on the whole batch; started by `test_sharded.py`.

    sharded.py --folder FOLDER check...

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests.parity.compare import TOLERANCE, Comparison
from tests.parity.registry import Checks
from tests.parity.shares import WIDTH, Block
from tests.parity.together import told
from weft.compat.modelparallel import interface as smp
from weft.errors import ConfigError, DivergenceError, UsageError
from weft.torch.activation_checkpointing import set_activation_checkpointing
from weft.torch.replicas.full_tensors import full_tensor, is_sharded, share_of
from weft.torch.replicas.sharding.layers import blocks

CHECKS = Checks()
STEPS, ROWS, WORDS, CLIP = 3, 16, 11, 0.05
DEGREES = (4, 2)
given = CHECKS.given


class Net(nn.Module):
    """Tied weights, frozen ones, a scalar, a buffer that the forward pass writes, and layers of a kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(13) for _ in range(3))  # 13: no multiple of the ranks
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("calls", torch.zeros(()))
        self.blocks[1].inner.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def batch(step: int, whole_batch: bool = False) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    x, y = torch.randint(WORDS, (2, ROWS, 3), generator=numbers)
    return (x, y) if whole_batch else (x.chunk(weft.size())[weft.rank()], y.chunk(weft.size())[weft.rank()])


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-3)


class Job:
    def __init__(self, degree: int, **settings: Any) -> None:
        gc.collect()
        defaults = {
            "partitions": 1,
            "microbatches": 2,
            "shard_optimizer_state": False,
            "offload_activations": False,
            "offload_optimizer": False,
        }
        weft.init({**defaults, "sharded_data_parallel_degree": degree, **settings})
        net = Net()
        if settings.get("offload_activations"):
            for block in net.blocks:
                set_activation_checkpointing(block)
        if weft.rank():
            with torch.no_grad():
                net.scale.add_(1)  # a replica takes what the first one has
        self.model = weft.DistributedModel(net)
        self.optimizer = weft.DistributedOptimizer(optimizer_of(self.model))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.scaler = weft.amp.GradScaler("cpu", init_scale=64.0)
        self.steps = 0

        @weft.step
        def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(model, x, y)
            model.backward(self.scaler.scale(loss))
            return loss

        self.step = step

    def train(self, steps: int, each: Callable[[int, float], None] = lambda *_: None) -> list[float]:
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.step(self.model, *batch(self.steps)).reduce_mean().detach()
            self.scaler.unscale_(self.optimizer)
            norm = float(weft.clip_grad_norm_(self.model, CLIP))
            each(self.steps, norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.steps += 1
            dist.all_reduce(loss, group=weft.get_world_process_group())
            losses.append(loss.item() / weft.size())
        return losses


def named(net: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): full_tensor(p.detach()).clone() for name, p in net.named_parameters()
    }


def close(group: str, actual: dict[str, Any], expected: dict[str, Any]) -> None:
    comparison = Comparison(TOLERANCE)
    comparison.tensors(group, actual, expected, max(v.abs().max().item() for v in expected.values()))
    assert comparison.ok and set(actual) == set(expected), comparison.report()


def train_alone(steps: int) -> tuple[list[Any], dict[str, Tensor], list[float]]:
    """One process: gradients and norm of every step, the parameters at the end, the losses."""
    net = Net()
    optimizer = optimizer_of(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found, losses = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, *batch(step, True))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP).item()
        found.append(({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}, norm))
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return found, copy.deepcopy(named(net)), losses


@CHECKS.check
def trains_as_one_process() -> None:
    expected, parameters, losses = train_alone(STEPS)
    numel = sum(p.numel() for p in Net().parameters())
    for degree, settings in ((4, {}), (2, {}), (2, {"offload_activations": True, "offload_optimizer": True})):
        job = Job(degree, **settings)
        assert (
            job.model.sharded
            and len(blocks(Net())) == 3
            and all(is_sharded(p) for p in job.model.parameters())
        )

        def each(step: int, norm: float, job: Job = job) -> None:
            params = job.model.local_named_parameters()
            mine = {n.removeprefix("module."): full_tensor(p.grad) for n, p in params if p.grad is not None}
            close(f"gradients of step {step}", mine, expected[step][0])
            assert abs(norm - expected[step][1]) < 1e-5 * norm, (norm, expected[step][1])

        found = job.train(STEPS, each)
        assert all(abs(a - b) < 1e-5 * b for a, b in zip(found, losses, strict=True)), (found, losses)
        close("parameters", named(job.model), parameters)
        held = [share_of(p).numel() for p in job.model.parameters()]
        assert sum(held) < 1.3 * numel / degree, (held, numel)
        states = [share_of(v).numel() for s in job.optimizer.state.values() for v in s.values()]
        assert sum(states) < 2.6 * numel / degree
        model = job.model.eval()
        with torch.no_grad():
            model(batch(0)[0])
        assert all(is_sharded(p) for p in model.parameters())
        state = model.state_dict()
        assert not any(is_sharded(value) for value in state.values())
        assert state["calls"] == STEPS * 2
        Net().load_state_dict(state)
        del job, model


@CHECKS.check
def states_are_whole_and_plain() -> None:
    job = Job(2)
    job.train(2)
    state, optimizer = copy.deepcopy(job.model.state_dict()), copy.deepcopy(job.optimizer.state_dict())
    partial = copy.deepcopy(job.optimizer.local_state_dict())
    local = copy.deepcopy(job.model.local_state_dict())
    assert job.model.state_dict(gather_to_rank0=True).keys() == (state.keys() if weft.rank() == 0 else set())
    rates = job.scheduler.state_dict()
    expected = job.train(2)
    del job
    for degree, model, saved in ((4, state, optimizer), (2, local, partial), (1, state, optimizer)):
        job = Job(degree)
        job.model.load_state_dict(model)
        job.optimizer.load_state_dict(copy.deepcopy(saved))
        job.scheduler.load_state_dict(rates)
        job.steps = 2
        losses = job.train(2)
        assert all(abs(a - b) < 1e-5 * b for a, b in zip(losses, expected, strict=True)), (losses, expected)
        del job


@CHECKS.check
def checkpoints_go_to_other_layouts() -> None:
    root = given.folder / "sharded"
    job = Job(2)
    job.train(2)
    also = {"scheduler": job.scheduler}
    weft.save_checkpoint(root, "part", model=job.model, optimizer=job.optimizer, also=also)
    weft.save_checkpoint(root, "full", partial=False, model=job.model)
    parameters = named(job.model)
    expected = job.train(2)
    del job
    for degree, settings in ((2, {}), (4, {}), (1, {}), (1, {"shard_optimizer_state": True})):
        job = Job(degree, **settings)
        weft.resume_from_checkpoint(
            root, "part", model=job.model, optimizer=job.optimizer, also={"scheduler": job.scheduler}
        )
        job.steps = 2
        losses = job.train(2)
        assert all(abs(a - b) < 1e-5 * b for a, b in zip(losses, expected, strict=True)), (losses, expected)
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
    model = weft.DistributedModel(Choosing(kind))

    @weft.step
    def step(model: Any, x: Tensor) -> None:
        model.backward(model(x).square().mean())

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
        optimizer = smp.DistributedOptimizer(optimizer_of(model))

        @smp.step
        def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(model, x, y)
            model.backward(loss)
            return loss

        losses, norms = [], []
        for number in range(STEPS):
            optimizer.zero_grad()
            losses.append(step(model, *batch(number)).reduce_mean().item())
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
