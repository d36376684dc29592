"""What a step may do with gradients: several backward passes, those of inputs, trainable tensors outside of the model.

A *body* is what the step does with one microbatch; it runs split, and in one process on each part of the batch in turn.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models

from ..compare import Comparison, Record, copies, gradients, on_device, slices
from .harness import MICROBATCHES, WIDTH, Places, assert_same, check, seeded, sgd, start, vectors
from .structure import numbered

Body = Callable[..., Any]
HALVES = numbered("blocks", [0, 0, 1, 1])
ALTERNATING = numbered("blocks", [0, 1, 0, 1])
BACK = numbered("blocks", [1, 0, 1, 1])
MANY = (HALVES, ALTERNATING, BACK)


def bodies_agree(
    build: Callable[..., nn.Module],
    body: Body,
    *,
    places: Sequence[Places] = MANY,
    outside: Callable[[], Any] | None = None,
    needs_grad: bool = False,
    batches: Sequence[Any] | None = None,
    **settings: Any,
) -> list[Any]:
    """`body(net, batch, backward, outside)` trains split as in one process, for each placement, and automatically.

    `outside` makes what has trainable parameters of its own (a module). `needs_grad`: the batch's `x` gets gradients.
    Gives what must be equal on all ranks to the last bit: the gradients of inputs and of outside parameters.
    """
    told: list[Any] = []
    for where in (*places, None):
        told += _agree(build, body, where, outside, needs_grad, batches or vectors(steps=2), settings)
    return told


def _agree(
    build: Callable[..., nn.Module], body: Body, places: Places | None, outside: Callable[[], Any] | None,
    needs_grad: bool, batches: Sequence[Any], settings: Mapping[str, Any],
) -> list[Any]:  # fmt: skip
    net, extra = seeded(build), seeded(outside) if outside else nn.Module()
    alone, extra_alone = copy.deepcopy(net), copy.deepcopy(extra)
    start(**{**settings, **({"auto_partition": False, "default_partition": 0} if places else {})})
    model = weft.DistributedModel(net)
    for name, partition in (places or {}).items():
        weft.set_partition(net.get_submodule(name), partition)
    optimizer = weft.DistributedOptimizer(sgd(model.parameters()))
    optimizers = [optimizer, sgd(alone.parameters())]
    if outside:
        optimizers += [sgd(extra.parameters()), sgd(extra_alone.parameters())]

    @weft.step
    def step(model: nn.Module, batch: Any) -> Any:
        return body(model.module, batch, model.backward, extra)

    def backward(tensors: Any, grads: Any = None, retain_graph: bool = False) -> None:
        several = tensors if isinstance(tensors, list) else [tensors]
        given = grads if isinstance(grads, list) else [grads] * len(several)
        scaled = [
            torch.full_like(one, 1 / MICROBATCHES) if grad is None else grad / MICROBATCHES
            for one, grad in zip(several, given, strict=True)
        ]
        torch.autograd.backward(several, scaled, retain_graph=retain_graph)

    told: list[Any] = []
    comparison = Comparison()
    for number, batch in enumerate(map(on_device, batches)):
        mine, theirs = with_grad(batch, needs_grad), with_grad(batch, needs_grad)
        for one in optimizers:
            one.zero_grad()
        results = step(model, mine)
        expected = [body(alone, part, backward, extra_alone) for part in slices(theirs, MICROBATCHES)]
        if isinstance(results, weft.StepOutput):
            for result, other in zip(results.outputs, expected, strict=True):
                torch.testing.assert_close(result, other.detach(), rtol=1e-5, atol=1e-6)
        comparison.record(
            Record(gradients=[gradients(model.local_named_parameters())]),
            Record(gradients=[gradients(alone.named_parameters())]),
        )
        beside = gradients(extra.named_parameters())
        comparison.record(
            Record(gradients=[beside]), Record(gradients=[gradients(extra_alone.named_parameters())])
        )
        if needs_grad:
            torch.testing.assert_close(mine["x"].grad, theirs["x"].grad, rtol=1e-5, atol=1e-7)
            beside["x"] = mine["x"].grad
        assert comparison.ok, f"step {number} of {places}: {comparison.report()}"
        told += [None if grad is None else grad.double().sum().item() for grad in beside.values()]
        for one in optimizers:
            one.step()
    same = Record(buffers=copies(model.local_named_buffers()))
    assert_same(same, Record(buffers=copies(alone.named_buffers())))
    return json.loads(json.dumps(told))  # type: ignore[no-any-return]


def with_grad(batch: Any, needs_grad: bool) -> Any:
    """A copy of the batch, whose `x` is a leaf that needs a gradient if that is wanted."""
    new = {name: value.clone() for name, value in batch.items()}
    if needs_grad:
        new["x"].requires_grad_()
    return new


# --- several backward passes --------------------------------------------------------------------------------


class Gan(nn.Module):
    """A generator and a discriminator of two blocks each; `normal` puts buffers into the latter."""

    def __init__(self, normal: bool = False) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(WIDTH) if normal else nn.Tanh()
        self.g = nn.Sequential(models.Block(), models.Block())
        self.d = nn.Sequential(models.Block(), middle, models.Block(), nn.Linear(WIDTH, 1))


GAN_PLACES = (
    {"g": 0, "d": 1},
    {"g": 1, "d": 0},
    {"g.0": 0, "g.1": 1, "d.0": 0, "d.1": 1, "d.2": 1, "d.3": 0},
)


def gan_body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
    fake = net.g(batch["x"])
    backward(F.softplus(net.d(fake.detach())).mean() + F.softplus(-net.d(batch["y"])).mean())
    loss = F.softplus(-net.d(fake)).mean()
    backward(loss)
    return loss


@check
def generator_and_discriminator_in_one_step() -> list[Any]:
    told = bodies_agree(Gan, gan_body, places=GAN_PLACES)
    for pipeline in ("gpipe", "zb_h1", "looped_bfs", "interleaved_1f1b", "zbv", "auto"):
        told += bodies_agree(Gan, gan_body, places=(), pipeline=pipeline)
    return told


@check
def running_statistics_between_two_backward_passes() -> list[Any]:
    batches = vectors(steps=3, rows=32)
    told = []
    for _ in range(3):
        told += bodies_agree(lambda: Gan(True), gan_body, places=GAN_PLACES, batches=batches)
    return told


class TwoHeads(models.Chain):
    """A trunk, and two heads on it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4), models.Block()


