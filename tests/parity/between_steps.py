"""What one rank alone loads or sets, and several optimizers of a model; started by `test_between_steps.py`.

    between_steps.py --folder FOLDER check...

Each check runs in every layout that the number of ranks allows. Every rank asserts for itself.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import weft.torch as weft
from tests import models
from tests.parity.registry import Checks
from tests.training import step_of
from weft.errors import UsageError, WeftError
from weft.reduce.exchange import all_reduce_extreme

CHECKS = Checks()
given = CHECKS.given
WIDTH, ROWS, STEPS = 8, 8, 3

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "pipeline": {"partitions": 2},
        "copies": {},
        "tensors": {"tensor_parallel_degree": 2},
        "sequences": {"context_parallel_degree": 2},
        "shared states": {"shard_optimizer_state": True},
        "shared parameters": {"sharded_data_parallel_degree": 2},
    },
    4: {
        "pipelines": {"partitions": 2},
        "copies of tensors": {"tensor_parallel_degree": 2},
        "pipelines that share states": {"partitions": 2, "shard_optimizer_state": True},
        "pipelines that share parameters": {"partitions": 2, "sharded_data_parallel_degree": 2},
    },
}
SHARE_FROM_THE_START = ("shared states", "shared parameters")
"""Layouts in which a rank never has the whole state, which one rank alone could not give to all."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)) for _ in range(2)]
    return nn.Sequential(*blocks).double()


