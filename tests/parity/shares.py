"""Replicas that share an optimizer's state train as those that each have all of it; started by `test_shares.py`.

    shares.py --folder FOLDER --partitions 2 check...

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft.torch as weft
from tests import models, training
from tests.parity.registry import Checks
from tests.parity.together import told
from tests.training import STEPS, ByAllGradients, mean_squared_error, squares, start, step_of
from weft.compat.modelparallel.optimizers import FusedLAMB
from weft.errors import UsageError
from weft.torch.offload import states

CHECKS = Checks()
ROWS, WIDTH = 8, 12
given = CHECKS.given


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(models.Block(WIDTH) for _ in range(4)))


class Job(training.Job):
    """A model and what trains it. `shared`: replicas share the optimizer's state. `places`: where its blocks go, so
    that all jobs are split alike, whatever a busy machine measures."""

    max_norm = 1e9

    def __init__(
        self,
        shared: bool,
        optimizer_of: Callable[[Iterable[Any]], torch.optim.Optimizer],
        net: nn.Module | None = None,
        places: Mapping[str, int] = MappingProxyType({"0": 0, "1": 0, "2": 1, "3": 1}),
    ) -> None:
        settings = {"partitions": given.partitions, "ddp": True, "default_partition": 0}
        start(**settings, auto_partition=False, shard_optimizer_state=shared)
        net = network() if net is None else net
        for name, partition in places.items():
            weft.set_partition(net.get_submodule(name), min(partition, given.partitions - 1))
        super().__init__(net, mean_squared_error, optimizer_of, scale=64.0, decay=0.5)

    def batch(self, number: int) -> tuple[Tensor, ...]:
        return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).unbind()

    def clip(self, most: float) -> Any:
        return weft.clip_grad_norm_(self.model, most)

    def train(self, steps: int) -> list[float]:
        """The losses of all samples."""
        own = super().train(steps, self.max_norm)
        return [sum(each) / len(each) for each in zip(*weft.allgather(own, weft.RDP_GROUP), strict=True)]

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.local_named_parameters()}

    def state_bytes(self) -> int:
        states = [v for entry in self.optimizer.state.values() for v in entry.values() if torch.is_tensor(v)]
        return sum(v.numel() * v.element_size() for v in states)


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def same(one: dict[Any, Any], other: dict[Any, Any], tolerance: float = 0.0) -> None:
    assert set(one) == set(other), set(one) ^ set(other)
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=tolerance, atol=tolerance / 10, msg=lambda m, n=name: f"{n}: {m}"
        )


def compare(make: Callable[[bool], Job]) -> tuple[Job, int]:
    """Trains without and with sharing; the job with it, and the bytes of state without."""
    job = make(False)
    losses, rates = job.train(STEPS), [group["lr"] for group in job.optimizer.param_groups]
    parameters, whole_bytes = job.parameters(), job.state_bytes()
    state = job.optimizer.state_dict()
    del job
    job = make(True)
    assert job.train(STEPS) == losses
    assert [group["lr"] for group in job.optimizer.param_groups] == rates
    same(job.parameters(), parameters)
    whole = job.optimizer.state_dict()
    assert whole["param_groups"] == state["param_groups"] and list(whole["state"]) == list(state["state"])
    for number, entry in state["state"].items():
        same(whole["state"][number], entry)
    return job, whole_bytes


# --- training -----------------------------------------------------------------------------------------------


@CHECKS.check
def optimizers_compute_the_same_with_half_the_state() -> None:
    for optimizer_of in (adamw, sgd, FusedLAMB, torch.optim.Adagrad):
        job, whole_bytes = compare(lambda shared, of=optimizer_of: Job(shared, of))  # type: ignore[misc]
        assert 0.4 * whole_bytes < job.state_bytes() < 0.6 * whole_bytes, optimizer_of
        del job


class Averaging(torch.optim.Optimizer):
    """Trains weights ahead of an average, which it brings for evaluation, as schedule-free optimizers do."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1, "training": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad, alpha=group["lr"])
                    mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                    mean.lerp_(weight, 0.5)

    def eval(self) -> None:
        self._swap(False)

    def train(self) -> None:
        self._swap(True)

    def _swap(self, training: bool) -> None:
        for group in self.param_groups:
            for weight in group["params"] if group["training"] is not training else ():
                if "mean" in self.state[weight]:
                    held = weight.detach().clone()
                    weight.data.copy_(self.state[weight]["mean"])
                    self.state[weight]["mean"] = held
            group["training"] = training


