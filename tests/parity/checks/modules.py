"""Modules with something special about them: statistics, hooks, checkpointing, mixed precision."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft.torch as weft
from tests import models
from tests.training import squares, step_of

from ..compare import device
from ..split import train_split
from .harness import (
    MICROBATCHES,
    WIDTH,
    check,
    placed,
    same_as_alone,
    seeded,
    sgd,
    squared_error,
    start,
    trained_alone,
    vectors,
)

ALTERNATING = {"a": 0, "b": 1, "c": 0}
OPPOSITE = {"a": 1, "b": 0, "c": 1}


def normalised() -> nn.Module:
    """Batch normalisation in parts and as parts, with both kinds of momentum."""
    return models.Composed(
        lambda net, x: net.c(torch.tanh(net.b(net.a(x)))),
        a=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        b=nn.BatchNorm1d(WIDTH, momentum=None),
        c=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.3, affine=False)),
    )


@check
def batch_normalisation() -> None:
    for places in (ALTERNATING, OPPOSITE, None):
        same_as_alone(seeded(normalised), vectors(rows=32), places=places)


@check
def another_step_calls_modules_more_often_than_the_traced_one() -> None:
    """Their statistics see the microbatches in order, from its first step on."""

    def once(backward: Callable[[Tensor], None], model: nn.Module, batch: Any) -> None:
        backward(squared_error(model, batch))

    def twice(backward: Callable[[Tensor], None], model: nn.Module, batch: Any) -> None:
        backward(squared_error(model, batch))
        backward(F.mse_loss(model(batch["y"]), batch["x"]))

    _same_with(seeded(normalised), once, twice)


def _same_with(net: nn.Module, first: Callable[..., None], second: Callable[..., None]) -> None:
    """Two steps of one function and two of another one leave what they leave in one process.

    They are given what goes backward, the model and the batch.
    """
    batches, alone = vectors(steps=4, rows=32), copy.deepcopy(net)
    optimizer = sgd(alone.parameters())
    for number, batch in enumerate(batches):
        for at in range(MICROBATCHES):
            part = {name: tensor.chunk(MICROBATCHES)[at] for name, tensor in batch.items()}
            (first if number < 2 else second)(lambda loss: (loss / MICROBATCHES).backward(), alone, part)
        optimizer.step()
        optimizer.zero_grad()
    start()
    model = weft.DistributedModel(net)
    optimizer = sgd(model.parameters())
    steps = [
        weft.step(lambda model, batch, way=way: way(model.backward, model, batch)) for way in (first, second)
    ]
    for number, batch in enumerate(batches):
        steps[number // 2](model, batch)
        optimizer.step()
        optimizer.zero_grad()
    expected = alone.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@check
def running_statistics_are_exact() -> None:
    """The first step traces a microbatch: it must count once, as in one process."""
    batches = vectors(steps=1, rows=32)
    expected = trained_alone(seeded(normalised), batches)
    start(auto_partition=False, default_partition=0)
    actual = train_split(seeded(normalised), batches, squared_error, sgd, places=ALTERNATING)
    assert actual.buffers, "this rank has no buffers"
    for name, value in actual.buffers.items():
        wanted = expected.buffers[name]
        if name.endswith("num_batches_tracked"):
            assert value == MICROBATCHES, f"{name}: {value}"
        torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


class Counting(nn.Module):
    """A block whose buffers change in each call, in the ways named.

    "count": a number in place; "average": a value of the activations in place; "replace": another tensor.
    """

    def __init__(self, ways: Collection[str]) -> None:
        super().__init__()
        self.ways = set(ways)
        self.block = models.Block()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("secret", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if "count" in self.ways:
            self.calls += 1
        if "average" in self.ways:
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        if "replace" in self.ways:
            self.secret = self.secret * 1.01
        return self.block(x - self.average) * self.secret


def counters(*ways: str) -> nn.Module:
    """Two of them and a plain block."""
    return models.Stack(a=Counting(ways), b=Counting(ways), c=models.Block())


@check
def buffers_that_a_model_writes() -> None:
    for places in (ALTERNATING, OPPOSITE, None):
        same_as_alone(seeded(counters, "count", "average", "replace"), vectors(), places=places)


def opened(*ways: str) -> None:
    """The parts of these modules lie apart, so that their own code is glue."""
    inside = {"a.block.up": 0, "a.block.down": 1, "b.block.up": 1, "b.block.down": 0, "c": 1}
    for places in (inside, {name: 1 - partition for name, partition in inside.items()}):
        same_as_alone(seeded(counters, *ways), vectors(), places=places)


@check
def buffers_that_glue_counts_in() -> None:
    opened("count")


@check
def normed_and_parametrized_weights() -> None:
    def net() -> nn.Module:
        return models.Composed(
            lambda net, x: net.c(F.gelu(net.b(F.gelu(net.a(x))))),
            a=nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
            b=nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
            c=nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        )

    for places in (ALTERNATING, None):
        same_as_alone(seeded(net), vectors(), places=places)


class Three(nn.Module):
    """Three blocks, run by `run` or one after the other."""

    def __init__(self, hooked: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = models.Block(), models.Block(), models.Block()
        self.calls: list[str] = []
        if hooked:
            self._hook()

    def _hook(self) -> None:
        def double(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            self.calls.append("before")
            return (args[0] * 2,)

        def shift(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            self.calls.append("after")
            return output + 0.5 * args[0]

        def scale(module: nn.Module, grads: tuple[Tensor], outputs: Any) -> tuple[Tensor]:
            self.calls.append("backward")
            return tuple(grad if grad is None else grad * 1.5 for grad in grads)

        for block in (self.a, self.b, self.c):
            block.register_forward_pre_hook(double)
            block.register_forward_hook(shift, with_kwargs=True)
            block.register_full_backward_hook(scale)
            block.up.weight.register_hook(lambda grad: grad.clamp(-0.05, 0.05))
        self.b.up.register_forward_hook(lambda module, args, output: output.tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


@check
def hooks_of_modules_and_parameters() -> None:
    for places in (ALTERNATING, OPPOSITE, None):
        alone = seeded(Three, hooked=True)
        same_as_alone(seeded(Three, hooked=True), vectors(), places=places, alone=alone)


@check
def hooks_run_once_for_each_microbatch() -> None:
    module = seeded(Three, hooked=True)
    model = placed(module, ALTERNATING)
    step = step_of(squares)
    step(model, vectors()[0]["x"])
    module.calls.clear()
    step(model, vectors()[1]["x"])
    mine = sum(1 for partition in ALTERNATING.values() if partition == weft.pp_rank())
    for kind in ("before", "after", "backward"):
        assert module.calls.count(kind) == mine * MICROBATCHES, f"{kind}: {module.calls.count(kind)} calls"


class Scaled(nn.Linear):
    """Computes with what hooks have left: a buffer, a number, a tensor."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.largest, self.shift, self.last = 1.0, torch.zeros(()), None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.mean) / self.largest + self.shift