def loss_of(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (net(x) - 1).square().mean()


def batches() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return [torch.randn(ROWS, 4, WIDTH, generator=numbers, dtype=torch.float64) for _ in range(2 * STEPS)]


Made = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def momentum(parameters: list[nn.Parameter], **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **more)


class Alone:
    """One process that trains, each optimizer its own half of the parameters."""

    def __init__(self, *kinds: Made, before: Callable[[nn.Module], Any] | None = None) -> None:
        self.net = network()
        self.before = before and before(self.net)
        parameters = list(self.net.parameters())
        each = len(parameters) // len(kinds)
        self.optimizers = [made(parameters[n * each : (n + 1) * each]) for n, made in enumerate(kinds)]

    def step(self, x: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(x)
        for optimizer in self.optimizers:
            optimizer.step()

    def backward(self, x: Tensor) -> None:
        loss_of(self.net, x).backward()


class Split(Alone):
    """The same over the ranks."""

    def __init__(
        self, settings: Mapping[str, Any], *kinds: Made, before: Callable[[nn.Module], Any] | None = None
    ) -> None:
        gc.collect()
        weft.init({"microbatches": 2, "ddp": True, **settings})
        net = network()
        self.before = before and before(net)
        self.model = weft.DistributedModel(net)
        self.scaler = weft.amp.GradScaler("cpu", init_scale=4.0)
        parameters = list(self.model.parameters())
        each = len(parameters) // len(kinds)
        self.optimizers = [
            weft.DistributedOptimizer(made(parameters[n * each : (n + 1) * each]))
            for n, made in enumerate(kinds)
        ]
        train = step_of(loss_of)
        self.train = train

    def backward(self, x: Tensor) -> None:
        self.train(self.model, x.tensor_split(weft.rdp_size())[weft.rdp_rank()])

    def compare(self, alone: Alone, what: str) -> None:
        for name, value in self.model.state_dict().items():
            difference = float((value - alone.net.state_dict()[name]).abs().max())
            assert difference < 1e-12, f"{what}: {name} differs by {difference}"


def layouts() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, settings in LAYOUTS[int(os.environ["WORLD_SIZE"])].items():
        yield name, settings
        weft.shutdown()


# --- before the model is wrapped ----------------------------------------------------------------------------------


def alive(net: nn.Module) -> Tensor:
    """A result whose graph lives as long as the job."""
    return loss_of(net, batches()[-1])


def graded(net: nn.Module) -> None:
    alive(net).backward()


def masked(net: nn.Module) -> None:
    """Half of each gradient counts, as where parts of weights are frozen."""
    for parameter in net.parameters():
        parameter.register_hook(lambda grad: grad * (torch.arange(grad.numel()).view(grad.shape) % 2))


@CHECKS.of_each("alive", "graded", "masked")
def what_happened_before_the_model_was_wrapped(kind: str) -> None:
    """Graphs of it that are alive, gradients that it has, hooks for its gradients."""
    before = {"alive": alive, "graded": graded, "masked": masked}[kind]
    for layout, settings in layouts():
        alone, split = Alone(momentum, before=before), Split(settings, momentum, before=before)
        for number, x in enumerate(batches()):
            for each in (alone, split):
                if number == 0:  # gradients from before count
                    each.backward(x)
                    each.optimizers[0].step()
                else:
                    each.step(x)
        split.compare(alone, layout)


@CHECKS.check
def hooks_that_come_later() -> None:
    """For gradients of shards they are an error; elsewhere they run."""
    for layout, settings in layouts():
        alone, split = Alone(momentum), Split(settings, momentum)
        alone.step(batches()[0])
        split.step(batches()[0])
        masked(alone.net)
        masked(split.model)
        if "tensors" in layout or layout == "shared parameters":
            with pytest.raises(UsageError, match="hook .*: register (it|the hook) before"):
                split.step(batches()[1])
            continue
        for x in batches()[1:]:
            alone.step(x)
            split.step(x)
        split.compare(alone, layout)


@CHECKS.check
def a_hook_that_takes_gradients_before_replicas_average_them() -> None:
    def take(parameter: Tensor) -> None:
        parameter.grad = None

    for early in (True, False):
        for layout, settings in layouts():
            if layout not in ("copies", "shared states"):
                continue
            split = Split(
                settings, momentum, before=lambda net, early=early: hooked(net, take) if early else None
            )  # type: ignore[misc]
            if not early:
                hooked(split.model, take)
            with pytest.raises(
                UsageError, match="a hook of the script takes the gradient of .* before replicas"
            ):
                split.backward(batches()[0])


@CHECKS.check
def weights_that_are_tied_or_replaced_after_the_model_was_wrapped() -> None:
    def tie(net: Any) -> None:
        net[1][0].weight = net[0][0].weight

    def replace(net: Any) -> None:
        net[0][0].weight = nn.Parameter(torch.ones(64, WIDTH, dtype=torch.float64))

    for change in (tie, replace):
        for layout, settings in layouts():
            alone, split = Alone(momentum), Split(settings, momentum)
            change(alone.net)
            change(split.model.module)
            if layout == "shared parameters":
                with pytest.raises(UsageError, match="was replaced, or tied to another parameter, after"):
                    split.backward(batches()[0])
                continue
            alone.optimizers = [momentum([*alone.net.parameters()])]
            split.optimizers = [weft.DistributedOptimizer(momentum([*split.model.parameters()]))]
            for x in batches():
                alone.step(x)
                split.step(x)
            split.compare(alone, layout)


@CHECKS.check
def a_layer_that_is_not_wrapped() -> None:
    """Where replicas have other samples nobody averages its gradients; elsewhere it trains as in one process."""
    for layout, settings in layouts():
        torch.manual_seed(1)
        heads = [nn.Linear(WIDTH, 3).double() for _ in range(2)]
        heads[1].load_state_dict(heads[0].state_dict())
        alone, split = Alone(momentum), Split(settings, momentum)
        train = step_of(lambda net, head, x: loss_of(lambda x: head(net(x)), x))
        if weft.rdp_size() > 1:
            with pytest.raises(UsageError, match=r"of shape \[3, 8\] outside of the model"):
                train(split.model, heads[1], batches()[0].tensor_split(weft.rdp_size())[weft.rdp_rank()])
            continue
        optimizers = [momentum([*net.parameters()]) for net in (alone.net, heads[0], split.model, heads[1])]
        for x in batches():
            for optimizer in optimizers:
                optimizer.zero_grad()
            train(split.model, heads[1], x)
            loss_of(nn.Sequential(alone.net, heads[0]), x).backward()
            for optimizer in optimizers:
                optimizer.step()
        split.compare(alone, layout)
        torch.testing.assert_close(heads[0].state_dict(), heads[1].state_dict(), rtol=0, atol=1e-12)


def hooked(net: nn.Module, hook: Callable[[Tensor], None]) -> None:
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


# --- before the first step: what the first rank has goes to all -------------------------------------------------


def trained() -> Alone:
    alone = Alone(adam, momentum)
    for x in batches()[:STEPS]:
        alone.step(x)
    return alone


def load_weights(job: Any, alone: Alone) -> None:
    job.model.load_state_dict(copy.deepcopy(alone.net.state_dict()))


def load_states(job: Any, alone: Alone) -> None:
    for mine, other in zip(job.optimizers, alone.optimizers, strict=True):
        mine.load_state_dict(copy.deepcopy(other.state_dict()))


def set_rate(job: Any, alone: Alone) -> None:
    job.optimizers[1].param_groups[0]["lr"] = 0.003


BEFORE = {"weights": load_weights, "states": load_states, "rate": set_rate}


@CHECKS.of_each(*BEFORE)
def before_the_first_step(what: str) -> None:
    """One rank alone loads or sets it; ranks train as one process that has loaded it."""
    for layout, settings in layouts():
        if layout in SHARE_FROM_THE_START and what != "rate":
            continue
        source, alone, job = trained(), Alone(adam, momentum), Split(settings, adam, momentum)
        if what == "weights":
            alone.net.load_state_dict(source.net.state_dict())
        elif what == "states":
            load_states(alone, source)
        else:
            set_rate(alone, source)
        if weft.rank() == 0:
            BEFORE[what](job, source)
        for x in batches()[STEPS:]:
            alone.step(x)
            job.step(x)
        job.compare(alone, f"{what} in {layout}")


@CHECKS.check
def a_scale_before_the_first_step() -> None:
    for layout, settings in layouts():
        job = Split(settings, adam)
        if weft.rank() == 0:
            job.scaler.load_state_dict({**job.scaler.state_dict(), "scale": 1024.0})
        job.step(batches()[0])
        assert job.scaler.get_scale() == 1024.0, layout


# --- after it: a difference ends the job with an error that names it ----------------------------------------------


def set_betas(job: Any) -> None:
    job.optimizers[0].param_groups[0]["betas"] = (0.5, 0.9)


def load_scheduler(job: Any) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizers[0], lambda step: 1 / (1 + step))
    scheduler.step()


def load_scale(job: Any) -> None:
    job.scaler.load_state_dict({**job.scaler.state_dict(), "scale": 1024.0})


def write_weights(job: Any) -> None:
    with torch.no_grad():
        next(job.model.local_parameters()).mul_(2)


AFTER: dict[str, tuple[Callable[[Any], None], str]] = {
    "weights": (lambda job: load_weights(job, trained()), "the number of states loaded into the model"),
    "states": (lambda job: load_states(job, trained()), "the number of states loaded into the optimizer 0"),
    "rate": (lambda job: set_rate(job, trained()), "lr of the optimizer 1 is 0.003 on rank 0"),
    "betas": (set_betas, "betas of the optimizer 0 is (0.5, 0.9) on rank 0"),
    "scheduler": (load_scheduler, "lr of the optimizer 0 is 0.005 on rank 0"),
    "scale": (load_scale, "the scale of the scaler is 1024.0 on rank 0"),
    "written": (write_weights, "the ranks have other weights, which the script wrote between steps"),
}


@CHECKS.of_each(*AFTER)
def after_a_step(what: str) -> None:
    """One rank alone loads or sets it: the next step names it, on one rank at least, and ends on all."""
    change, text = AFTER[what]
    for layout, settings in layouts():
        alike = layout in ("copies", "sequences", "shared states")
        if what == "written" and not alike:
            continue  # no other rank has the same weights
        if what in ("weights", "states") and "share" in layout:
            continue  # loading is something that all do together there
        job = Split(settings, adam, momentum)
        first, second, *_ = batches()
        job.step(first)
        if weft.rank() == 0:
            change(job)
        told = ""
        try:
            job.step(second)
        except WeftError as error:
            told = str(error)
        assert told, f"{what} in {layout}: no rank says anything"
        assert text in told or "rank" in told, f"{what} in {layout}: {told}"
        texts = weft.allgather(told)
        assert any(text in each for each in texts), f"{what} in {layout}: {texts}"


@CHECKS.check
def a_save_of_different_settings_is_refused() -> None:
    for layout, settings in layouts():
        job = Split(settings, adam, momentum)
        job.step(batches()[0])
        if weft.rank() == 0:
            set_rate(job, trained())
        folder = Path(given.folder) / "refused"
        with pytest.raises(WeftError, match="lr of the optimizer 1 is 0.003 on rank 0 but 0.05 on rank 1"):
            weft.save_checkpoint(folder, "a", model=job.model, optimizer=job.optimizers)
        assert not list(folder.glob("a*")), layout


@CHECKS.check
def a_save_hides_no_weights_that_one_rank_wrote() -> None:
    job = Split(LAYOUTS[2]["copies"], adam, momentum)
    job.step(batches()[0])
    if weft.rank() == 0:
        write_weights(job)
    weft.save_checkpoint(Path(given.folder) / "hides", "a", model=job.model, optimizer=job.optimizers)
    with pytest.raises(WeftError, match="which the script wrote between steps"):
        job.step(batches()[1])
    weft.shutdown()


@CHECKS.check
def a_weight_that_one_rank_wrote_is_seen_beside_an_average() -> None:
    """The average has the same names, and is written on all ranks after each step."""
    job = Split(LAYOUTS[2]["copies"], adam)
    average = copy.deepcopy(job.model)
    for x in batches()[:2]:
        job.step(x)
        with torch.no_grad():
            for mean, now in zip(average.parameters(), job.model.parameters(), strict=True):
                mean.lerp_(now, 0.5)
    if weft.rank() == 0:
        write_weights(job)
    with pytest.raises(WeftError, match="which the script wrote between steps"):
        job.step(batches()[2])
    weft.shutdown()


@CHECKS.of_each(*AFTER)
def ends_the_job(what: str) -> None:
    """The same with copies of a pipeline, none of whose ranks catches the error."""
    job = Split(LAYOUTS[4]["pipelines"], adam, momentum)
    first, second, *_ = batches()
    job.step(first)
    if weft.rank() in (1, 3) and what != "written" or weft.rank() == 3:
        AFTER[what][0](job)
    job.step(second)


@CHECKS.check
def settings_that_are_functions_are_left_alone() -> None:
    for layout, settings in layouts():
        job, alone = Split(settings, adam), Alone(adam)
        job.optimizers[0].param_groups[0]["rule"] = lambda step: step
        for x in batches()[:2]:
            job.step(x)
            alone.step(x)
        job.compare(alone, layout)


@CHECKS.check
def an_optimizer_that_nobody_holds_does_not_count() -> None:
    """It waits for the collector on one rank, and is gone on the others."""
    for _, settings in layouts():
        weft.init({"microbatches": 2, "ddp": True, **settings})
        model = weft.DistributedModel(network())
        optimizer = weft.DistributedOptimizer(momentum(list(model.parameters())))
        gc.disable()
        circle: list[Any] = [weft.DistributedOptimizer(momentum(list(model.parameters())))]
        circle.append(circle)
        del circle
        if weft.rank() == 0:
            gc.collect()
        train = step_of(loss_of)
        train(model, batches()[0])
        optimizer.step()
        gc.enable()


@CHECKS.check
def alike_on_all_ranks_is_no_fault() -> None:
    for layout, settings in layouts():
        job, alone = Split(settings, adam, momentum), Alone(adam, momentum)
        for number, x in enumerate(batches()):
            for each in (job, alone):
                each.step(x)
                set_rate(each, alone)
                if number == 1:
                    load_states(each, trained())
                if number == 2 and "share" not in layout:
                    each.net.load_state_dict(trained().net.state_dict()) if each is alone else load_weights(
                        each, trained()
                    )
        job.compare(alone, layout)


# --- several optimizers -------------------------------------------------------------------------------------------


@CHECKS.check
def several_optimizers_come_back() -> None:
    """From `weft.checkpoints`, in this layout and in one process."""
    folder = Path(given.folder) / "several"
    alone = Alone(adam, momentum)
    for x in batches():
        alone.step(x)
    for layout, settings in layouts():
        for steps in (STEPS, 2 * STEPS):
            job = Split(settings, adam, momentum)
            if steps == STEPS and weft.rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            weft.barrier()
            with weft.checkpoints(folder, every=STEPS) as run:
                for number in run.steps(steps):
                    job.step(batches()[number - 1])
            if steps == STEPS:
                weft.shutdown()
        job.compare(alone, layout)


@CHECKS.check
def several_optimizers_go_to_other_layouts() -> None:
    """Saved in each layout, resumed in the next one."""
    alone = Alone(momentum, adam)
    for x in batches():
        alone.step(x)
    found = [*LAYOUTS[int(os.environ["WORLD_SIZE"])].items()]
    for (before, first), (after, second) in zip(found, [*found[1:], found[0]], strict=True):
        folder = Path(given.folder) / before.replace(" ", "-")
        job = Split(first, momentum, adam)
        for x in batches()[:STEPS]:
            job.step(x)
        weft.save_checkpoint(folder, "a", model=job.model, optimizer=job.optimizers)
        weft.shutdown()
        job = Split(second, momentum, adam)
        weft.resume_from_checkpoint(folder, "a")
        for x in batches()[STEPS:]:
            job.step(x)
        job.compare(alone, f"from {before} to {after}")
        weft.shutdown()


# --- numbers that are not finite, and microbatches that count nothing ---------------------------------------------

NORMS = (0.5, 1.0, 2.0, 3.0, float("inf"), float("-inf"))


@CHECKS.check
def norms_are_those_of_one_process() -> None:
    """Of every type; and NaN or inf if one number of one rank is."""
    for layout, settings in layouts():
        if layout in ("copies", *SHARE_FROM_THE_START):
            continue  # each rank has all gradients
        job, alone = Split(settings, adam), Alone(adam)
        x = batches()[0]
        job.backward(x)
        alone.backward(x)
        for kind in NORMS:
            one = nn.utils.clip_grad_norm_(alone.net.parameters(), 1e9, kind)
            split = nn.utils.clip_grad_norm_(job.model.parameters(), 1e9, kind)
            torch.testing.assert_close(split, one, msg=f"{layout}, {kind}: {split} instead of {one}")
        if weft.rdp_size() > 1 or layout == "sequences":
            continue  # all have the same gradients, and ask nobody else
        for bad, rank, kind in itertools.product((float("nan"), float("inf")), range(4), NORMS[:-1]):
            job.optimizers[0].zero_grad()
            job.backward(x)
            if weft.mp_rank() == rank % 2:  # one that is cut over ranks, or one that they have alike
                [*job.model.local_parameters()][rank // 2 - 1].grad.fill_(bad)
            with pytest.raises(RuntimeError, match="norm of the gradients over all ranks is (nan|inf)"):
                nn.utils.clip_grad_norm_(job.model.parameters(), 1e9, kind, error_if_nonfinite=True)
            grads = [each.grad for each in job.model.local_parameters()]
            assert not nn.utils.get_total_norm(grads, kind).isfinite(), (layout, kind, rank)
            norm = nn.utils.clip_grad_norm_(job.model.parameters(), 1e9, kind).item()
            assert math.isnan(norm) if math.isnan(bad) else norm == bad, (layout, kind, rank, norm)


@CHECKS.check
def overflows_of_one_rank_are_all_ranks() -> None:
    for layout, settings in layouts():
        job, scale = Split(settings, adam), 4.0
        for bad in (float("nan"), float("inf")):
            for rank in range(weft.size()):
                job.backward(batches()[0])
                if weft.rank() == rank:
                    for parameter in job.model.local_parameters():
                        if parameter.grad is not None:
                            parameter.grad.mul_(bad)
                job.scaler.scale(torch.ones(()))
                job.scaler.step(job.optimizers[0])
                job.scaler.update()
                scale /= 2
                assert job.scaler.get_scale() == scale, (layout, bad, rank, job.scaler.get_scale())
                job.optimizers[0].zero_grad()


@CHECKS.check
def the_largest_of_several_ranks_may_be_nan() -> None:
    weft.init({"microbatches": 2, "ddp": True})
    group = weft.get_world_process_group()
    for rank in range(weft.size()):
        for op, extreme in ((dist.ReduceOp.MAX, float("inf")), (dist.ReduceOp.MIN, float("-inf"))):
            found = torch.tensor([1.0 + weft.rank(), 2.0, 3.0, -extreme])
            if weft.rank() == rank:
                found[1:3] = torch.tensor([float("nan"), extreme])
            all_reduce_extreme(found, op, group)
            assert found[0] == (weft.size() if op == dist.ReduceOp.MAX else 1)
            assert found[1].isnan() and found[2] == extreme and found[3] == -extreme, found
    weft.shutdown()


def mean_of_some(net: Callable[[Tensor], Tensor], x: Tensor, mask: Tensor) -> Tensor:
    return ((net(x) - 1).square().mean(-1) * mask).sum() / mask.sum()


@CHECKS.check
def a_microbatch_that_counts_nothing_takes_no_part() -> None:
    """Its loss is 0 / 0; loss and gradients are those of the whole batch."""
    for layout, settings in layouts():
        if layout in ("shared parameters", "pipelines that share parameters"):
            continue  # replicas gather and add up in each backward pass: all take part
        x, mask = batches()[0], torch.ones(ROWS, 4, dtype=torch.float64)
        mask[2:4] = mask[0, 2:] = 0
        net = network()
        loss = mean_of_some(net, x, mask)
        loss.backward()
        job = Split({**settings, "microbatches": 4}, adam)

        @weft.step(weight=lambda model, x, mask: mask.sum())
        def train(model: Any, x: Tensor, mask: Tensor) -> Tensor:
            loss = mean_of_some(model, x, mask)
            model.backward(loss)
            return loss

        torch.testing.assert_close(train(job.model, x, mask).reduce_mean(), loss.detach())
        for mine in (job.model.module, net):
            torch.optim.SGD(mine.parameters(), lr=0.1).step()
        for name, value in job.model.state_dict().items():
            torch.testing.assert_close(value, net.state_dict()[name], msg=f"{name} in {layout}")


class Kept(nn.Module):
    """A layer that keeps losses of its own in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.number = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        self.loss = y.square().mean()
        self.losses = [self.loss, {"twice": 2 * self.loss}]
        self.number = float(self.loss.detach())
        if self.training:
            self.trained = self.loss
        return x + y


def rounded() -> nn.Module:
    """Layers whose result goes on in less precision, as logits of some models do."""
    return models.Composed(lambda net, x: net.layers(x).float().double(), layers=network())


KEPT: dict[str, Callable[[Any], Any]] = {
    "loss": lambda layer: layer.loss,
    "list": lambda layer: layer.losses[0] + layer.losses[1]["twice"],
    "number": lambda layer: layer.number * layer.loss,
    "while training": lambda layer: layer.trained,
}
"""What layers keep in their attributes, as the step reads it."""


@CHECKS.of_each(*KEPT)
def what_layers_keep_is_read_by_the_step(what: str) -> None:
    """With a first step that reads it, and with one that does not and evaluates."""

    def loss_with(model: Any, layers: Any, x: Tensor) -> Tensor:
        return loss_of(model, x) + 0.1 * sum(map(KEPT[what], layers))

    for evaluates, (layout, settings) in (
        (evaluates, each) for evaluates in (False, True) for each in layouts()
    ):
        if layout in ("sequences", "shared parameters", "pipelines that share parameters"):
            continue  # each rank has the loss of its own part; FSDP2 sees results of layers only
        x = batches()[0]
        net, optimizer = kept(lambda net: net)
        weft.shutdown()
        weft.init({"microbatches": 2, "ddp": True, **settings})
        model, own = kept(weft.DistributedModel)

        @weft.step
        def evaluate(model: Any, x: Tensor) -> Tensor:
            return model(x)

        train = step_of(lambda model, x: loss_with(model, model.module, x))
        if evaluates:
            with torch.no_grad():
                evaluate(model.eval(), x)
        model.train()
        for number in range(2):
            expected = sum(loss_with(net, net, half) for half in x.chunk(2)) / 2
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            own.zero_grad()
            loss = train(model, x)
            own.step()
            torch.testing.assert_close(
                loss.reduce_mean().reshape(()), expected.detach(), msg=f"{layout}, {number}"
            )
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, net.state_dict()[name], msg=f"{name} in {layout}")


class Checkpointed(nn.Module):
    """A layer that the backward pass runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Kept()

    def again(self, x: Tensor) -> Tensor:
        return torch.sin(self.layer(x))  # which keeps something, so that all before it runs again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.again, x, use_reentrant=False) if self.training else self.again(x)


@CHECKS.check
def what_layers_keep_when_the_backward_pass_runs_them_again() -> None:
    for layout, settings in layouts():
        if layout in ("sequences", "shared parameters", "pipelines that share parameters"):
            continue  # as above
        x = batches()[0]
        net, optimizer = kept(lambda net: net, Checkpointed)
        weft.shutdown()
        weft.init({"microbatches": 2, "ddp": True, **settings})
        model, own = kept(weft.DistributedModel, Checkpointed)
        for number, each in enumerate(model.module):  # as units, however cheap they are
            weft.set_partition(each, min(number, weft.pp_size() - 1))

        @weft.step
        def evaluate(model: Any, x: Tensor) -> Tensor:
            return model(x)

        @weft.step
        def train(model: Any, x: Tensor, reads: bool) -> Any:
            model.backward(loss_of(model, x))
            if reads:
                return sum(read(each.layer).detach() for each in model.module for read in KEPT.values())
            return None

        for number in range(3):
            model.train()
            own.zero_grad()
            found = train(model, x, number == 2)
            own.step()
            optimizer.zero_grad()
            loss_of(net.train(), x).backward()
            told = []
            for half in x.chunk(2):
                net(half)
                told.append(sum(read(each.layer).detach() for each in net for read in KEPT.values()))
            optimizer.step()
            if number == 2:
                torch.testing.assert_close(found.reduce_mean(), torch.stack(told).mean(), msg=layout)
            with torch.no_grad():
                scores = evaluate(model.eval(), x).concat()
                torch.testing.assert_close(scores, net.eval()(x), msg=f"{layout}, {number}")
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, net.state_dict()[name], msg=f"{name} in {layout}")


def kept(
    wrap: Callable[[nn.Module], Any], layer: type[nn.Module] = Kept
) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(layer(), layer(), layer()).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer if isinstance(model, nn.Sequential) else weft.DistributedOptimizer(optimizer)


@CHECKS.check
def a_step_that_rounds_is_no_fault() -> None:
    """The proof of the first step measures by the least precise type, wherever it is."""
    for _, settings in layouts():
        weft.init({"microbatches": 2, "ddp": True, **settings})
        model = weft.DistributedModel(rounded())
        train = step_of(loss_of)
        train(model, batches()[0])


PENALTIES: dict[str, Callable[[nn.Module], Tensor]] = {
    "squares": lambda net: sum(p.square().sum() for p in net.parameters()),  # type: ignore[misc,return-value]
    "one weight": lambda net: (net[0][0].weight.T @ net[0][0].weight).square().sum(),
    "absolute values": lambda net: torch.cat([p.flatten() for p in net.parameters()]).abs().sum(),
}
REFUSED = {
    "tensors": "code outside of a cut module reads its weight",
    "shared parameters": "computes with its weight",
}


@CHECKS.of_each(*PENALTIES)
def penalties_on_weights_in_the_step(kind: str) -> None:
    """They count as in one process, or an error tells what to do instead."""
    for layout, settings in layouts():
        net = network()
        weft.init({"microbatches": 2, "ddp": True, **settings})
        model = weft.DistributedModel(network())
        optimizer = weft.DistributedOptimizer(momentum(list(model.parameters())))
        train = step_of(lambda model, x: loss_of(model, x) + 0.01 * PENALTIES[kind](model.module))
        x = batches()[0]
        mine = x.tensor_split(weft.rdp_size())[weft.rdp_rank()]
        if layout in REFUSED or "tensors" in layout:
            with pytest.raises(WeftError, match=REFUSED.get(layout, REFUSED["tensors"])):
                train(model, mine)
            continue
        train(model, mine)
        optimizer.step()
        (loss_of(net, x) + 0.01 * PENALTIES[kind](net)).backward()
        momentum(list(net.parameters())).step()
        for name, value in net.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, msg=f"{name} in {layout}")


