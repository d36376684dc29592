"""Runs the source of a program in one process and split over the ranks of the job, and tells what differs.

One process means: plain PyTorch calls the step function once for each microbatch, in order; each loss counts by its
microbatch's share of the samples.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import weft.torch as weft
from tests.counted_costs import count_costs
from tests.fuzz.outcomes import CRASHED, DIFFERS, EQUAL, INVALID, REFUSED, compiled, judged
from tests.fuzz.parts import WIDTH
from tests.parity.compare import Comparison, Named, copies, distance, gradients, largest_of
from weft.errors import WeftError
from weft.torch.execution.entry_points import NoGraphError

ROUNDING = 1e-5


class InvalidError(Exception):
    """Plain PyTorch does not run the program."""


@dataclass
class Step:
    """What is compared after one step."""

    results: list[Any] = field(default_factory=list)
    gradients: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)


# --- in one process ------------------------------------------------------------------------------------------


class Alone:
    """A model in one process, with as much of weft's interface as programs use."""

    share = 1.0

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, tensors: Any, grads: Any = None, retain_graph: bool = False) -> None:
        several = tensors if isinstance(tensors, list) else [tensors]
        given = grads if isinstance(grads, list) else [grads] * len(several)
        scaled = [
            (torch.ones_like(one) if grad is None else grad) * Alone.share
            for one, grad in zip(several, given, strict=True)
        ]
        torch.autograd.backward(several, scaled, retain_graph=retain_graph)


@contextmanager
def losses_by_their_share() -> Iterator[None]:
    """Inside, `loss.backward()` counts by the share of its microbatch, as weft documents it."""
    original = Tensor.backward

    def backward(loss: Tensor, *args: Any, **named: Any) -> None:
        original(loss * Alone.share, *args, **named)

    Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.backward = original  # type: ignore[method-assign]


