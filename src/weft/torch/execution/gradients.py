"""Autograd's own entry points in a step that is split: backward passes, gradients of chosen tensors, and ``.grad``.

``torch.autograd.grad`` without ``create_graph`` is a pass over the tape like a backward pass, but for chosen tensors:
it crosses ranks. With ``create_graph`` the result has a graph of its own, which autograd makes in one place only: the
outputs and all that lies between them and the inputs must be on one rank, in one segment. All else is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from weft.errors import UsageError
from weft.torch.backward.autograd import graph_nodes, leaf_of, root_gradient
from weft.torch.calls.call_signature import after_writes, meta_from
from weft.torch.execution.program import Program
from weft.torch.execution.replicated import EVERYWHERE, is_made_here
from weft.torch.execution.value import Value
from weft.torch.tensors.description import describe_tensor
from weft.transport.channel import READ, Message

SECOND = (
    "torch.autograd.grad(..., create_graph=True) needs a second derivative through modules on several partitions, or "
    "through what was sent between them, which is not supported: put all that lies between its outputs and its inputs "
    "on one partition, weft.set_partition(module, index), or leave create_graph out if no backward pass goes through "
    "the result"
)


Tensors = Tensor | Sequence[Tensor]
"""What a backward pass begins at, as PyTorch's functions take it."""
Gradients = Tensor | Sequence[Tensor | None] | None
"""The gradients of :data:`Tensors`; None stands for 1, for scalars."""


def run_backward(program: Program, tensors: Tensors, grads: Gradients, keep: bool = False) -> None:
    """The backward pass of the microbatch from one tensor or several.

    On every rank of the pipeline. ``keep``: another pass may go through the same graph later. A microbatch that weighs
    nothing goes back without a gradient: one of zeros would become NaN where its loss divides by what it counts.
    """
    if program.scale or program.pipeline.gathering:  # these gather parameters together
        _seed(program, *pair_gradients(tensors, grads), program.scale)
    program.microbatch.begin("B")
    program.tape.walk_back(keep)


