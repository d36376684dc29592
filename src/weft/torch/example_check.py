"""Findings about a model that would hurt when it is split, from one run of it in one process, as `weft trace` does.

check_batch    microbatches that do not divide the mini-batch, or leave too few samples
check_shared   modules that share a parameter
check_even     a unit that takes more than an even share
check_run      what nobody uses, and random numbers
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from weft.check.finding import Finding, Grade
from weft.errors import PlacementError
from weft.graph import Graph
from weft.rules.replicas import SmallBatchNorm
from weft.torch.delayed_parameters import has_delayed
from weft.torch.example_graph import Example, first_microbatch
from weft.torch.session.random_streams import NUMPY, PYTHON, TORCH, Streams, same_states
from weft.torch.split.by_hand import wishes
from weft.torch.tensors.marks import MARK
from weft.torch.tensors.pytree import tensors_in
from weft.torch.trace.dry_run import DryRun
from weft.untrusted import listed, reason

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_batch(example: Example, microbatches: int, line: int) -> Iterator[Finding]:
    """Findings about the mini-batch: microbatches that do not divide it, few samples for batch normalisation.

    Args:
        example: The model and what it is called with; it is not run.
        microbatches: Into how many the mini-batch is cut.
        line: Where in the script the example is.
    """
    sizes = {tensor.shape[0] for tensor in tensors_in(example.batch) if tensor.dim()}
    batch = sizes.pop() if len(sizes) == 1 else None
    if batch is None:
        return
    if batch % microbatches:
        better = max(1, batch // microbatches) * microbatches
        yield Finding(
            "batch_not_divided",
            Grade.WRONG,
            line,
            f"a batch of {batch} samples is refused, since {microbatches} microbatches do not divide it",
            f"{better} samples; or @weft.step(allow_uneven=True)",
        )
    norms = [name for name, module in example.model.named_modules() if isinstance(module, NORMS)]
    least = SmallBatchNorm().least
    if norms and batch // microbatches < least:
        yield Finding(
            "small_batch_norm",
            Grade.HINT,
            line,
            f"batch normalisation ({listed(norms, 3)}) takes its means over {batch // microbatches} samples, "
            f"a microbatch of {batch} samples in {microbatches}: they are noise",
            "model = weft.convert_sync_batchnorm(model)  # before the wrap; or larger microbatches",
        )


UNEVEN = 1.1
"""From so many even shares on a unit that cannot be cut is reported: times are measured, and never quite alike."""


def check_shared(model: nn.Module, partitions: int, line: int) -> Iterator[Finding]:
    """Modules that share a parameter: those that are put apart by hand, and those that the split keeps together."""
    if partitions < 2:
        return
    by_hand = any(MARK in module.__dict__ for module in model.modules())
    try:
        placed = wishes(model, 0, partitions) if by_hand else {}
    except PlacementError as error:
        yield Finding("placed_nowhere", Grade.WRONG, line, str(error), f"weft.partition({partitions - 1})")
        return
    for names in _shared(model):
        owners = [name.rpartition(".")[0] for name in names]
        apart = {placed[owner] for owner in owners if owner in placed}
        if len(apart) > 1:
            yield Finding(
                "shared_apart",
                Grade.WRONG,
                line,
                f"{listed(names, 4)} are one parameter, and its modules are put on the partitions "
                f"{listed(sorted(apart))}",
                f"weft.set_partition(model.get_submodule('{owners[-1]}'), {placed.get(owners[0], 0)})",
            )
        else:
            yield Finding(
                "shared_together",
                Grade.HINT,
                line,
                f"{listed(names, 4)} are one parameter, so their modules go to one partition, and what lies between "
                "them makes each microbatch come back to it",
                f"nothing; or a parameter of its own for {owners[-1] or 'the model'}, where the model allows it",
            )


def check_even(graph: Graph, partitions: int, line: int) -> Iterator[Finding]:
    """A unit, or units that must lie together, that takes more than an even share of the time."""
    times: dict[tuple[str, bool], float] = defaultdict(float)
    for unit in graph:
        times[(unit.group, True) if unit.group else (unit.name, False)] += unit.time_ms
    (name, tied), most = max(times.items(), key=lambda item: item[1])
    whole = sum(times.values())
    if partitions < 2 or whole <= 0 or most * partitions <= UNEVEN * whole:
        return
    what = listed((unit.name for unit in graph if unit.group == name), 4) if tied else name
    yield Finding(
        "unit_too_large",
        Grade.SLOW,
        line,
        f"{what} {'together take' if tied else 'takes'} {most / whole:.0%} of the time and cannot be cut, so no split "
        f"over {partitions} partitions is even",
        f'"partitions": {max(1, int(UNEVEN * whole / most))}; or make it of modules that run one after the other',
    )


def _shared(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that several modules have."""
    owners: dict[int, dict[int, str]] = defaultdict(dict)
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners[id(parameter)].setdefault(id(module), f"{module_name}.{name}" if module_name else name)
    return [[*names.values()] for names in owners.values() if len(names) > 1]


