"""What one process does with the same microbatches, and how far another run is from it.

The reference cuts each batch along dim 0 into equal parts, as a step does, runs one part after the other,
divides each loss by their number and steps an optimizer. A `Record` holds everything that must agree.

The difference of two tensors is `max|a - b| / max|b|`, and at most `TOLERANCE`. Two rules keep rounding apart
from errors; both look at the largest value among all gradients of a step (or among all parameters):

* No difference below `TOLERANCE * SMALL` of that largest value counts: at 1e-8 of it, that is less than a
  tenth of its last digit in fp32.
* Some gradients are zero in exact arithmetic (a bias of attention keys, a bias before a normalisation). What
  one sees of them is noise that no other order of summation repeats. Where the reference stays below `NOISE`
  of the largest value, the difference must too, and no more.

Buffers are measured against nothing but themselves, and whole numbers must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.replicas.full_tensors import full_tensor

TOLERANCE = 3e-5 if torch.cuda.is_available() else 1e-5
"""A GPU adds up the gradients of convolutions in another order each time."""
SMALL = 1e-3
NOISE = 1e-6

Named = dict[str, "Tensor | None"]
LossOf = Callable[[nn.Module, Any], Tensor]


@dataclass
class Record:
    """Three steps, say: the mean loss and the gradients of each, and what the model was after the last."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    parameters: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    state: Named = field(default_factory=dict)


def device() -> torch.device:
    """Where models train: on a GPU if this process sees one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(batch: Any) -> Any:
    """The tensors of a nested batch where models train."""
    if isinstance(batch, Tensor):
        return batch.to(device())
    if isinstance(batch, Mapping):
        return {key: on_device(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(on_device, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(on_device, batch))
    return batch


def slices(batch: Any, microbatches: int) -> list[Any]:
    """Equal parts along dim 0 of every tensor in a nested batch; anything else is the same in each part."""
    if isinstance(batch, Tensor):
        return list(batch.chunk(microbatches))
    if isinstance(batch, Mapping):
        parts = {key: slices(value, microbatches) for key, value in batch.items()}
        return [{key: values[i] for key, values in parts.items()} for i in range(microbatches)]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        columns = [slices(value, microbatches) for value in batch]
        return [type(batch)(*row) for row in zip(*columns, strict=True)]
    if isinstance(batch, (list, tuple)):
        columns = [slices(value, microbatches) for value in batch]
        return [type(batch)(row) for row in zip(*columns, strict=True)]
    return [batch] * microbatches


def copies(named: Iterable[tuple[str, Tensor]], names: Mapping[str, str] | None = None) -> Named:
    """Detached copies by name, without the prefix of a wrapper and under one name for each shared tensor."""
    names = names or {}
    plain = ((name.removeprefix("module."), value) for name, value in named)
    return {names.get(name, name): full_tensor(value).detach().clone() for name, value in plain}


def gradients(named: Iterable[tuple[str, nn.Parameter]], names: Mapping[str, str] | None = None) -> Named:
    """Copies of the gradients, of all of a parameter that ranks have parts of; None stays None."""
    names = names or {}
    plain = ((name.removeprefix("module."), p) for name, p in named)
    return {names.get(n, n): None if p.grad is None else full_tensor(p.grad, p).clone() for n, p in plain}


def first_names(net: nn.Module) -> dict[str, str]:
    """Every parameter name of `net`, mapped to the first name of the same parameter (tied: several)."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in net.named_parameters(remove_duplicate=False)}


def train_alone(
    net: nn.Module,
    batches: Sequence[Any],
    loss_of: LossOf,
    optimizer: torch.optim.Optimizer,
    microbatches: int,
    zero_grad: bool = True,
) -> Record:
    """One process: the reference. `loss_of(net, part)` is the forward pass of one microbatch."""
    record = Record()
    net.to(device())
    for batch in map(on_device, batches):
        if zero_grad:
            optimizer.zero_grad()
        total = 0.0
        for part in slices(batch, microbatches):
            loss = loss_of(net, part) / microbatches
            loss.backward()
            total += loss.item()
        record.losses.append(total)
        record.gradients.append(gradients(net.named_parameters()))
        optimizer.step()
    record.parameters = copies(net.named_parameters())
    record.buffers = copies(net.named_buffers())
    record.state = copies(net.state_dict().items())
    return record