HEADS = tuple({**trunk, "a": a, "b": b} for trunk in MANY for a, b in ((0, 1), (1, 0), (1, 1)))


@check
def retained_trunk_under_two_heads() -> list[Any]:
    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        h = batch["x"]
        for block in net.blocks:
            h = block(h)
        backward(net.a(h).square().mean(), retain_graph=True)
        loss = F.mse_loss(net.b(h), batch["y"])
        backward(loss)
        return loss

    told = bodies_agree(TwoHeads, body, places=HEADS)
    return told + bodies_agree(TwoHeads, body, places=(), pipeline="zb_h1")


@check
def retained_three_times_and_used_in_between() -> list[Any]:
    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        h = net.blocks[1](net.blocks[0](batch["x"]))
        first = net.a(h).square().mean()
        backward(first, retain_graph=True)
        h = h + net.blocks[2](h)
        backward(h.abs().mean(), retain_graph=True)
        backward(first, retain_graph=True)
        loss = F.mse_loss(net.b(net.blocks[3](h)), batch["y"]) + first
        backward(loss)
        return loss

    return bodies_agree(TwoHeads, body, places=HEADS)


@check
def losses_of_separate_parts_one_after_the_other() -> list[Any]:
    """The second loss reaches what was computed, and sent, before the first pass, but not reached by it."""

    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        left, right = net.blocks[0](batch["x"]), net.blocks[1](batch["y"])
        mixed = net.blocks[3](net.blocks[2](right) + left.detach())
        backward(net.a(left).square().mean())
        loss = mixed.square().mean() + net.b(right.detach()).mean()
        backward(loss)
        return loss

    return bodies_agree(TwoHeads, body, places=HEADS)


@check
def passes_in_a_loop() -> list[Any]:
    """As many as there are chunks; what came before is used again, without its graph."""

    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        state = torch.zeros_like(batch["x"])
        for number in range(3):
            for block in net.blocks:
                state = block(state * 0.5 + batch["x"] * number)
            loss = F.mse_loss(state, batch["y"])
            backward(loss)
            state = state.detach()
        return loss

    return bodies_agree(models.Chain, body)


