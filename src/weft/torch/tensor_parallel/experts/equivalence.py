"""A module run with weights and inputs that are made up: do the results of ranks add up to the whole?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.pytorch.private import version
from weft.torch.tensor_parallel.functions import FATAL
from weft.torch.tensor_parallel.splits import pattern
from weft.torch.tensors.pytree import CONSTANTS, leaves_in, map_tensors, tensors_in

_SEED = 20
_ROUGH = {torch.bfloat16: 0.05, torch.float16: 0.02}
_LARGE, _LARGE_IN = 1e3, {torch.float16: 16.0}
PLAIN = {*_ROUGH, torch.float32, torch.float64}

Call = Callable[[Mapping[str, Tensor], Any, Any], Any]
"""What a module computes with these weights, by name, from arguments."""


@dataclass
class Outcome:
    """The results and gradients of a run.

    Attributes:
        results: Its tensors of floating-point numbers.
        others: Its other tensors.
        gradients: Those of its inputs, in their order.
        weights: Those of its parameters, by name.
        unused: The parameters that got none.
        made: Of all that its results hold, whether it is one of ``results``.
    """

    results: list[Tensor]
    others: list[Tensor]
    gradients: list[Tensor]
    weights: dict[str, Tensor]
    unused: set[str]
    made: list[bool]


class Bench:
    """A module with weights and inputs that are made up.

    Attributes:
        weights: The module's parameters by name, with other numbers.
        width: How many numbers a row of its first input has.
        limit: How far apart sums may be, as a part of the whole.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, choices: int) -> None:
        first = next(module.parameters())
        self.module, self.dtype, self.choices = module, first.dtype, choices
        self.device = torch.device("cpu") if first.device.type == "meta" else first.device
        self.numbers = torch.Generator().manual_seed(_SEED)  # the same numbers on all devices
        self.weights = {
            name: self._random(value).mul_(value.shape[-1] ** -0.5 if value.dim() > 1 else 1)
            for name, value in module.named_parameters()
        }
        self.args, self.kwargs = map_tensors((args, kwargs), self._input)
        inputs = [each for each in tensors_in((self.args, self.kwargs)) if each.is_floating_point()]
        self.width = inputs[0].shape[-1] if inputs else 0
        kind = self.device.type
        rounded = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        self.limit = max(_ROUGH.get(each, 1e-3) for each in (self.dtype, rounded))
        self.given: list[Tensor] | None = None

    def larger(self, of_experts: Callable[[str], bool]) -> Bench:
        """The same with larger weights of experts, so that a limit which only large numbers reach is seen.

        ``of_experts``: whether a parameter is one of an expert, by its name.
        """
        other = copy.copy(self)
        by = _LARGE_IN.get(self.dtype, _LARGE)
        other.weights = {n: value * by if of_experts(n) else value for n, value in self.weights.items()}
        return other

    def _random(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.numbers, dtype=self.dtype).to(self.device)

    def _input(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.rand(tensor.shape, generator=self.numbers, dtype=self.dtype).to(self.device)
        if tensor.device.type == "meta":
            most = 2 if tensor.dtype == torch.bool else self.choices
            made = torch.randint(most, tensor.shape, generator=self.numbers)
            return made.to(self.device, tensor.dtype)
        return tensor.to(self.device)

    def run(self, weights: Mapping[str, Tensor], call: Call) -> Outcome | None:
        """The results with these weights, and all gradients; None if it fails, or writes into what it is given."""
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        inputs: list[Tensor] = []

        def fresh(tensor: Tensor) -> Tensor:
            tensor = tensor.detach().clone()
            if tensor.is_floating_point():
                inputs.append(tensor.requires_grad_())
            return tensor.view_as(tensor)

        args, kwargs = map_tensors((self.args, self.kwargs), fresh)
        given = [*tensors_in((args, kwargs)), *leaves.values()]
        before = [version(each) for each in given]
        torch.manual_seed(_SEED)  # what all draw alike
        try:
            with torch.enable_grad():
                given_back = call(leaves, args, kwargs)
            made = tensors_in(given_back)
            results = [each for each in made if each.is_floating_point()]
            if [version(each) for each in given] != before or not any(each.requires_grad for each in results):
                return None
            if self.given is None:
                self.given = [self._random(each).to(each.dtype) for each in results]
            wanted = [
                (each, grad) for each, grad in zip(results, self.given, strict=True) if each.requires_grad
            ]
            sources = [*inputs, *leaves.values()]
            gradients = torch.autograd.grad(
                [each for each, _ in wanted], sources, [grad for _, grad in wanted], allow_unused=True
            )
        except FATAL:
            raise
        except Exception:
            return None
        filled = [torch.zeros_like(s) if g is None else g for s, g in zip(sources, gradients, strict=True)]
        count = len(inputs)
        return Outcome(
            [each.detach() for each in results],
            [each for each in made if not each.is_floating_point()],
            filled[:count],
            dict(zip(leaves, filled[count:], strict=True)),
            {name for name, gradient in zip(leaves, gradients[count:], strict=True) if gradient is None},
            [isinstance(each, Tensor) and each.is_floating_point() for each in leaves_in(given_back)],
        )

    def near(self, actual: Tensor, expected: Tensor) -> bool:
        """True if two tensors differ by little of what they hold; not where either has no numbers."""
        if actual.shape != expected.shape:
            return False
        difference, size = (actual - expected).float().norm(), expected.float().norm()
        return bool(difference <= self.limit * size)


BY_OBJECT = "it gets tensors in an object, whose gradients would be those of one rank's part"


def in_objects(call: Any) -> bool:
    """True if a module is called with tensors in attributes of objects, which nobody sees enter."""
    return len(tensors_in(call, attributes=True)) > len(tensors_in(call))


@contextmanager
def in_mode(training: bool, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, these modules, not those in them, are in training or in evaluation."""
    before = [each.training for each in modules]
    try:
        for each in modules:
            each.training = training
        yield
    finally:
        for each, own in zip(modules, before, strict=True):
            each.training = own


def kind_of(name: str, module: nn.Module) -> Any:
    """The kind of a module; modules of one kind compute the same: names but for numbers of layers, classes, sizes,
    settings."""
    inside = []
    for own, each in module.named_modules():
        settings = [(key, value) for key, value in vars(each).items() if isinstance(value, CONSTANTS)]
        settings += [(key, id(value)) for key, value in vars(each).items() if callable(value)]
        shapes = [(key, tuple(value.shape)) for key, value in each.named_parameters(recurse=False)]
        inside.append((own, type(each), tuple(settings), tuple(shapes)))
    return pattern(f"{name}."), tuple(inside)


def plus(sums: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    """Tensors added to sums, which are empty at first."""
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else more


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    """True if tensors are the same, one by one."""
    return len(some) == len(others) and all(map(torch.equal, some, others))