def follow(module: Any, args: tuple[Tensor]) -> None:
    module.mean.lerp_(args[0].detach().mean(0), 0.3)


def measure(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
    module.largest = float(module.weight.abs().max())
    module.shift = args[0].mean()
    return (args[0] * 2,)


def add_mean(module: Any, args: Any, result: Tensor) -> Tensor:
    return result + module.mean


def keep(module: Any, args: Any, result: Tensor) -> None:
    module.last = result


def standardise(module: Any, args: Any) -> None:
    module.weight = module.raw - module.raw.mean(1, keepdim=True)


def standardised(linear: nn.Linear) -> nn.Linear:
    raw = linear.weight
    del linear.weight
    linear.raw, linear.weight = raw, raw.detach()
    linear.register_forward_pre_hook(standardise)
    return linear


def scaled() -> nn.Module:
    layer = Scaled()
    for hook in (follow, measure):
        layer.register_forward_pre_hook(hook)
    for after in (add_mean, keep):
        layer.register_forward_hook(after)
    return layer


HOOKED: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "standardised": lambda: standardised(nn.Linear(WIDTH, WIDTH)),
    "scaled": scaled,
}


@check
def hooks_write_what_their_module_computes_with() -> None:
    for made in HOOKED.values():
        nets = [seeded(lambda made=made: nn.Sequential(made(), nn.Tanh(), made(), made())) for _ in range(4)]
        for pipeline in ("gpipe", "1f1b"):
            places = {"0": 0, "2": 1, "3": 0}
            same_as_alone(nets.pop(), vectors(), places=places, alone=nets.pop(), pipeline=pipeline)