def root_gradients(tensors: Tensors, grads: Gradients, scale: float) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors, and the gradients that autograd starts with there: ``scale`` times those given."""
    several, given = pair_gradients(tensors, grads)
    return several, [root_gradient(each, grad, scale) for each, grad in zip(several, given, strict=True)]


def pair_gradients(tensors: Tensors, grads: Gradients) -> tuple[list[Tensor], list[Tensor | None]]:
    """Tensors and their gradients, as many of both."""
    several = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [grads] * len(several) if grads is None or isinstance(grads, Tensor) else list(grads)
    if len(given) != len(several):
        raise UsageError(f"backward() got {len(several)} tensors, but {len(given)} gradients for them")
    return several, given


def _seed(program: Program, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], scale: float) -> None:
    """Let the next pass begin at ``tensors``."""
    for tensor, grad in zip(tensors, grads, strict=True):
        value = program.value_of(tensor)
        if value is None and not tensor.requires_grad:
            raise UsageError(
                "backward() got a tensor that was not computed by the model in this microbatch, so that no "
                "parameter could get a gradient from it"
            )
        grad = _gradient_for(program.rank if value is None else value.owner, program, grad)
        if value is None:
            program.tape.need_replicated().seed(tensor, root_gradient(tensor, grad, scale))
        elif value.owner == program.rank:
            tensor = value.data(tensor)
            root = root_gradient(tensor, grad, scale)
            program.tape.remember(value, tensor)
            value.add_grad(root)


def _gradient_for(owner: int, program: Program, tensor: Tensor | None) -> Tensor | None:
    """A given gradient, if any, as ``owner`` needs it: the rank that has it sends it there."""
    value = None if tensor is None else program.value_of(tensor)
    if tensor is None or value is None:
        return tensor
    if owner == program.rank:
        return program.local(tensor, value)
    program.send_all([(tensor, value)], owner)
    return tensor


def grad(
    program: Program, outputs: Tensors, inputs: Tensors, grad_outputs: Gradients = None,
    retain_graph: bool | None = None,
    create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None,
    is_grads_batched: bool = False, materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """``torch.autograd.grad``, where outputs or inputs are placed."""
    targets = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if is_grads_batched or not all(isinstance(target, Tensor) for target in targets):
        raise UsageError(
            "inside a step that is split, torch.autograd.grad takes tensors as inputs, and no is_grads_batched"
        )
    if not all(after_writes(target).requires_grad for target in targets):
        raise UsageError(
            "torch.autograd.grad got an input that needs no gradient: call requires_grad_() on it"
        )
    several, given = pair_gradients(outputs, grad_outputs)
    find = _derivatives_with_graph if create_graph else _first_derivatives
    found = find(program, several, given, targets)
    if materialize_grads:
        pairs = zip(targets, found, strict=True)
        return tuple(_zeros(program, target) if one is None else one for target, one in pairs)
    if not allow_unused and any(one is None for one in found):
        raise UsageError(
            "torch.autograd.grad: one of the inputs has nothing to do with the outputs; its gradient is None with "
            "allow_unused=True"
        )
    return tuple(found)


def _zeros(program: Program, target: Tensor) -> Tensor:
    like = after_writes(target)
    return torch.zeros(like.shape, dtype=like.dtype, device=program.pipeline.device)


def _first_derivatives(
    program: Program, outputs: list[Tensor], grads: list[Tensor | None], inputs: list[Tensor]
) -> list[Tensor | None]:
    """First derivatives, across ranks."""
    _seed(program, outputs, grads, 1.0)
    values = [program.value_of(each) for each in inputs]
    wanted: dict[int, tuple[Value, Tensor]] = {}
    for number, (each, value) in enumerate(zip(inputs, values, strict=True)):
        if value is None:
            wanted[number] = Value(EVERYWHERE, 0, program.placed.batch, None, None), each
        elif value.owner == program.rank:
            wanted[number] = value, value.data(each)
            if wanted[number][1]._weft_spread:  # type: ignore[attr-defined]
                raise UsageError(
                    "torch.autograd.grad for a tensor that is split over axis tp: "
                    f"{wanted[number][1].shard_group.remedy}"  # type: ignore[attr-defined]
                )
    found = dict(zip(wanted, program.tape.gradients(list(wanted.values())), strict=True))
    return [
        found[number] if value is None else broadcast_gradient(program, found.get(number), value.owner)
        for number, value in enumerate(values)
    ]


def broadcast_gradient(program: Program, tensor: Tensor | None, owner: int) -> Tensor | None:
    """The gradient that ``owner`` has, with a place; None if it has none. ``owner`` sends its description to all."""
    key = program.tape.key(READ, program.next_call(("the gradient of a tensor",)))
    if owner == program.rank:
        text = json.dumps(None if tensor is None else describe_tensor(tensor))
        for peer in program.pipeline.others():
            program.pipeline.channel.send(peer, Message(key, text=text))
        made = None if tensor is None else tensor.view_as(tensor)
    else:
        message = program.microbatch.receive(owner, key, "whether there is a gradient")
        description = json.loads(message.text or "null")
        made = None if description is None else meta_from(description)
    if made is not None:
        program.placed.place(made, owner)
    return made


def read_grad(program: Program, tensor: Tensor, value: Value) -> Tensor | None:
    """``tensor.grad`` of a tensor that has a place, in the step."""
    return broadcast_gradient(
        program, value.data(tensor).grad if value.owner == program.rank else None, value.owner
    )


def _derivatives_with_graph(
    program: Program, outputs: list[Tensor], grads: list[Tensor | None], inputs: list[Tensor]
) -> list[Tensor | None]:
    """Derivatives that can be differentiated again, on the one rank that has all that is needed."""
    places = [program.value_of(each) for each in outputs]
    owners = {EVERYWHERE if value is None else value.owner for value in places}
    if len(owners) > 1:
        raise UsageError(SECOND)
    (owner,) = owners
    given = [_gradient_for(owner, program, each) for each in grads]
    found: list[Tensor | None] = [None] * len(inputs)
    if owner == program.rank:
        found = _differentiate_here(program, outputs, given, inputs)
    return [broadcast_gradient(program, each, owner) for each in found]


def _differentiate_here(
    program: Program, outputs: list[Tensor], grads: list[Tensor | None], inputs: list[Tensor]
) -> list[Tensor | None]:
    """See :func:`_derivatives_with_graph`; on the rank that has the outputs."""
    segment = program.tape.current
    values = [program.value_of(each) for each in inputs]
    ends = [
        each if (value := program.value_of(each)) is None else program.tape.local(value, each)
        for each in outputs
    ]
    entered = [] if program.tape.replicated is None else program.tape.replicated.used()
    leaves = [(each, value.leaf) for each, value in entered if value.leaf_segment is segment]
    _check_crossings(program, ends, inputs, values, entered)
    here = {
        number: value.data(each) if value.leaf_segment is not segment else value.leaf
        for number, (each, value) in enumerate(zip(inputs, values, strict=True))
        if value is not None and (value.leaf_segment is segment or value.owner == program.rank)
    }
    asked = [*here.values(), *(leaf for _, leaf in leaves)]
    graph = {"create_graph": True, "allow_unused": True}
    got = torch.autograd.grad(ends, asked, grads, **graph) if asked else ()  # type: ignore[arg-type]
    found = dict(zip(here, got, strict=False))
    used = [(each, one) for (each, _), one in zip(leaves, got[len(here) :], strict=True) if one is not None]
    everywhere = [number for number, value in enumerate(values) if value is None]
    if used and everywhere:
        tensors, roots = zip(*used, strict=True)
        rest = torch.autograd.grad(tensors, [inputs[number] for number in everywhere], roots, **graph)
        _check_leaks(program, [one for one in rest if one is not None])
        found.update(zip(everywhere, rest, strict=True))
    return [found.get(number) for number in range(len(inputs))]


def _check_crossings(
    program: Program, ends: list[Tensor], inputs: list[Tensor], values: list[Value | None],
    entered: list[tuple[Tensor, Value]],
) -> None:  # fmt: skip
    """Refuse derivatives through a leaf of the segment that may depend on the inputs: it came after they did."""
    first = min(
        0 if value is not None and each.is_leaf and each._weft_owner is not None  # type: ignore[attr-defined]
        else value.number if value is not None
        else min((known.number for other, known in entered if leads_to(other, each)), default=1 << 62)
        for each, value in zip(inputs, values, strict=True)
    )  # fmt: skip
    reached = {id(leaf_of(node)) for node in graph_nodes(ends)}
    reached.update(id(end) for end in ends)
    for segment in program.tape.segments:
        for leaf, value in segment.living():
            if (
                id(leaf) in reached
                and value.owner != EVERYWHERE
                and value not in values
                and value.number > first
            ):
                raise UsageError(SECOND)


def leads_to(tensor: Tensor, other: Tensor) -> bool:
    """True if ``tensor`` was computed from ``other``, or is it."""
    node = get_gradient_edge(other).node
    return tensor is other or node in graph_nodes([tensor])


def _check_leaks(program: Program, found: list[Tensor]) -> None:
    """Refuse a graph that would give a tensor of all ranks a gradient on this one alone."""
    leaves = {id(leaf) for segment in program.tape.segments for leaf, _ in segment.living()}
    for node in graph_nodes(found):
        tensor = leaf_of(node)
        owner = getattr(tensor, "_weft_owner", None)
        if tensor is not None and owner is None and id(tensor) not in leaves:
            raise UsageError(
                f"torch.autograd.grad(..., create_graph=True): the step itself computes from a tensor of shape "
                f"{list(tensor.shape)}, before the model gets it, in a way that has a second derivative: do that in a "
                "module of the model, or call requires_grad_() on what the model gets"
            )


def check_hidden(name: str, tensors: Sequence[Tensor], program: Program) -> None:
    """Refuse replicated tensors that need a gradient inside of an object of a class that ranks cannot compare.

    What this rank's own modules have put there (a cache) is none: only this rank has it.
    """
    for tensor in tensors if torch.is_grad_enabled() else ():
        if (
            tensor.requires_grad
            and program.value_of(tensor) is None
            and not is_made_here(program.tape, tensor)
        ):
            raise UsageError(
                f"{name} gets a tensor of shape {list(tensor.shape)} that needs a gradient inside of an object, where "
                "the other ranks do not see it: hand it over in an argument of its own, a list, tuple, dict or "
                "dataclass, or detach it"
            )


def refuse_gradient(parameter: Tensor, does: str) -> NoReturn:
    """A step that is split must not use the gradient of one of the model's parameters."""
    raise UsageError(
        f"the step {does} the gradient of a parameter of shape {list(parameter.shape)}: it is whole when all "
        "microbatches have run, and on the rank only that has the parameter. Do that between steps (zero_grad() before "
        "the step, norms and clipping after it)"
    )
