"""Runs the source of a program in one process and over the ranks of the job, and tells what differs.

In double precision; so what differs by more than rounding is wrong, however little it is. Compared are losses, scores
in evaluation, norms of gradients and whole weights; what the optimizer holds shows in those of the second step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._meta_registrations  # what tensors in parts import at their first function, in the server instead
import torch.distributed.tensor
from torch import Tensor, nn

import weft.torch as weft
from tests.fuzz import beside as programs
from tests.fuzz.beside import DIFFERS, EQUAL, INVALID, REFUSED, compiled, judged
from weft.errors import WeftError
from weft.torch.context_parallel.apply import Region
from weft.torch.session import current
from weft.torch.tensor_parallel import is_cut

IN_PARTS = "in parts"
TOLD = 6
TOLERANCE = 1e-8
"""Of the largest number that is compared."""


@dataclass
class Done:
    """What is compared after one step."""

    numbers: dict[str, Tensor] = field(default_factory=dict)


def start(names: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(3)
    net: nn.Module = names["Model"]()
    return net.double()


def batch(names: Mapping[str, Any], number: int) -> Tensor:
    numbers = torch.Generator().manual_seed(11 + number)
    return torch.randint(0, 17, (names["ROWS"], names["LENGTHS"][number]), generator=numbers)


def loss_of(names: Mapping[str, Any], given: tuple[Tensor, Any], words: Tensor) -> Tensor:
    loss: Tensor = names["loss_of"](given[0], words) + 0.1 * given[1]
    return loss


def alone(names: Mapping[str, Any], copies: int) -> list[Done]:
    """What one process has after each step, on microbatches as all copies of the model have them together."""
    net = start(names)
    optimizer = names["optimizer_of"](net.parameters())
    microbatches = names["SETTINGS"]["microbatches"]
    found = []
    for number in range(names["STEPS"]):
        words, done = batch(names, number), Done()
        if number == 0 or not names["ACCUMULATE"]:
            optimizer.zero_grad()
        parts = [part for share in words.chunk(copies) for part in share.chunk(microbatches)]
        losses = []
        for part in parts:
            loss = loss_of(names, net(part), part)
            (loss / len(parts)).backward()
            losses.append(loss.detach())
        done.numbers["losses"] = torch.stack(losses)
        if names["CLIP"]:
            done.numbers["norm"] = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05).detach()
        optimizer.step()
        if names["EVALUATE"]:
            net.eval()
            with torch.no_grad():
                done.numbers["scores"] = torch.cat([net(part)[0] for part in parts])
            net.train()
        done.numbers |= {f"weight {name}": value.clone() for name, value in net.state_dict().items()}
        found.append(done)
    return found


def is_in_parts(net: nn.Module) -> bool:
    """Whether ranks have cut layers, parts of sequences or shares of parameters here, as the job asked for."""
    settings = current.session().settings
    cut = any(map(is_cut, net.parameters())) or settings.tensor_parallel_degree == 1
    regions = any(isinstance(vars(module).get("forward"), Region) for module in net.modules())
    return cut and (regions or settings.context_parallel_degree == 1)


def split(net: nn.Module, names: Mapping[str, Any]) -> list[Done]:
    """What this rank has after each step."""
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(names["optimizer_of"](model.parameters()))

    @weft.step
    def step(model: Any, words: Tensor) -> Tensor:
        loss = loss_of(names, model(words), words)
        model.backward(loss)
        return loss

    @weft.step
    def scores(model: Any, words: Tensor) -> Tensor:
        result: Tensor = model(words)[0]
        return result

    found = []
    for number in range(names["STEPS"]):
        words, done = batch(names, number), Done()
        mine = words.chunk(weft.rdp_size())[weft.rdp_rank()]
        if number == 0 or not names["ACCUMULATE"]:
            optimizer.zero_grad()
        done.numbers["losses"] = torch.stack([each.detach() for each in step(model, mine).outputs])
        if names["CLIP"]:
            done.numbers["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).detach()
        optimizer.step()
        if names["EVALUATE"]:
            model.eval()
            with torch.no_grad():
                done.numbers["scores"] = torch.cat([each.detach() for each in scores(model, mine).outputs])
            model.train()
        done.numbers |= {f"weight {name}": value.clone() for name, value in model.state_dict().items()}
        found.append(done)
    return found


def differences(mine: list[Done], theirs: list[Done], rank: int, copies: int) -> str:
    """What differs by more than rounding; nothing if all is well."""
    told = []
    for number, (actual, expected) in enumerate(zip(mine, theirs, strict=True)):
        if actual.numbers.keys() != expected.numbers.keys():
            told.append(
                f"step {number}: {sorted(actual.numbers.keys() ^ expected.numbers.keys())} on one side only"
            )
        for name in [name for name in expected.numbers if name in actual.numbers]:
            one, other = actual.numbers[name], expected.numbers[name]
            if name in ("losses", "scores"):
                other = other.chunk(copies)[rank]
            if one.shape != other.shape or one.dtype != other.dtype:
                told.append(
                    f"step {number}: {name} is {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
                )
            elif one.numel() and not float((one - other).abs().max()) <= TOLERANCE * max(
                1.0, float(other.abs().max())
            ):
                told.append(f"step {number}: {name} differs by {float((one - other).abs().max()):.2g}")
    return "\n".join(told[:TOLD])


def outcome(source: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """What became of a program on this rank, and the words for it."""
    names = compiled(source)
    try:
        weft.init({**names["SETTINGS"], **settings})
        copies, rank = weft.rdp_size(), weft.rdp_rank()
    except WeftError as error:
        return REFUSED, f"{type(error).__name__}: {error}"
    try:
        expected = alone(names, copies)
        if not all(bool(value.isfinite().all()) for done in expected for value in done.numbers.values()):
            return INVALID, "the numbers are not finite"
    except Exception as error:
        return INVALID, f"{type(error).__name__}: {error}"

    def beside() -> tuple[str, str]:
        net = start(names)
        found = differences(split(net, names), expected, rank, copies)
        return (DIFFERS, found) if found else (EQUAL, IN_PARTS if is_in_parts(net) else "")

    return judged(beside)


def main(names: dict[str, Any]) -> None:
    """Runs the program whose names these are, on the ranks of this job."""
    programs.main(names, outcome)