ALL = TORCH | PYTHON | NUMPY


def check_run(example: Example, microbatches: int, line: int) -> Iterator[Finding]:
    """Findings from one microbatch's run, which leaves nothing behind.

    A model without data (on the meta device) is not run.
    """
    if has_delayed(example.model):
        return
    dry = DryRun(
        [example.model], Streams(example.device), example.loss, first_microbatch(example, microbatches)
    )
    with dry.snapshot().restored():
        found = [*_findings_of_run(example, dry.arguments(), dry.streams, line)]
    yield from found


def _findings_of_run(example: Example, batch: Any, streams: Streams, line: int) -> Iterator[Finding]:
    made: dict[str, list[Tensor]] = defaultdict(list)
    before = streams.capture(ALL)
    with ExitStack() as stack:
        for name, module in example.model.named_modules():
            stack.callback(module.register_forward_hook(_note(made, name)).remove)
        result = example.result(batch)
    if not same_states(before, streams.capture(ALL)):
        yield _random(example.model, line)
    start = example.start(result, batch)
    if start is not None and start.requires_grad:
        try:
            yield from _unused(example, start, made, result, line)
        except RuntimeError as error:
            yield Finding(
                "not_followed",
                Grade.HINT,
                line,
                f"gradients cannot be followed here: {reason(error)}",
                "nothing",
            )


def _note(made: dict[str, list[Tensor]], name: str) -> Any:
    def note(module: nn.Module, arguments: Any, result: Any) -> None:
        made[name] += [tensor for tensor in tensors_in(result) if tensor.requires_grad]

    return note


def _random(model: nn.Module, line: int) -> Finding:
    drawing = [name for name, module in model.named_modules() if "Dropout" in type(module).__name__]
    return Finding(
        "random_numbers",
        Grade.HINT,
        line,
        f"the model draws random numbers{f' ({listed(drawing, 3)})' if drawing else ''}: masks are not those of one "
        "process, and another split draws others",
        'weft.init({..., "deterministic": True})  # where two runs must agree',
    )


def _unused(
    example: Example, start: Tensor, made: dict[str, list[Tensor]], result: Any, line: int
) -> Iterator[Finding]:
    """Parameters and results that the loss does not depend on."""
    named = {name: p for name, p in example.model.named_parameters() if p.requires_grad}
    results = [(name, tensor) for name, tensors in made.items() for tensor in tensors if name]
    returned = [tensor for tensor in tensors_in(result) if tensor.requires_grad and tensor is not start]
    wanted = [*named.values(), *(tensor for _, tensor in results), *returned]
    used = [one is not None for one in torch.autograd.grad(start, wanted, allow_unused=True)]
    ends = len(named), len(named) + len(results)
    yield from _unused_results([name for name, _ in results], used[ends[0] : ends[1]], line)
    yield from _unused_parameters([*named], used[: ends[0]], line)
    left = used[ends[1] :].count(False)
    if left and example.loss is not None:
        yield Finding(
            "return_unused",
            Grade.HINT,
            line,
            f"the loss does not use {left} of {len(returned)} tensors that the model returns: a step that returns them "
            "sends them to all ranks",
            "return loss  # of the step, and no more than is needed",
        )


def _unused_results(names: list[str], used: list[bool], line: int) -> Iterator[Finding]:
    """Modules none of whose results is used; of those inside each other the outermost."""
    dead = {*names} - {name for name, one in zip(names, used, strict=True) if one}
    wasted = sorted(name for name in dead if not any(name.startswith(f"{other}.") for other in dead))
    if wasted:
        yield Finding(
            "result_unused",
            Grade.HINT,
            line,
            f"the loss does not depend on what {listed(wasted, 4)} computes, and it runs in every microbatch",
            f"leave out the call of {wasted[0]}",
        )


def _unused_parameters(names: list[str], used: list[bool], line: int) -> Iterator[Finding]:
    without = [name for name, one in zip(names, used, strict=True) if not one]
    if without:
        yield Finding(
            "parameter_unused",
            Grade.HINT,
            line,
            f"no gradient comes to {listed(without, 4)}, {len(without)} of {len(names)} parameters: they take memory, "
            "and their bucket of gradients waits for the end of the step",
            f"model.get_parameter('{without[0]}').requires_grad_(False)  # or leave their modules out",
        )
