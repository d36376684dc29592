"""Runs the source of a program in one process and over the ranks of the job, and tells what differs.

In double precision; so what differs by more than rounding is wrong, however little it is. Compared are losses, scores
in evaluation, norms of gradients and whole weights; what the optimizer holds shows in those of the second step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._meta_registrations  # what tensors in parts import at their first function, in the server instead
import torch.distributed.tensor
from torch import Tensor, nn

import weft.torch as weft
from tests.fuzz import beside as programs
from tests.fuzz.beside import give_up as give_up
from tests.fuzz.beside import prepare as prepare
from tests.fuzz.layouts.between import Alone, Job, SilentError, Split
from tests.fuzz.outcomes import DIFFERS, EQUAL, INVALID, REFUSED, compiled, judged
from weft.errors import WeftError
from weft.torch.context_parallel.apply import Region
from weft.torch.session import current
from weft.torch.tensor_parallel import is_cut

IN_PARTS, SILENT = "in parts", "silent"
PARTED = ("losses", "scores", "scores in between")
"""Numbers of which each replica has its own samples'."""
TOLD = 6
TOLERANCE = 1e-8
"""Of the largest number that is compared."""


@dataclass
class Done:
    """What is compared after one step. `copies`: of the model, each of which has its part of `PARTED`; `rank`: the
    place of this one among them."""

    copies: int
    rank: int
    numbers: dict[str, Tensor] = field(default_factory=dict)


def trained(job: Job, names: Mapping[str, Any]) -> list[Done]:
    """What one process or this rank has after each step; up to one that has to be refused."""
    found: list[Done] = []
    for number in range(names["STEPS"]):
        events = [event for event in names["EVENTS"] if event[1] == number]
        between: dict[str, Tensor] = {}
        for event in events:
            if event[0] != "not finite" and not job.silent:
                between |= job.happen(*event)
        if job.silent and isinstance(job, Alone):
            return found
        done = Done(job.copies, job.copy, between)
        if number == 0 or not names["ACCUMULATE"]:
            job.zero_grad()
        done.numbers["losses"] = job.train(job.batch(number))
        if job.silent:
            raise SilentError(job.silent)
        job.begun = True
        ruined = [pick for kind, *_, pick in events if kind == "not finite"]
        if ruined:
            done.numbers |= job.ruin(ruined[0])
            job.zero_grad()
        else:
            if names["CLIP"]:
                done.numbers["norm"] = job.clip()
            for optimizer in job.optimizers:
                optimizer.step()
            job.follow()
        if names["EVALUATE"]:
            done.numbers["scores"] = job.scores(job.batch(number))
        done.numbers |= {f"weight {name}": value.clone() for name, value in job.model.state_dict().items()}
        done.numbers |= dict(job.averaged())
        found.append(done)
    return found


def is_in_parts(net: nn.Module) -> bool:
    """Whether ranks have cut layers, parts of sequences or shares of parameters here, as the job asked for."""
    settings = current.session().settings
    cut = any(map(is_cut, net.parameters())) or settings.tensor_parallel_degree == 1
    regions = any(isinstance(vars(module).get("forward"), Region) for module in net.modules())
    return cut and (regions or settings.context_parallel_degree == 1)


def differences(mine: list[Done], theirs: list[Done]) -> str:
    """The first difference above rounding; nothing if all is well."""
    told = []
    for number, (actual, expected) in enumerate(zip(mine, theirs, strict=True)):
        lacking = {
            name
            for name in actual.numbers.keys() ^ expected.numbers.keys()
            if not name.startswith("gradient")
        }
        if lacking:
            told.append(f"step {number}: {sorted(lacking)} on one side only")
        for name in [name for name in expected.numbers if name in actual.numbers]:
            one, other = actual.numbers[name], expected.numbers[name]
            if name in PARTED:
                other = other.chunk(expected.copies)[actual.rank]
            if one.shape != other.shape or one.dtype != other.dtype:
                told.append(
                    f"step {number}: {name} is {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
                )
            elif one.numel() and not torch.allclose(one, other, 0.0, tolerance(other), equal_nan=True):
                told.append(f"step {number}: {name} differs by {float((one - other).abs().max()):.2g}")
    return "\n".join(told[:TOLD])


def tolerance(numbers: Tensor) -> float:
    """Of the largest finite one."""
    return TOLERANCE * float(numbers.abs().nan_to_num(0.0, 0.0).max().clamp(min=1.0))


def is_usable(done: Done, some: bool) -> bool:
    """Whether the numbers are finite, but for those that are not by purpose: `some`: only some samples count."""
    return all(
        bool(value.isfinite().all())
        for name, value in done.numbers.items()
        if not (some and name == "losses" or name.startswith("norm of"))
    )


def grows_rounding(names: Mapping[str, Any], expected: list[Done]) -> bool:
    """Whether the last bits of the weights change what is compared by more than rounding, as deep products do."""
    job = Alone(names, weft.size())
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.mul_(1 + 2**-50)
    other = [replace(done, copies=1, rank=0) for done in trained(job, names)]
    return bool(differences(other, [replace(done, copies=1, rank=0) for done in expected]))


def outcome(source: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The outcome of a program on this rank, and the words for it."""
    names = compiled(source)
    try:
        weft.init({**names["SETTINGS"], **settings})
    except WeftError as error:
        return REFUSED, f"{type(error).__name__}: {error}"
    try:
        expected = trained(Alone(names, weft.size()), names)
        usable = all(is_usable(done, names["COUNTED"] is not None) for done in expected)
        invalid = "" if usable else "the numbers are not finite"
    except Exception as error:
        invalid = f"{type(error).__name__}: {error}"

    def beside() -> tuple[str, str]:
        if invalid:
            weft.shutdown()
            return INVALID, invalid
        job = Split(names, settings, weft.size())
        try:
            found = differences(trained(job, names), expected)
            parted = IN_PARTS if is_in_parts(job.net) else ""
            unsteady = bool(found) and grows_rounding(names, expected)
            weft.shutdown()
        except SilentError as error:
            return SILENT, f"no error, though {error}"
        finally:
            job.close()
        if unsteady:
            return INVALID, "one process differs as much if its weights are rounded otherwise"
        return (DIFFERS, found) if found else (EQUAL, parted)

    return judged(beside)


def main(names: dict[str, Any]) -> None:
    """Runs the program whose names these are, on the ranks of this job."""
    programs.main(names, outcome)