READS: list[Callable[[Tensor], Any]] = [
    lambda p: float(p.square().sum()), lambda p: p.abs().max().item(), lambda p: bool(p.sum() > 0),
]  # fmt: skip


def read_out(net: Any) -> Tensor:
    return torch.tensor([float(read(p.detach())) for p in net.parameters() for read in READS])


@CHECKS.check
def numbers_read_out_of_shared_weights_are_those_of_the_whole() -> None:
    """PyTorch reads what this rank has of a DTensor."""
    for layout, settings in layouts():
        if layout != "shared parameters":
            continue
        weft.init({"microbatches": 2, **settings})
        model = weft.DistributedModel(network())

        @weft.step
        def train(model: Any, x: Tensor) -> Tensor:
            model.backward(loss_of(model, x))
            return read_out(model)

        for found in train(model, batches()[0]).outputs:
            torch.testing.assert_close(found, read_out(network()))
        with pytest.raises(WeftError, match="model.state_dict"):  # one rank may be alone here
            read_out(model)


class Tempered(nn.Module):
    """A layer with parameters of no dimension and of one number, and a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale, self.gate = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.fixed = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.fixed * self.gate * torch.tanh(self.scale * self.inner(x))


class Scalars(nn.Module):
    """Layers of a kind, and a temperature of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7 + 0.1 * weft.rank()))  # the first replica's counts
        self.layers = nn.Sequential(Tempered(), Tempered(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) / self.temperature


def groups(net: nn.Module, how: str) -> list[dict[str, Any]]:
    """What an optimizer gets: parameters that are updated at once, or one by one."""
    return [{"params": [p for p in net.parameters() if p.requires_grad], "foreach": how == "foreach"}]


@CHECKS.of_each("foreach", "loop")
def parameters_without_dimensions_where_replicas_share_others(how: str) -> None:
    """Steps, clipping, a scaler, gradients that add up and states are those of one process."""
    for layout, settings in layouts():
        if "share parameters" not in layout and "shared parameters" != layout:
            continue
        weft.init({"microbatches": 2, "ddp": True, **settings})
        torch.manual_seed(0)
        net = Scalars().double()
        with torch.no_grad():
            alone = copy.deepcopy(net)
            alone.temperature.fill_(0.7)
        model = weft.DistributedModel(net)
        made = [torch.optim.AdamW(groups(each, how), lr=0.05, eps=1e-3) for each in (model, alone)]
        optimizer, scaler = weft.DistributedOptimizer(made[0]), weft.amp.GradScaler("cpu", init_scale=4.0)

        @weft.step
        def train(model: Any, scaler: Any, x: Tensor) -> None:
            model.backward(scaler.scale(loss_of(model, x)))

        for number, x in enumerate(batches()):
            mine = x.tensor_split(weft.rdp_size())[weft.rdp_rank()]
            if number % 2 == 0:  # else gradients add up
                optimizer.zero_grad()
                made[1].zero_grad()
            with model.no_sync() if number == 2 else nullcontext():
                train(model, scaler, mine)
            loss_of(alone, x).backward()
            if number % 2 == 0:
                continue
            scaler.unscale_(optimizer)
            norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.05) for each in (model, alone)]
            torch.testing.assert_close(float(norms[0]), float(norms[1]))
            scaler.step(optimizer)
            scaler.update()
            made[1].step()
        state, kept = model.state_dict(), optimizer.state_dict()["state"]
        for name, value in alone.named_parameters():
            torch.testing.assert_close(state[name], value.detach(), msg=f"{name} in {layout}")
        assert float(state["layers.0.calls"]) == 2 * len(batches()), layout
        expected = made[1].state_dict()["state"]
        for number in kept:
            torch.testing.assert_close(kept[number]["exp_avg"], expected[number]["exp_avg"])