@CHECKS.check
def weights_for_evaluation_reach_all_replicas() -> None:
    found = []
    for shared in (False, True):
        job = Job(shared, Averaging)
        losses = job.train(2)
        job.optimizer.eval()
        evaluated = job.parameters()
        job.optimizer.train()
        losses += job.train(1)
        found.append((losses, evaluated, job.parameters()))
        del job
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        same(one, other)


@CHECKS.check
def optimizers_that_look_at_several_weights_are_refused() -> None:
    net = network()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    job = Job(True, ByAllGradients, net)
    with pytest.raises(UsageError, match='looks at several weights .*"(partitions|shard_optimizer_state)": '):
        job.train(1)
    same(before, job.model.state_dict())


def grouped(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    kept = list(parameters)
    groups = [
        {"params": [p for p in kept if p.dim() > 1]},
        {"params": [p for p in kept if p.dim() < 2], "lr": 0.5},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


@CHECKS.check
def groups_clipping_and_frozen_parameters() -> None:
    def make(shared: bool) -> Job:
        net = network()
        for frozen in (net[0].up, net[2].norm, net[3]):
            frozen.requires_grad_(False)
        job = Job(shared, grouped, net)
        job.max_norm = 0.01
        return job

    jobs = []
    for shared in (False, True):
        job = make(shared)
        losses = job.train(2)
        job.model.module[2].norm.requires_grad_(True)
        added = nn.Parameter(torch.ones(3))
        job.optimizer.add_param_group({"params": [added]})
        added.grad = torch.ones(3)
        jobs.append((losses + job.train(2), job.parameters(), added.detach().clone()))
        del job
    assert jobs[0][0] == jobs[1][0] and torch.equal(jobs[0][2], jobs[1][2])
    same(jobs[0][1], jobs[1][1])


@CHECKS.check
def a_rank_without_parameters() -> None:
    job, _ = compare(lambda shared: Job(shared, adamw, places={"0": 0}))
    assert (weft.pp_rank() == 0) == bool(list(job.model.local_parameters()))


@CHECKS.check
def states_go_to_jobs_with_and_without_shares() -> None:
    job = Job(True, adamw)
    job.train(2)
    model, rates = copied(job.model.state_dict()), job.scheduler.state_dict()
    whole, partial = copied(job.optimizer.state_dict()), copied(job.optimizer.local_state_dict())
    share = copied(job.optimizer.local_state_dict(gather_if_shard=False))
    assert set(share["state"]) < set(partial["state"]) <= set(whole["state"])
    weft.save(share, str(given.folder / "optimizer"), v3=True)
    weft.barrier()
    share = weft.load(str(given.folder / "optimizer"))
    assert share["_weft_share"] == [weft.rdp_rank(), 2] and "_weft_share" not in partial
    share_bytes = job.state_bytes()
    expected = job.train(2)
    del job
    for shared, saved in ((True, whole), (True, partial), (True, share), (False, whole), (False, partial)):
        job = Job(shared, adamw)
        job.model.load_state_dict(model)
        job.scheduler.load_state_dict(rates)
        job.optimizer.load_state_dict(copied(saved))
        job.steps = 2
        assert job.train(2) == expected
        assert not shared or job.state_bytes() == share_bytes
        if not shared:
            with told(
                UsageError, f"this is the state of replica {weft.rdp_rank()} of 2 that shared it, for replica"
            ):
                job.optimizer.load_state_dict(share)
        elif job.model.partitioned:
            with told(UsageError, "join() does not fit shard_optimizer_state"), job.model.join():
                pass
        del job


@CHECKS.check
def masters_are_shared_too() -> None:
    from weft.compat.modelparallel import interface as smp

    records = []
    for shared in (False, True):
        gc.collect()
        smp.init({"partitions": given.partitions, "microbatches": 2, "ddp": True, "fp16": True,
                  "auto_partition": False, "default_partition": 0, "shard_optimizer_state": shared})  # fmt: skip
        net = network()
        for n, block in enumerate(net):
            weft.set_partition(block, min(n // 2, given.partitions - 1))
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(grouped(model.parameters()), dynamic_loss_scale=True,
                                             dynamic_loss_args={"init_scale": 64.0})  # fmt: skip

        step = step_of(squares)
        found, x = [], torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(weft.rdp_rank()))
        for number in range(STEPS + 2):
            optimizer.zero_grad()
            found.append(step(model, x).reduce_mean().item())
            if number == 1 and weft.rank() == 0:
                next(iter(model.local_parameters())).grad.fill_(float("inf"))
            if number == 1:
                first = next(iter(model.local_parameters())).grad
                dist.broadcast(first, weft.get_rdp_group()[0], group=weft.get_rdp_process_group())
            found.append(round(float(optimizer.clip_master_grads(0.01)), 5))
            optimizer.step()
            assert optimizer.overflow == (number == 1)
            if number == STEPS:
                saved, scales = copied(optimizer.state_dict()), optimizer.loss_scale
                weights = copied(model.state_dict())
                root = given.folder / f"masters-{weft.size()}-{shared}"
                weft.save_checkpoint(root, "middle", model=model, optimizer=optimizer)
        records.append((found, {n: p.detach().clone() for n, p in model.local_named_parameters()}, saved))
        assert len(optimizer.fp16_groups[0]) < len(list(model.local_parameters())) or not shared
        for way in ("states", "checkpoint"):
            if way == "states":
                model.load_state_dict(weights)
                optimizer.load_state_dict(copied(saved))
            else:
                weft.resume_from_checkpoint(root, "middle", model=model, random_states=False)
            assert optimizer.loss_scale == scales
            optimizer.zero_grad()
            assert step(model, x).reduce_mean().item() == found[-2]
            assert round(float(optimizer.clip_master_grads(0.01)), 5) == found[-1]
            optimizer.step()
            same(dict(model.local_named_parameters()), records[-1][1])
        del model, optimizer
    smp.init({"fp16": False})
    (losses, weights, saved), (shared_losses, shared_weights, shared_saved) = records
    # the norm is a sum in another order
    pairs = zip(losses, shared_losses, strict=True)
    assert all(math.isclose(one, other, rel_tol=1e-5) for one, other in pairs), (losses, shared_losses)
    same(shared_weights, weights, 1e-6)
    same(shared_saved["fp32_masters"], saved["fp32_masters"], 1e-6)  # the norm is a sum in another order
    for number, entry in saved["state"].items():
        same(shared_saved["state"][number], entry, 1e-6)


def copied(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: copied(value) for key, value in content.items()}
    if isinstance(content, list):
        return [copied(value) for value in content]
    return content.clone() if torch.is_tensor(content) else content


# --- checkpoints --------------------------------------------------------------------------------------------


@CHECKS.check
def checkpoints_go_to_other_layouts() -> None:
    """Resumes what is in the folder, with and without shares, then saves its own."""
    for earlier in sorted(given.folder.glob("*/losses.json")):
        for shared in (True, False):
            job = Job(shared, adamw)
            resume(job, earlier.parent)
            expected = json.loads(earlier.read_text())
            losses = job.train(2)
            assert all(abs(a - b) <= 1e-6 * b for a, b in zip(losses, expected, strict=True)), (
                losses,
                expected,
            )
            del job
    root = given.folder / f"{weft.size()}-{given.partitions}"
    job = Job(True, adamw)
    job.train(2)
    also = {"scheduler": job.scheduler}
    weft.save_checkpoint(root, "middle", model=job.model, optimizer=job.optimizer, also=also)
    losses = job.train(2)
    del job
    for shared in (True, False):
        job = Job(shared, adamw)
        resume(job, root)
        assert job.train(2) == losses
        del job
    if weft.rank() == 0:
        (root / "losses.json").write_text(json.dumps(losses))


def resume(job: Job, root: Path) -> None:
    weft.resume_from_checkpoint(
        root, model=job.model, optimizer=job.optimizer, also={"scheduler": job.scheduler}
    )
    job.steps = 2


@CHECKS.check
def all_replicas_have_to_save() -> None:
    from weft.checkpoint import meeting

    meeting.STUCK_S = 1.0
    job = Job(True, adamw)
    job.train(1)
    if weft.rdp_rank() == 0:
        with told(UsageError, "Call it on every rank, and not on one rank of a pipeline alone"):
            weft.save_checkpoint(given.folder / "part", "t", model=job.model, optimizer=job.optimizer)
    weft.barrier()


if __name__ == "__main__":
    if "offload_optimizer" in os.environ.get(
        "WEFT_SET", ""
    ):  # so that small states are offloaded, in many buckets
        states.BUCKET_BYTES, states.LEAST_BYTES = 300, 16
    CHECKS.run(sys.argv[1:], lambda: None)