@check
def more_passes_in_some_microbatches() -> list[Any]:
    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        h = net.blocks[1](net.blocks[0](batch["x"]))
        loss = net.a(h).square().mean()
        if bool(batch["x"].mean() > 0):
            backward(loss, retain_graph=True)
        loss = loss + F.mse_loss(net.b(net.blocks[3](net.blocks[2](h))), batch["y"])
        backward(loss)
        if bool(batch["y"].mean() > 0):
            backward(net.blocks[2](batch["y"]).square().mean())
        return loss

    return bodies_agree(TwoHeads, body, places=HEADS[:4])


@check
def results_used_after_the_backward_pass() -> list[Any]:
    """On ranks that had received them, and let go of them."""

    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        h = net.blocks[1](net.blocks[0](batch["x"]))
        out = net.blocks[3](net.blocks[2](h))
        backward(F.mse_loss(out, batch["y"]))
        again = net.blocks[2](h.detach()) + net.blocks[3](h.detach())
        backward(again.square().mean())
        with torch.no_grad():
            return net.blocks[2](h).mean() + net.blocks[3](h).mean() + (out - h).abs().mean()

    return bodies_agree(models.Chain, body)


# --- loss.backward() ----------------------------------------------------------------------------------------


def plainly(how: Callable[[Tensor, Any], None]) -> list[Any]:
    """`how(loss, out)` goes backward by PyTorch's own names; in one process from a loss that is divided before."""

    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        out = batch["x"]
        for block in net.blocks:
            out = block(out)
        loss = F.mse_loss(out, batch["y"])
        inside = getattr(backward, "__self__", None) is not None  # the model's, so a step runs
        how(loss if inside else loss / MICROBATCHES, out if inside else out / MICROBATCHES)
        return loss

    return bodies_agree(models.Chain, body)


@check
def loss_backward_in_a_step() -> list[Any]:
    return plainly(lambda loss, out: loss.backward())


@check
def loss_backward_with_a_gradient() -> list[Any]:
    return plainly(lambda loss, out: out.backward(gradient=torch.full_like(out, 0.5))) + plainly(
        lambda loss, out: out.backward(torch.linspace(0, 1, out.numel(), device=out.device).view(out.shape))
    )


@check
def autograd_backward_in_a_step() -> list[Any]:
    return plainly(lambda loss, out: torch.autograd.backward(loss)) + plainly(
        lambda loss, out: torch.autograd.backward([loss, out], [None, torch.ones_like(out)])
    )


@check
def loss_backward_twice() -> list[Any]:
    def how(loss: Tensor, out: Tensor) -> None:
        loss.backward(retain_graph=True)
        (2 * loss).backward(None, False)

    return plainly(how)


@check
def loss_backward_of_what_no_module_computed() -> list[Any]:
    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        inside = getattr(backward, "__self__", None) is not None
        own = extra(batch["x"]).square().mean()
        (own if inside else own / MICROBATCHES).backward()
        loss = F.mse_loss(net.blocks[3](net.blocks[0](batch["x"])), batch["y"])
        (loss if inside else loss / MICROBATCHES).backward()
        return loss

    return bodies_agree(models.Chain, body, outside=lambda: nn.Linear(WIDTH, 3))


@check
def what_all_ranks_have_and_one_writes_without_gradients() -> list[Any]:
    """The gradient goes past what was written, as in one process."""

    class Clips(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(0.9).clamp_(-1, 1)
            return super().forward(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                [models.Block(), Clips(WIDTH, WIDTH), Clips(WIDTH, WIDTH), models.Block()]
            )

    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        first, clips, last, end = net.blocks
        own = batch["x"] * extra.weight
        h = first(own + 0)
        with torch.no_grad():
            clips(own)
        g = end(own * 0.5) + h
        with torch.no_grad():
            last(own)
        loss = F.mse_loss(end(first(own * 2) + g), batch["y"])
        backward(loss)
        return loss

    return bodies_agree(Net, body, outside=lambda: nn.LayerNorm(WIDTH), needs_grad=True)


# --- gradients of chosen tensors ----------------------------------------------------------------------------


def through(net: Any, x: Tensor) -> Tensor:
    """The result of all blocks."""
    for block in net.blocks:
        x = block(x)
    return x


@check
def gradient_of_the_input_by_autograd_grad() -> list[Any]:
    """Adversarial training: the second pass starts at what the first one gave."""

    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        x = batch["x"].detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.mse_loss(through(net, x), batch["y"]), x)
        loss = F.mse_loss(through(net, batch["x"] + 0.1 * slope.sign()), batch["y"])
        backward(loss)
        return loss + slope.abs().mean()

    told = bodies_agree(models.Chain, body)
    return told + bodies_agree(models.Chain, body, places=(), pipeline="zb_h1")