class Mixed(nn.Module):
    """Experts that ranks share one by one, on their way around."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.route(x).softmax(-1)
        return x + sum(shares[..., [n]] * expert(x) for n, expert in enumerate(self.experts))


class Words(nn.Module):
    """An embedding and scores of one weight, and attention between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scores = nn.Embedding(13, WIDTH), nn.Linear(WIDTH, 13)
        self.attend = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.scores.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.attend(self.embed(x.abs().sum(-1).long() % 13)))


COPIED: dict[str, Callable[[], nn.Module]] = {
    "linears": network,
    "experts": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixed(), nn.Linear(WIDTH, WIDTH)).double(),
    "words": lambda: Words().double(),
}


@CHECKS.of_each(*COPIED)
def copies_follow_the_cuts(kind: str) -> None:
    """Averages and copies of a model, made before its first step and after it, have its parts; a copy trains, too."""
    for layout, settings in layouts():
        if kind != "linears" and layout == "sequences":
            continue  # nothing in it could take a part of one
        torch.manual_seed(0)
        net = COPIED[kind]()
        weft.init({"microbatches": 2, "ddp": True, **settings})
        model = weft.DistributedModel(copy.deepcopy(net))
        if "share" in layout:
            if layout == "shared parameters":
                with pytest.raises(WeftError, match="are shared by replicas"):
                    copy.deepcopy(model)
            continue
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(1.5)
        # one rank alone loads other weights: copies get them, too
        if weft.rank() == 0:
            model.load_state_dict(net.state_dict())
        pairs = [(net, model), (copy.deepcopy(net), copy.deepcopy(model))]
        averages = [tuple(map(averaged, pairs[0]))]
        train = step_of(loss_of)
        optimizers = {}
        for number, x in enumerate(batches()[:STEPS]):
            for alone, split in pairs:
                if id(split) not in optimizers:
                    optimizers[id(split)] = (
                        momentum(list(alone.parameters())),
                        weft.DistributedOptimizer(momentum(list(split.parameters()))),
                    )
                for optimizer in optimizers[id(split)]:
                    optimizer.zero_grad()
                loss = loss_of(alone, x)
                loss.backward()
                mine = train(split, x.tensor_split(weft.rdp_size())[weft.rdp_rank()]).reduce_mean()
                if weft.rdp_size() == 1:
                    torch.testing.assert_close(mine, loss.detach())
                for optimizer in optimizers[id(split)]:
                    optimizer.step()
            if number == 0:
                pairs.append((copy.deepcopy(net), copy.deepcopy(model)))
                averages.append(tuple(map(averaged, pairs[0])))
            for alone_mean, split_mean in averages:
                alone_mean.update_parameters(net)
                split_mean.update_parameters(model)
        for alone, split in (*pairs, *((mean.module, twin.module) for mean, twin in averages)):
            state = split.state_dict()
            for name, value in alone.state_dict().items():
                torch.testing.assert_close(state[name], value, msg=f"{name} of {kind} in {layout}")


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


@CHECKS.check
def models_that_replicas_share_are_not_copied() -> None:
    """Not before they are shared either: the copy would keep all of each weight."""
    for layout, settings in layouts():
        if "share parameters" in layout or layout == "shared parameters":
            job = Split(settings, adam)
            with pytest.raises(
                WeftError,
                match="copy.deepcopy does not work for a model whose parameters or experts are shared",
            ):
                copy.deepcopy(job.model)


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