@check
def hooks_beside_those_that_write_for_their_module_run_on_every_rank() -> None:
    class Net(Three):
        def __init__(self) -> None:
            super().__init__()
            self.b = scaled()
            self.b.register_forward_hook(lambda module, args, result: self.kept.append(result))

        def forward(self, x: Tensor) -> Tensor:
            self.kept: list[Tensor] = []
            last = super().forward(x)
            (result,) = self.kept
            return last + result + self.b.last

    for places in (ALTERNATING, OPPOSITE):
        net = seeded(Net)
        same_as_alone(net, vectors(), places=places, alone=seeded(Net))


@check
def hooks_of_tensors() -> None:
    class Net(Three):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h.register_hook(lambda grad: grad * 3)
            g = self.b(h) * 2
            g.register_hook(lambda grad: grad + 0.01)
            return self.c(g + h)

    for places in (ALTERNATING, OPPOSITE, None):
        same_as_alone(seeded(Net), vectors(), places=places)


@check
def hooks_on_the_whole_model() -> None:
    net = seeded(models.Chain)
    net.register_forward_hook(lambda module, args, output: output * 2)
    net.blocks.register_forward_hook(lambda module, args, output: output * 100)
    same_as_alone(net, vectors(), places={f"blocks.{i}": i % 2 for i in range(4)})


@check
def checkpointed_parts() -> None:
    class Net(Three):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            x.requires_grad_()
            for part in (self.a, self.b, self.c):
                x = checkpoint(part, x, use_reentrant=self.reentrant)
            return x

    for reentrant in (False, True):
        for places in (ALTERNATING, OPPOSITE, None):
            same_as_alone(seeded(Net, reentrant), vectors(), places=places)


@check
def checkpointed_function_around_parts() -> None:
    class Net(Three):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            g = checkpoint(lambda t, scale: self.b(t) * scale + x, h, 0.5, use_reentrant=self.reentrant)
            return checkpoint(lambda s, t: self.c(s + t), g, h, use_reentrant=self.reentrant)

    for reentrant in (False, True):
        for places in (ALTERNATING, OPPOSITE, None):
            same_as_alone(seeded(Net, reentrant), vectors(), places=places)


@check
def reentrant_checkpoints_of_what_needs_no_gradient() -> None:
    """PyTorch gives their results none, and so the parameters inside none either, whatever is captured."""
    calls: list[Callable[[Any, Tensor, Tensor], Tensor]] = [
        lambda net, x, h: checkpoint(net.b, x, use_reentrant=True),
        lambda net, x, h: checkpoint(net.b, h.detach(), use_reentrant=True),
        lambda net, x, h: checkpoint(lambda t: net.b(t) + h, x, use_reentrant=True),
        lambda net, x, h: checkpoint(lambda: net.b(h), use_reentrant=True),
        lambda net, x, h: checkpoint(lambda t, s: net.b(t) * s, x, 0.5, use_reentrant=True),
        lambda net, x, h: checkpoint(lambda t: net.b(t[0]), [h], use_reentrant=True),
    ]

    class Net(Three):
        def __init__(self, call: Callable[..., Tensor]) -> None:
            super().__init__()
            self.call = call

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.c(h + self.call(self, x, h))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        for call in calls:
            for places in (ALTERNATING, OPPOSITE, None):
                same_as_alone(seeded(Net, call), vectors(), places=places)