@check
def gradients_of_activations_and_parameters_by_autograd_grad() -> list[Any]:
    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        h = net.blocks[1](net.blocks[0](batch["x"]))
        out = net.blocks[3](net.blocks[2](h))
        loss = F.mse_loss(out, batch["y"])
        chosen = [h, out, net.blocks[0].up.weight, net.blocks[3].down.bias]
        slopes = torch.autograd.grad(loss, chosen, retain_graph=True)
        more = torch.autograd.grad([out, loss], h, [torch.ones_like(out), None], retain_graph=True)
        backward(loss + (h * slopes[0].detach()).sum() + (out * slopes[1]).sum())
        return loss + sum(slope.abs().sum() for slope in (*slopes, *more)).detach()  # type: ignore[union-attr]

    return bodies_agree(models.Chain, body)


@check
def unused_inputs_of_autograd_grad() -> list[Any]:
    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        x = batch["x"].detach().clone().requires_grad_()
        left, right = net.blocks[0](x), net.blocks[1](batch["y"])
        used, unused, other = torch.autograd.grad(
            left.sum(), [x, right, net.blocks[2].up.weight], allow_unused=True, retain_graph=True
        )
        assert unused is None and other is None and used is not None
        (zero,) = torch.autograd.grad(
            left.sum(), [right], materialize_grads=True, allow_unused=True, retain_graph=True
        )
        loss = F.mse_loss(net.blocks[3](net.blocks[2](left + right)), batch["y"]) + zero.sum()
        backward(loss)
        return loss + used.square().mean()

    return bodies_agree(models.Chain, body)