def bounds(size: int, count: int) -> list[tuple[int, int]]:
    """First and one past the last sample of each microbatch, as documented."""
    return [(number * size // count, (number + 1) * size // count) for number in range(count)]


def alone(names: Mapping[str, Any]) -> list[Step]:
    """What one process has after each step."""
    nets = start(names)
    models = [Alone(net) for net in nets]
    temperature = names["temperature"]
    optimizer = torch.optim.SGD(parameters_of(nets), lr=0.1)
    beside = torch.optim.SGD([temperature], lr=0.1)
    step, steps = names["step"], []
    for number in range(names["STEPS"]):
        x, y = batch(names, number)
        if number == 0 or not names["ACCUMULATE"]:
            optimizer.zero_grad()
            beside.zero_grad()
        parts = bounds(len(x), names["SETTINGS"]["microbatches"])
        done = Step()
        with losses_by_their_share():
            for first, last in parts:
                Alone.share = (last - first) / len(x)
                result = step(models, x.data[first:last], y.data[first:last])
                done.results.append(tuple(one.detach().clone() for one in result))
        note(done, nets, temperature, lambda net: net.named_parameters(), lambda net: net.named_buffers())
        for index, net in enumerate(nets):
            done.attributes |= attributes(index, net.named_modules())
        optimizer.step()
        beside.step()
        if names["EVALUATE"]:
            with evaluation(nets):
                done.results += [[call(nets, x[first:last])] for first, last in parts]
        for index, net in enumerate(nets):
            done.parameters |= prefixed(index, copies(net.state_dict().items()))
        steps.append(done)
    return steps


# --- split ---------------------------------------------------------------------------------------------------


def split(names: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Step]:
    """What this rank has after each step, of its own parts."""
    weft.init({**names["SETTINGS"], **settings})
    nets = start(names)
    models = [weft.DistributedModel(net) for net in nets]
    for place, partition in (names["PLACES"] or {}).items():
        index, _, name = place.partition(":")
        weft.set_partition(nets[int(index)].get_submodule(name), partition)
    temperature = names["temperature"]
    step = weft.step(allow_uneven=names["UNEVEN"])(names["step"])
    evaluate = weft.step(allow_uneven=names["UNEVEN"])(call)
    optimizers = [
        weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for model, net in zip(models, nets, strict=True)
        if parameters_of([net])
    ]
    beside = torch.optim.SGD([temperature], lr=0.1)
    steps = []
    for number in range(names["STEPS"]):
        x, y = batch(names, number)
        if number == 0 or not names["ACCUMULATE"]:
            for optimizer in (*optimizers, beside):
                optimizer.zero_grad()
        done = Step()
        results = step(models, x, y)
        done.results += zip(*(one.outputs for one in results), strict=True)
        note(
            done,
            models,
            temperature,
            lambda model: model.local_named_parameters(),
            lambda model: model.local_named_buffers(),
        )
        for index, model in enumerate(models):
            done.attributes |= attributes(index, ran_here(model))
        for optimizer in (*optimizers, beside):
            optimizer.step()
        if names["EVALUATE"]:
            with evaluation(models):
                done.results += [[one] for one in evaluate(models, x).outputs]
        for index, model in enumerate(models):
            done.parameters |= prefixed(index, copies(model.state_dict().items()))
        steps.append(done)
    return steps


# --- what both do --------------------------------------------------------------------------------------------


def start(names: Mapping[str, Any]) -> list[nn.Module]:
    """New models, with the same weights each time."""
    torch.manual_seed(3)
    with torch.no_grad():
        names["temperature"].zero_()
    names["temperature"].grad = None
    nets: list[nn.Module] = names["build"]()
    for net in nets:
        net.to(names["DTYPE"])
    return nets


def batch(names: Mapping[str, Any], number: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(11 + number)
    x, y = torch.randn(2, names["ROWS"], WIDTH, generator=numbers, dtype=torch.float64).to(names["DTYPE"])
    return x, y


def call(models: Any, x: Tensor) -> Tensor:
    """All models one after the other."""
    for model in models:
        x = model(x)
    return x


def parameters_of(nets: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for net in nets for parameter in net.parameters()]


@contextmanager
def evaluation(nets: Any) -> Iterator[None]:
    for net in nets:
        net.eval()
    with torch.no_grad():
        yield
    for net in nets:
        net.train()


def prefixed(index: int, named: Named) -> Named:
    return {f"{index}:{name}": value for name, value in named.items()}


def note(
    done: Step, models: Any, temperature: Tensor, parameters: Callable[..., Any], buffers: Callable[..., Any]
) -> None:
    """Gradients and buffers after a step."""
    for index, model in enumerate(models):
        done.gradients |= prefixed(index, gradients(parameters(model)))
        done.buffers |= prefixed(index, copies(buffers(model)))
    done.gradients["temperature"] = None if temperature.grad is None else temperature.grad.clone()


def ran_here(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that this rank has, but for those without state: they run wherever their arguments are."""
    elsewhere = [unit.name for unit in model.plan.units if unit.partition < 0] if model.plan else []
    for name, module in model.local_named_modules():
        plain = name.removeprefix("module").removeprefix(".")
        if not any(plain == unit or plain.startswith(f"{unit}.") for unit in elsewhere):
            yield name, module


def attributes(index: int, modules: Any) -> dict[str, Any]:
    """Numbers and tensors in attributes of modules, as far as they are here."""
    found: dict[str, Any] = {}
    for name, module in modules:
        plain = name.removeprefix("module").removeprefix(".")
        for key, value in vars(module).items():
            if key.startswith("_") or key == "training":
                continue
            if isinstance(value, Tensor) and value.device.type == "meta":  # another rank's
                continue
            if isinstance(value, (Tensor, int, float)):
                found[f"{index}:{plain}.{key}"] = (
                    value.detach().clone() if isinstance(value, Tensor) else value
                )
            elif isinstance(value, list):
                found[f"len of {index}:{plain}.{key}"] = len(value)
    return found


def differences(mine: list[Step], theirs: list[Step], tolerance: float) -> str:
    """The first difference above rounding; nothing if all is well."""
    for number, (actual, expected) in enumerate(zip(mine, theirs, strict=True)):
        comparison = Comparison(tolerance)
        if len(actual.results) != len(expected.results):
            comparison.fail("results", f"{len(actual.results)}, not {len(expected.results)}")
        for part, (one, other) in enumerate(zip(actual.results, expected.results, strict=False)):
            for which, (a, b) in enumerate(zip(one, other, strict=True)):
                comparison.tensors("result", {f"{part}.{which}": a}, {f"{part}.{which}": b})
        large = above_rounding(actual.gradients, expected.gradients)
        comparison.tensors("gradient", large, expected.gradients, largest_of(expected.gradients))
        comparison.tensors("buffer", actual.buffers, expected.buffers)
        for key, value in actual.attributes.items():
            if key not in expected.attributes:
                comparison.fail("attribute", f"{key}: one process has none")
            elif isinstance(value, Tensor) and isinstance(expected.attributes[key], Tensor):
                comparison.tensors("attribute", {key: value}, {key: expected.attributes[key]})
            elif value != expected.attributes[key]:
                comparison.fail("attribute", f"{key}: {value!r}, not {expected.attributes[key]!r}")
        comparison.tensors(
            "parameter", actual.parameters, expected.parameters, largest_of(expected.parameters)
        )
        for name in expected.parameters.keys() - actual.parameters.keys():
            comparison.fail("state_dict", f"{name}: missing")
        if not comparison.ok:
            return f"step {number}: {comparison.report()}"
    return ""


def above_rounding(actual: Named, expected: Named) -> Named:
    """Without the gradients whose difference is rounding beside the largest one: some are zero in exact arithmetic."""
    limit = ROUNDING * largest_of(expected)
    return {
        name: value
        for name, value in actual.items()
        if value is None
        or (other := expected.get(name)) is None
        or value.shape != other.shape
        or value.dtype != torch.float32
        or not distance(value, other) <= limit
    }


def finite(steps: list[Step]) -> bool:
    return all(
        value is None or bool(value.isfinite().all())
        for step in steps
        for value in (*step.gradients.values(), *step.parameters.values())
    )


def outcome(source: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The outcome of a program on this rank, and the words for it."""
    names = compiled(source)
    try:
        expected = alone(names)
        if not finite(expected):
            return INVALID, "the numbers are not finite"
    except NoGraphError as error:  # PyTorch's own, in weft's words
        return INVALID, f"{type(error).__name__}: {error}"
    except WeftError:
        return CRASHED, f"without weft: {traceback.format_exc(limit=-14)}"
    except Exception as error:
        return INVALID, f"{type(error).__name__}: {error}"

    def beside() -> tuple[str, str]:
        found = differences(split(names, settings), expected, names["TOLERANCE"])
        return (DIFFERS, found) if found else (EQUAL, "")

    return judged(beside)


def prepare() -> None:
    """Prepare a rank for its first program."""
    torch.set_num_threads(1)
    count_costs()


def give_up(text: str) -> None:
    """Tell the other ranks that this one has failed."""
    from weft.torch.session import current

    if current.is_initialized() and current.session().pipeline is not None:
        current.session().pipeline.channel.abort(text)


def main(names: dict[str, Any], outcome: Callable[..., tuple[str, str]] = outcome) -> None:
    """Runs the program whose names these are, on the ranks of this job."""
    torch.set_num_threads(1)
    source = open(names["__file__"]).read()  # noqa: SIM115
    word, text = outcome(source, {})
    print(f"rank {weft.rank() if weft.is_initialized() else '?'}: {word} {text}", flush=True)
    sys.exit(word not in (EQUAL, REFUSED))