@check
def what_is_passed_on_without_grad_mode() -> None:
    """A module that returns its argument itself returns it with its graph, whatever the mode."""

    def quietly(part: nn.Module, x: Any) -> Any:
        with torch.no_grad():
            return part(x)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return x, self.linear(x)

    ways: list[tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = [
        (nn.Identity, lambda part, h: quietly(part, h)),
        (Pair, lambda part, h: quietly(part, h)[0] - quietly(part, h)[1]),
        (Pair, lambda part, h: h.sin() + quietly(part, h)[0]),
        (lambda: nn.Dropout(0.0), lambda part, h: quietly(part, quietly(part, h)) * h),
        (nn.Flatten, lambda part, h: quietly(part, h) + h),
    ]

    class Net(Three):
        def __init__(self, made: Callable[[], nn.Module], way: Callable[..., Tensor]) -> None:
            super().__init__()
            self.part, self.way = made(), way

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.c(self.way(self.part, h) + self.b(h))

    for made, way in ways:
        for places in (ALTERNATING, {**OPPOSITE, "part": 0}, {**OPPOSITE, "part": 1}):
            same_as_alone(seeded(Net, made, way), vectors(), places=places)


@check
def checkpoints_inside_parts() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.linear = models.Block(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.block, self.linear(x), use_reentrant=False)
            return checkpoint(self.block, x, use_reentrant=True)

    def net() -> nn.Module:
        return models.Stack(a=Part(), b=Part(), c=Part())

    for places in (ALTERNATING, None):
        for pipeline in ("1f1b", "zb_h1"):
            same_as_alone(seeded(net), vectors(), places=places, pipeline=pipeline)


@check
def checkpointed_parts_that_replace_buffers() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
            self.register_buffer("total", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            self.total = self.total + x.detach().sum(0)
            return torch.tanh(self.norm(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Part(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(x)
            return checkpoint(self.a, x, use_reentrant=False) + x

    same_as_alone(seeded(Net), vectors())


# bfloat16 keeps 8 bits: neighbours are 4e-3 apart. Both runs round the same values the same way, but a sum of
# gradients in another order may round to a neighbour, and the steps after it carry that on.
HALF_TOLERANCE = 2e-2


@check
def autocast_in_the_step() -> None:
    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device().type, torch.bfloat16):
            out = model(batch["x"])
            loss = F.mse_loss(out, batch["y"])
        return loss.float()

    for places in (ALTERNATING, OPPOSITE, None):
        same_as_alone(seeded(Three), vectors(), loss_of, places=places, tolerance=HALF_TOLERANCE)


@check
def autocast_inside_the_model() -> None:
    class Net(Three):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(device().type, torch.bfloat16):
                h = self.a.down(self.a.up(x)) @ torch.eye(WIDTH, device=x.device)
                assert h.dtype is torch.bfloat16, h.dtype
                with torch.autocast(device().type, enabled=False):
                    g = self.b(h.float())
                    assert g.dtype is torch.float32, g.dtype
                h = self.c(g)
            return self.c(h.float() + g)

    for places in (ALTERNATING, OPPOSITE, None):
        same_as_alone(seeded(Net), vectors(), places=places, tolerance=HALF_TOLERANCE)


@check
def autocast_keeps_its_dtype_in_every_part() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, str]:
            out = self.linear(x)
            return out, str(out.dtype)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Asking(), Asking(), Asking()

        def forward(self, x: Tensor) -> Tensor:
            for part in (self.a, self.b, self.c):
                x, name = part(x)
                assert name == "torch.bfloat16" and x.dtype is torch.bfloat16, (name, x.dtype)
            return x

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device().type, torch.bfloat16):
            return F.mse_loss(model(batch["x"]).float(), batch["y"])

    same_as_alone(seeded(Net), vectors(), loss_of, places=ALTERNATING, tolerance=HALF_TOLERANCE)
