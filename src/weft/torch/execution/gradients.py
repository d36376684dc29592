"""Autograd's own entry points in a step that is split: backward passes, gradients of chosen tensors, and ``.grad``.

``torch.autograd.grad`` without ``create_graph`` is a pass over the tape like a backward pass, but for chosen tensors:
it crosses ranks. With ``create_graph`` the result has a graph of its own, which autograd makes in one place only: the
outputs and all that lies between them and the inputs must be on one rank, in one segment. All else is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from weft.errors import UsageError
from weft.torch.backward.autograd import graph_nodes, leaf_of, root_gradient
from weft.torch.calls.call_signature import empty_of, shown
from weft.torch.execution.replicated import EVERYWHERE, made_here
from weft.torch.execution.value import Value
from weft.torch.tensors.description import describe_tensor
from weft.transport.channel import READ, Message

SECOND = (
    "torch.autograd.grad(..., create_graph=True) needs a second derivative through modules on several partitions, or "
    "through what was sent between them, which is not supported: put all that lies between its outputs and its inputs "
    "on one partition, weft.set_partition(module, index), or leave create_graph out if no backward pass goes through "
    "the result"
)


def backward(program: Any, tensors: Any, grads: Any, keep: bool = False) -> None:
    """The backward pass of the microbatch from one tensor or several, with their gradients or ``None``.

    On every rank of the pipeline. ``keep``: another pass may go through the same graph later.
    """
    _seed(program, *paired(tensors, grads), program.scale)
    program.microbatch.begin("B")
    program.tape.backward(keep)


def paired(tensors: Any, grads: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Tensors and their gradients, as many of both."""
    several = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    given = list(grads) if isinstance(grads, (list, tuple)) else [grads] * len(several)
    if len(given) != len(several):
        raise UsageError(f"backward() got {len(several)} tensors, but {len(given)} gradients for them")
    return several, given


def _seed(program: Any, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], scale: float) -> None:
    """A pass is to begin at ``tensors``."""
    for tensor, grad in zip(tensors, grads, strict=True):
        value = program.value_of(tensor)
        if value is None and not tensor.requires_grad:
            raise UsageError(
                "backward() got a tensor that was not computed by the model in this microbatch, so that no "
                "parameter could get a gradient from it"
            )
        grad = _local(program, grad, program.rank if value is None else value.owner)
        if value is None:
            program.replicated().seed(tensor, root_gradient(tensor, grad, scale))
        elif value.owner == program.rank:
            tensor = value.data(tensor)
            root = root_gradient(tensor, grad, scale)
            program.tape.remember(value, tensor)
            value.add_grad(root)


def _local(program: Any, tensor: Tensor | None, owner: int) -> Tensor | None:
    """A tensor as ``owner`` needs it, which gets it from the rank that has it."""
    value = None if tensor is None else program.value_of(tensor)
    if value is None:
        return tensor
    if owner == program.rank:
        return program.local(tensor, value)
    program.send_all([(tensor, value)], owner)
    return tensor


def grad(
    program: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None,
    is_grads_batched: bool = False, materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """``torch.autograd.grad``, where outputs or inputs have places."""
    targets = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if is_grads_batched or not all(isinstance(target, Tensor) for target in targets):
        raise UsageError(
            "inside a step that is split, torch.autograd.grad takes tensors as inputs, and no is_grads_batched"
        )
    if not all(shown(target).requires_grad for target in targets):
        raise UsageError(
            "torch.autograd.grad got an input that needs no gradient: call requires_grad_() on it"
        )
    several, given = paired(outputs, grad_outputs)
    find = _with_graph if create_graph else _first
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


def _zeros(program: Any, target: Tensor) -> Tensor:
    like = shown(target)
    return torch.zeros(like.shape, dtype=like.dtype, device=program.pipeline.device)


def _first(
    program: Any, outputs: list[Tensor], grads: list[Tensor | None], inputs: list[Tensor]
) -> list[Tensor | None]:
    """First derivatives, across ranks."""
    _seed(program, outputs, grads, 1.0)
    values = [program.value_of(each) for each in inputs]
    wanted: dict[int, tuple[Value, Tensor]] = {}
    for number, (each, value) in enumerate(zip(inputs, values, strict=True)):
        if value is None:
            wanted[number] = Value(EVERYWHERE, 0, program, None, None), each
        elif value.owner == program.rank:
            wanted[number] = value, value.data(each)
    found = dict(zip(wanted, program.tape.gradients(list(wanted.values())), strict=True))
    return [
        found[number] if value is None else told(program, found.get(number), value.owner)
        for number, value in enumerate(values)
    ]


def told(program: Any, tensor: Tensor | None, owner: int) -> Tensor | None:
    """A tensor, or none, that ``owner`` has and tells the other ranks of: it gets a place."""
    key = program.tape.key(READ, program.next_call(("the gradient of a tensor",)))
    if owner == program.rank:
        text = json.dumps(None if tensor is None else describe_tensor(tensor))
        for peer in program.pipeline.others():
            program.pipeline.channel.send(peer, Message(key, text=text))
        made = None if tensor is None else tensor.view_as(tensor)
    else:
        message = program.microbatch.receive(owner, key, "whether there is a gradient")
        description = json.loads(message.text or "null")
        made = None if description is None else empty_of(description)
    if made is not None:
        made._weft_value = program.new_value(owner, None)  # type: ignore[attr-defined]
    return made


def grad_of(program: Any, tensor: Tensor, value: Value) -> Tensor | None:
    """``tensor.grad`` of a tensor that has a place, in the step."""
    return told(program, value.data(tensor).grad if value.owner == program.rank else None, value.owner)


def _with_graph(
    program: Any, outputs: list[Tensor], grads: list[Tensor | None], inputs: list[Tensor]
) -> list[Tensor | None]:
    """Derivatives that can be differentiated again, on the one rank that has all that is needed."""
    places = [program.value_of(each) for each in outputs]
    owners = {EVERYWHERE if value is None else value.owner for value in places}
    if len(owners) > 1:
        raise UsageError(SECOND)
    (owner,) = owners
    given = [_local(program, each, owner) for each in grads]
    found: list[Tensor | None] = [None] * len(inputs)
    if owner == program.rank:
        found = _here(program, outputs, given, inputs)
    return [told(program, each, owner) for each in found]


def _here(
    program: Any, outputs: list[Tensor], grads: list[Tensor | None], inputs: list[Tensor]
) -> list[Tensor | None]:
    """See :func:`_with_graph`; on the rank that has the outputs."""
    segment = program.tape.current
    values = [program.value_of(each) for each in inputs]
    ends = [program.tape.local(program.value_of(each), each) for each in outputs]
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
    got = torch.autograd.grad(ends, asked, grads, **graph) if asked else ()
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
    program: Any, ends: list[Tensor], inputs: list[Tensor], values: list[Any], entered: list[tuple[Tensor, Value]]
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
    """Whether ``tensor`` was computed from ``other``, or is it."""
    node = get_gradient_edge(other).node
    return tensor is other or node in graph_nodes([tensor])


def _check_leaks(program: Any, found: list[Tensor]) -> None:
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


def check_hidden(name: str, tensors: Sequence[Tensor], program: Any) -> None:
    """Refuse replicated tensors that need a gradient inside of an object of a class that ranks cannot compare.

    What this rank's own modules have put there (a cache) is none: only this rank has it.
    """
    for tensor in tensors if torch.is_grad_enabled() else ():
        if tensor.requires_grad and program.value_of(tensor) is None and not made_here(program.tape, tensor):
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
