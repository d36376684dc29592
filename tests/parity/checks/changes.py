"""Models that a script changes after it has wrapped them, or after the first step has split them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from weft.errors import UsageError

from ..compare import Record, copies, first_names, gradients
from .harness import MICROBATCHES, WIDTH, assert_same, check, placed, seeded, squared_error, start, vectors
from .structure import numbered

Change = Callable[[Any], None]
SPLITS = (numbered("blocks", [0, 1, 0, 1]), numbered("blocks", [0, 0, 1, 1]))


class Headed(models.Chain):
    """Blocks, a dropout that does nothing at first, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(super().forward(x)))


def step_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss = squared_error(model, batch)
    model.backward(loss)
    return loss


def descend(parameters: Any) -> None:
    """A step of plain gradient descent that looks at all parameters, new ones as well."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
                parameter.grad = None


def alone(net: nn.Module, changes: Sequence[Change | None], batches: Sequence[dict[str, Tensor]]) -> Record:
    record = Record()
    for change, batch in zip(changes, batches, strict=True):
        if change is not None:
            change(net)
            net.to(batch["x"].device)
        total = 0.0
        for x, y in zip(*(batch[name].chunk(MICROBATCHES) for name in "xy"), strict=True):
            loss = F.mse_loss(net(x), y) / MICROBATCHES
            loss.backward()
            total += loss.item()
        record.losses.append(total)
        record.gradients.append(gradients(net.named_parameters()))
        descend(net.parameters())
    record.parameters = copies(net.named_parameters())
    record.state = copies(net.state_dict().items())
    return record


def split(
    net: nn.Module,
    changes: Sequence[Change | None],
    batches: Sequence[dict[str, Tensor]],
    places: dict[str, int],
) -> Record:
    model = placed(net, places, default_partition=1)
    step, record = weft.step(step_of), Record()
    for change, batch in zip(changes, batches, strict=True):
        if change is not None:
            change(net)
        record.losses.append(step(model, batch).reduce_mean().item())
        names = first_names(net)
        record.gradients.append(gradients(model.local_named_parameters(), names))
        descend(model.local_parameters())
    record.parameters = copies(model.local_named_parameters(), first_names(net))
    record.state = copies(model.state_dict().items())
    return record


def same(*changes: Change | None, build: type[nn.Module] = Headed) -> None:
    """``changes``: what is done to the model before each step."""
    for places in SPLITS:
        net = seeded(build)
        batches = vectors(steps=len(changes))
        expected = alone(copy.deepcopy(net), changes, batches)
        assert_same(split(net, changes, batches, places), expected)


def refused(change: Change, *words: str, build: type[nn.Module] = Headed) -> str:
    """A change after the first step ends in an error that has these words, and the remedy."""
    net = seeded(build)
    start()
    model = weft.DistributedModel(net)
    step = weft.step(step_of)
    first, second = vectors(steps=2)
    step(model, first)
    change(net)
    try:
        step(model, second)
    except UsageError as error:
        for word in (*words, "before"):
            assert word in str(error), f"{word!r} is not in {error}"
        return str(error)
    raise AssertionError(f"no error; one with {words} should have come")


def freeze(*names: str) -> Change:
    return lambda net: [net.get_submodule(name).requires_grad_(False) for name in names] and None


def thaw(*names: str) -> Change:
    return lambda net: [net.get_submodule(name).requires_grad_(True) for name in names] and None


# --- after the model was wrapped ----------------------------------------------------------------------------


def new_head(net: Any) -> None:
    torch.manual_seed(9)
    net.head = nn.Linear(WIDTH, WIDTH)


@check
def new_layer_between_the_wrap_and_the_first_step() -> None:
    same(new_head, None, None)


@check
def adapters_between_the_wrap_and_the_first_step() -> None:
    def adapt(net: Any) -> None:
        torch.manual_seed(9)
        net.requires_grad_(False)
        for block in net.blocks:
            block.up, block.down = models.Adapter(block.up), models.Adapter(block.down)

    same(adapt, None, None)


@check
def tie_between_the_wrap_and_the_first_step() -> None:
    def tie(net: Any) -> None:
        net.blocks[3].up.weight = net.blocks[1].up.weight

    net = seeded(Headed)
    expected = alone(copy.deepcopy(net), [tie, None], vectors(steps=2))
    assert_same(split(net, [tie, None], vectors(steps=2), SPLITS[0]), expected)


@check
def less_layers_between_the_wrap_and_the_first_step() -> None:
    def cut(net: Any) -> None:
        del net.blocks[2]
        net.blocks.append(models.Block())
        net.blocks[3].load_state_dict(net.blocks[0].state_dict())
        del net.drop
        net.drop = nn.Identity()

    start(auto_partition=True)
    net = seeded(Headed)
    expected = alone(copy.deepcopy(net), [cut, None], vectors(steps=2))
    start()
    model = weft.DistributedModel(net)
    cut(net)
    step, record = weft.step(step_of), Record()
    for batch in vectors(steps=2):
        record.losses.append(step(model, batch).reduce_mean().item())
        record.gradients.append(gradients(model.local_named_parameters()))
        descend(model.local_parameters())
    assert_same(record, Record(losses=expected.losses, gradients=expected.gradients))


@check
def hook_and_forward_between_the_wrap_and_the_first_step() -> None:
    def replace(net: Any) -> None:
        net.blocks[1].register_forward_hook(lambda module, args, result: result * 2)
        net.head.forward = lambda x: F.linear(x, net.head.weight).tanh()

    for places in SPLITS:
        net = seeded(Headed)
        theirs = seeded(Headed)
        expected = alone(theirs, [replace, None], vectors(steps=2))
        assert_same(split(net, [replace, None], vectors(steps=2), places), expected)


# --- after the first step: taken in -------------------------------------------------------------------------


@check
def freezing_after_the_first_step() -> None:
    same(None, freeze("blocks.0", "blocks.1"), None)
    same(None, freeze("blocks.2", "head"), None)
    same(None, freeze("blocks"), None)


@check
def thawing_after_the_first_step() -> None:
    for names in (("blocks.0", "blocks.1"), ("blocks.0", "blocks.1", "blocks.2", "blocks.3")):
        same(freeze(*names), None, thaw(names[0]), thaw(*names))


@check
def freezing_in_turns() -> None:
    same(*(freeze("blocks.0") if step % 2 else thaw("blocks.0") for step in range(5)))


@check
def freezing_parameters_that_the_model_uses_by_itself() -> None:
    class Scaled(Headed):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale) * self.scale

    def fix(net: Any) -> None:
        net.scale.requires_grad_(False)

    def free(net: Any) -> None:
        net.scale.requires_grad_(True)

    same(None, fix, free, None, build=Scaled)


@check
def forward_hooks_after_the_first_step() -> None:
    handles: list[Any] = []

    def double(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return result * 2

    def add(net: Any) -> None:
        handles.append(net.blocks[1].register_forward_hook(double))
        handles.append(net.head.register_forward_pre_hook(lambda module, args: (args[0] + 1,)))

    def remove(net: Any) -> None:
        while handles:
            handles.pop().remove()

    for places in SPLITS:
        net, other = seeded(Headed), seeded(Headed)
        changes = [None, add, remove, None]
        expected = alone(other, changes, vectors(steps=4))
        handles.clear()
        assert_same(split(net, changes, vectors(steps=4), places), expected)


@check
def hooks_inside_of_units_after_the_first_step() -> None:
    """They change the shape that the unit returns, which is known from the first step."""

    def narrow(net: Any) -> None:
        net.blocks[1].down.register_forward_hook(lambda module, args, result: result.mean(-1, keepdim=True))

    def shorten(net: Any) -> None:
        net.head.register_forward_hook(lambda module, args, result: result[:, :1])

    for change in (narrow, shorten):
        net, other = seeded(Headed), seeded(Headed)
        expected = alone(other, [None, change, None], vectors(steps=3))
        assert_same(split(net, [None, change, None], vectors(steps=3), SPLITS[0]), expected)


@check
def backward_hooks_after_the_first_step() -> None:
    def half(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(each / 2 for each in inputs)

    def add(net: Any) -> None:
        net.blocks[2].register_full_backward_hook(half)

    same(None, add, None)


@check
def dropout_that_begins_later_draws_alike_on_all_ranks() -> list[float]:
    class Late(Headed):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))
            self.seen: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            drawn = torch.rand(()).item()
            self.seen.append(drawn)  # another microbatch may draw before the next line
            return super().forward(x) * drawn

    start(auto_partition=False, default_partition=1)
    net = seeded(Late)
    model = weft.DistributedModel(net)
    weft.set_partition(net.inner, 0)
    step = weft.step(step_of)
    for batch in vectors(steps=3):
        step(model, batch)
        net.inner[1].p = 0.5
    return sorted(net.seen)


# --- after the first step: refused --------------------------------------------------------------------------


@check
def layers_replaced_after_the_first_step_are_refused() -> list[str]:
    def replace(net: Any) -> None:
        net.head = nn.Linear(WIDTH, WIDTH)

    def anew(net: Any) -> None:
        del net.head
        net.head = nn.Linear(WIDTH, WIDTH)

    return [refused(change, "head was replaced", "state_dict") for change in (replace, anew)]


@check
def layers_added_and_deleted_after_the_first_step_are_refused() -> list[str]:
    def add(net: Any) -> None:
        net.blocks.append(models.Block())

    def insert(net: Any) -> None:
        net.blocks.insert(1, models.Block())

    def delete(net: Any) -> None:
        del net.blocks[3]

    def rename(net: Any) -> None:
        net.top = net.head
        del net.head

    return [
        refused(add, "blocks.4 was added"),
        refused(insert, "blocks.1 was replaced"),
        refused(delete, "blocks.3 was deleted"),
        refused(rename, "head was deleted", "top was added"),
    ]


@check
def parameters_replaced_after_the_first_step_are_refused() -> list[str]:
    def parameter(net: Any) -> None:
        net.head.weight = nn.Parameter(net.head.weight.detach().clone())

    def tie(net: Any) -> None:
        net.blocks[2].up.weight = net.blocks[1].up.weight

    def normal(net: Any) -> None:
        nn.utils.parametrizations.weight_norm(net.head)

    def none(net: Any) -> None:
        net.head.bias = None

    return [
        refused(parameter, "head.weight was replaced"),
        refused(tie, "blocks.2.up.weight was replaced"),
        refused(normal, "head.parametrizations was added"),
        refused(none, "head.bias was replaced"),
    ]


@check
def adapters_after_the_first_step_are_refused() -> str:
    def adapt(net: Any) -> None:
        for block in net.blocks:
            block.up = models.Adapter(block.up)

    return refused(adapt, "blocks.0.up was replaced", "blocks.3.up was replaced")


@check
def forward_replaced_after_the_first_step_is_refused() -> list[str]:
    def of_one(net: Any) -> None:
        net.head.forward = torch.tanh

    class Own(Headed):
        pass

    def of_class(net: Any) -> None:
        Own.forward = lambda self, x: x  # type: ignore[method-assign]

    return [
        refused(of_one, "the forward of head was replaced"),
        refused(of_class, "the forward of a class was replaced", build=Own),
    ]


@check
def backward_hooks_on_opened_modules_after_the_first_step_are_refused() -> str:
    def add(net: Any) -> None:
        net.register_full_backward_hook(lambda module, inputs, outputs: None)

    return refused(add, "the model got a backward hook after its first step")