@check
def gradient_penalty_on_one_partition() -> list[Any]:
    """The discriminator lies on one rank as a whole, so its second derivative does."""

    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        fake = net.g(batch["x"])
        between = (0.3 * fake.detach() + 0.7 * batch["y"]).requires_grad_()
        out = net.d(between)
        (slope,) = torch.autograd.grad(
            out, between, torch.ones_like(out), create_graph=True, retain_graph=True
        )
        backward(net.d(fake.detach()).mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean())
        loss = -net.d(fake).mean()
        backward(loss)
        return loss + slope.detach().norm()

    def of_inputs(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        x = batch["y"].detach().clone().requires_grad_()
        out = net.d(x.flatten(1).view_as(x))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + (slope.norm(dim=1) - 1).square().mean() + net.g(batch["x"]).mean()
        backward(loss)
        return loss + x.grad.norm()

    told = []
    for each in (body, of_inputs):
        for places in GAN_PLACES[:2]:
            net = seeded(Gan)
            told += _agree(
                lambda net=net: copy.deepcopy(net), each, places, None, False, vectors(steps=2), {}
            )
    return told


@check
def gradient_of_the_input_read_in_the_step() -> list[Any]:
    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        x = batch["x"].detach().clone().requires_grad_()
        backward(F.mse_loss(through(net, x), batch["y"]))
        loss = F.mse_loss(through(net, batch["x"] + x.grad), batch["y"])
        backward(loss)
        return loss + x.grad.sum()

    return bodies_agree(models.Chain, body)


# --- trainable tensors outside of the model, inputs that need gradients -------------------------------------


@check
def inputs_that_need_gradients() -> list[Any]:
    def usual(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        loss = F.mse_loss(through(net, batch["x"]), batch["y"])
        backward(loss)
        return loss

    def everywhere(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        x = batch["x"]
        h = net.blocks[0](x * 2) + net.blocks[1](x.sin()) + x
        loss = F.mse_loss(net.blocks[3](net.blocks[2](h) * x), batch["y"]) + x.square().mean()
        backward(loss, retain_graph=True)
        backward(h.mean() + x.exp().mean())
        return loss

    told = bodies_agree(models.Chain, usual, needs_grad=True)
    told += bodies_agree(models.Chain, usual, needs_grad=True, places=(), pipeline="zbv")
    return told + bodies_agree(models.Chain, everywhere, needs_grad=True)


@check
def loss_with_parameters_of_its_own() -> list[Any]:
    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        loss = F.cross_entropy(extra(through(net, batch["x"])), batch["y"].argmax(1) % 3)
        backward(loss)
        return loss

    told = bodies_agree(models.Chain, body, outside=lambda: nn.Linear(WIDTH, 3))
    for pipeline in ("gpipe", "zb_h1", "interleaved_1f1b", "auto"):
        told += bodies_agree(
            models.Chain, body, outside=lambda: nn.Linear(WIDTH, 3), places=(), pipeline=pipeline
        )
    return told


class Scalars(nn.Module):
    """A learned temperature, weights of losses, and a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.weights = nn.Parameter(torch.zeros(2))
        self.prompt = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Parameter(torch.ones(2))


@check
def learned_temperature_and_weights_of_losses() -> list[Any]:
    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        h = net.blocks[1](net.blocks[0](batch["x"]))
        out = net.blocks[3](net.blocks[2](h))
        logits = F.normalize(h) @ F.normalize(out).t() * extra.temperature.exp()
        losses = torch.stack(
            [
                F.cross_entropy(logits, torch.arange(len(logits), device=logits.device)),
                F.mse_loss(out, batch["y"]),
            ]
        )
        loss = (losses * torch.exp(-extra.weights)).sum() + extra.weights.sum()
        backward(loss)
        return loss

    return bodies_agree(models.Chain, body, outside=Scalars)


@check
def prompt_outside_of_the_model() -> list[Any]:
    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        x = torch.cat([batch["x"], extra.prompt.expand_as(batch["x"])])
        out = through(net, x)
        loss = F.mse_loss(out[: len(batch["x"])] + out[len(batch["x"]) :] * extra.prompt, batch["y"])
        backward(loss)
        return loss

    return bodies_agree(models.Chain, body, outside=Scalars)


@check
def outside_parameters_in_several_passes() -> list[Any]:
    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        shift = extra.prompt.tanh()
        h = net.blocks[1](net.blocks[0](batch["x"] + shift))
        backward((h * extra.temperature).square().mean(), retain_graph=True)
        backward(extra.weights.square().sum() + shift.sum(), retain_graph=True)
        loss = F.mse_loss(net.blocks[3](net.blocks[2](h)) * extra.temperature, batch["y"]) + shift.mean()
        backward(loss)
        return loss

    return bodies_agree(models.Chain, body, outside=Scalars)


class Kept:
    """What layers fill, and do not read."""

    def __init__(self) -> None:
        self.items: list[Any] = []


class Keeping(models.Block):
    def forward(self, x: Tensor, kept: Kept | None = None) -> Tensor:
        h = super().forward(x)
        if kept is not None:
            kept.items.append(h * 2)
        return h


class KeepingChain(models.Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping() for _ in range(4))


@check
def objects_that_layers_fill_beside_outside_parameters() -> list[Any]:
    """Only the rank that runs a layer has what that puts into an object: it is none of the tensors of all ranks."""

    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        kept = Kept()
        out = batch["x"] * extra.prompt
        for block in net.blocks:
            out = block(out, kept)
        loss = F.mse_loss(out * extra.temperature, batch["y"])
        backward(loss)
        return loss

    return bodies_agree(KeepingChain, body, outside=Scalars)


@check
def centres_of_classes() -> list[Any]:
    """A table that the step looks up and writes nothing into, with a loss of its own."""

    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        out = through(net, batch["x"])
        labels = batch["y"].argmax(1)
        loss = (out - extra(labels)).square().mean() + F.cross_entropy(out @ extra.weight.t(), labels)
        backward(loss)
        return loss

    return bodies_agree(models.Chain, body, outside=lambda: nn.Embedding(WIDTH, WIDTH))


@check
def gradients_of_detached_activations() -> list[Any]:
    """What is kept for later: the graph is cut, and the gradient at the cut handed on by the step itself."""

    def body(net: Any, batch: Any, backward: Any, extra: Any) -> Tensor:
        h = net.blocks[1](net.blocks[0](batch["x"]))
        cut = h.detach().requires_grad_()
        loss = F.mse_loss(net.blocks[3](net.blocks[2](cut)), batch["y"])
        assert cut.grad is None
        backward(loss)
        size = cut.grad.norm()
        backward(h, cut.grad.clone() * MICROBATCHES)
        return loss.detach() + size

    names = [f"blocks.{block}.{part}" for block in range(4) for part in ("norm", "up", "down")]
    inside = [{name: int(at >= cut) for at, name in enumerate(names)} for cut in (1, 4, 7)]
    return bodies_agree(models.Chain, body, places=(*MANY, *inside))
