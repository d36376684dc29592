"""A model that runs once: what does nobody use, and does it draw random numbers?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weft.check.finding import Finding, Grade
from weft.torch.delayed_parameters import has_delayed
from weft.torch.example_graph import Example, first_microbatch
from weft.torch.session.random_streams import NUMPY, PYTHON, TORCH, Streams, same_states
from weft.torch.tensors.nested import tensors_in
from weft.untrusted import listed, reason

ALL = TORCH | PYTHON | NUMPY


def check_run(example: Example, microbatches: int, line: int) -> Iterator[Finding]:
    """Findings from one microbatch's run; the model's buffers move on, its gradients stay as they are.

    A model without data (on the meta device) is not run.
    """
    if has_delayed(example.model):
        return
    made: dict[str, list[Tensor]] = defaultdict(list)
    handles = [
        module.register_forward_hook(_note(made, name)) for name, module in example.model.named_modules()
    ]
    streams, batch = Streams(example.device), first_microbatch(example, microbatches)
    before = streams.capture(ALL)
    try:
        result = example.result(batch)
    finally:
        for handle in handles:
            handle.remove()
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