@dataclass
class Comparison:
    """Collects differences between a run and its reference; nothing stops at the first."""

    tolerance: float = TOLERANCE
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.failures

    def fail(self, group: str, text: str) -> None:
        """Notes something that is wrong whatever the numbers are."""
        self.failures.setdefault(group, []).append(text)

    def number(self, group: str, name: str, actual: float, expected: float) -> None:
        """Compares two plain numbers."""
        self.tensors(group, {name: torch.tensor(actual)}, {name: torch.tensor(expected)})

    def tensors(self, group: str, actual: Named, expected: Named, largest: float = 0.0) -> None:
        """Compares every tensor of `actual` with the one of the same name.

        `largest` is what rounding is measured against; 0: each tensor against itself alone.
        """
        for name, value in actual.items():
            if name not in expected:
                self.fail(group, f"{name}: not in the reference")
                continue
            fault = _fault(value, expected[name])
            if fault:
                self.fail(group, f"{name}: {fault}")
            elif value is not None:
                self._measure(group, name, value, expected[name], largest)

    def _measure(self, group: str, name: str, actual: Tensor, expected: Tensor, largest: float) -> None:
        exact = not expected.is_floating_point()
        scale = magnitude(expected)
        apart = distance(actual, expected)
        if scale < NOISE * largest and not exact:
            if not apart <= NOISE * largest:
                self.fail(group, f"{name}: noise {scale:.1e} differs by {apart:.1e}, largest {largest:.1e}")
            return
        unit = max(scale, SMALL * largest)
        relative = math.inf if apart and not unit else apart / unit if apart else 0.0
        limit = 0.0 if exact else self.tolerance
        if relative > self.worst.get(group, (-1.0, ""))[0]:
            self.worst[group] = (relative, name)
        if not relative <= limit:
            self.fail(group, f"{name}: {relative:.2e} (|a-b| {apart:.2e}, |b| {scale:.2e})")

    def record(self, actual: Record, expected: Record) -> None:
        """Compares all that `actual` has: a rank of a split model has its own part of the names."""
        if len(actual.losses) != len(expected.losses):
            self.fail("loss", f"{len(actual.losses)} steps, not {len(expected.losses)}")
        for step, (a, b) in enumerate(zip(actual.losses, expected.losses, strict=False)):
            self.number("loss", f"step {step}", a, b)
        for step, (mine, all_of) in enumerate(zip(actual.gradients, expected.gradients, strict=False)):
            self.tensors(f"gradient of step {step}", mine, all_of, largest_of(all_of))
        heaviest = largest_of(expected.parameters)
        self.tensors("parameter", actual.parameters, expected.parameters, heaviest)
        self.tensors("buffer", actual.buffers, expected.buffers)
        if actual.state:
            self.tensors("state_dict", actual.state, expected.state, heaviest)
            for name in sorted(expected.state.keys() - actual.state.keys()):
                self.fail("state_dict", f"{name}: missing")

    def summary(self) -> dict[str, Any]:
        """The largest difference, and where it is."""
        group, (worst, name) = max(self.worst.items(), key=lambda item: item[1][0])
        return {"worst": worst, "where": f"{group}: {name}"}

    def report(self, most: int = 12) -> str:
        """All that failed, by group, with at most `most` lines each."""
        lines = []
        for group, texts in self.failures.items():
            lines.append(f"{group} ({len(texts)}):")
            lines += [f"  {text}" for text in texts[:most]]
            if len(texts) > most:
                lines.append(f"  and {len(texts) - most} more")
        return "\n".join(lines)


def largest_of(named: Named) -> float:
    """The largest absolute value in all of these tensors."""
    return max((magnitude(value) for value in named.values() if value is not None), default=0.0)


def magnitude(value: Tensor) -> float:
    """The largest finite absolute value (masks hold infinities)."""
    if value.numel() == 0:
        return 0.0
    numbers = value.detach().to(torch.float64).abs()
    return numbers.masked_fill(numbers.isinf(), 0.0).max().item()


def distance(a: Tensor, b: Tensor) -> float:
    """`max|a - b|`; equal infinities are no distance apart, a NaN in one alone is infinitely far."""
    a, b = a.detach().to(torch.float64), b.detach().to(torch.float64)
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    if apart.numel() == 0:
        return 0.0
    return apart.nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def _fault(actual: Tensor | None, expected: Tensor | None) -> str:
    """What makes two tensors incomparable, or nothing."""
    if (actual is None) != (expected is None):
        return "is None, not a tensor" if actual is None else "is a tensor, not None"
    if actual is None:
        return ""
    if actual.shape != expected.shape:
        return f"has shape {list(actual.shape)}, not {list(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"has {actual.dtype}, not {expected.dtype}"
    return ""
