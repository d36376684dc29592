"""Writing into a tensor that shares memory with others, after a message has closed its segment.

A tensor of an earlier segment enters a later one as a leaf (see ``tape``), into which autograd lets nobody write. So
a copy is written, and whatever shared the tensor's memory has to share the copy's from then on: the whole of which
autograd knows them to be views is copied, and they become views of the copy.

    before the message    h = ...       part = h[:, 0]           one memory
    after it              h += 1        writes a copy h', and part becomes h'[:, 0]

What every rank has computed for itself is one rank's from the moment that only that rank writes into it, and so is all
that shares its memory:

    every rank            out = zeros   part = out[:, 0]
    rank 1                part += h     out is rank 1's, too
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.execution.value import Alias, Segment, Value
from weft.torch.pytorch.private import base_of


def writable(program: Any, tensor: Tensor, value: Value, local: Tensor) -> Tensor:
    """What a call may write into for ``tensor``, a tensor of this microbatch's ``program``.

    ``local``, its data on this rank, unless that is a leaf: then a copy of it, and for its views views of the copy.
    """
    if not torch.is_grad_enabled():  # what is written keeps the graph that it has
        if value.owner == program.rank:
            return value.data(tensor)
        with torch.enable_grad():
            return program.tape.enter(value, local).clone() if value.needs_grad else local.clone()
    root = root_of(local)
    leaf = root.is_leaf and root.requires_grad and not isinstance(root, nn.Parameter)
    if not leaf and (local is tensor or local is value.actual):
        return local
    members = [(tensor, value)] + [
        (view, known)
        for reference in value.alias.views
        if (view := reference()) is not None
        and view is not tensor
        and (known := shares(program, view, local))
    ]
    if len(members) == 1 or value.owner != program.rank:
        return local.clone()
    held = [known.data(view) for view, known in members]
    roots = [root_of(data) for data in held]
    wholes = [whole_of(program, root) for root in roots]
    if not any(root is wholes[0] for root in roots):  # it is gone
        wholes = roots
    root = copy = wholes[0]
    segment = next(known.segment for (_, known), of in zip(members, roots, strict=True) if of is root)
    if segment is not program.tape.current and root.requires_grad:
        whole = Value(program.rank, 0, program, segment, value.alias)
        program.tape.remember(whole, root)
        copy = program.tape.enter(whole, root)
    copy = copy.clone()
    for taken in program.taken:
        taken.apart = taken.apart or taken.alias is value.alias
    if copy.stride() != root.stride():  # the whole has gaps
        return local.clone()
    for (view, known), data, of in zip(members, held, wholes, strict=True):
        at = data.storage_offset() - root.storage_offset()
        part = copy.as_strided(data.size(), data.stride(), at)
        if of is root or not data.requires_grad:
            renew(program, view, known, part if data.requires_grad else part.detach())
        elif known.segment is not program.tape.current:  # detached before, and of another graph by now
            program.renewed.append((view, known, known.actual))
            known.actual = program.tape.enter_anew(known, data, part.detach())
    renewed: Tensor = tensor._weft_value.actual  # type: ignore[attr-defined]
    return renewed


def renew(program: Any, tensor: Tensor, value: Value, actual: Tensor) -> None:
    """From now on ``tensor`` is ``actual`` on this rank.

    Nothing has been written yet, and maybe nothing is: the copies that others got stay good. See :func:`as_before`.
    """
    program.renewed.append((tensor, value, value.actual))
    new = Value(program.rank, value.number, program, program.tape.current, value.alias)
    new.actual = actual
    new.sent = value.sent
    program.replace_value(tensor, new)


def as_before(program: Any) -> None:
    """A first call that might have written into its arguments has not: they are again what they were, and no copies.

    What asks for the gradient of one would else get that of a copy, which only the calls after it used.
    """
    for tensor, value, actual in reversed(program.renewed):
        value.actual = actual
        program.replace_value(tensor, value)
    program.renewed.clear()


def received(program: Any, tensor: Tensor, value: Value) -> Value:
    """The value of another rank's tensor; a new one if it was written since this rank got it, for what it was before
    has a gradient of its own."""
    if not value.needs_grad or value.copy_version == value.alias.version:
        return value
    new = Value(value.owner, value.number, value.batch, None, value.alias)
    new.actual = value.actual
    program.replace_value(tensor, new)
    return new


def outdate(program: Any, tensor: Tensor, value: Value) -> None:
    """Another rank has written into ``tensor``: what shares its memory here does not see that."""
    for written in (tensor, *(reference() for reference in value.alias.apart)):
        known = None if written is None else program.value_of(written)
        if known is None or known.owner != program.rank:
            continue
        data = known.data(written)
        for view in (written, *(reference() for reference in known.alias.views)):
            if view is not None and view is not tensor and (found := shares(program, view, data)) is not None:
                found.stale = True


@dataclass
class Taken:
    """Memory that every rank had filled, until ``owner`` alone wrote into it, in a ``segment``. ``apart``: a copy was
    written, since what was there had a graph of every rank's, or one of an earlier segment."""

    storage: Any
    first: int
    end: int
    owner: int
    alias: Alias
    segment: Segment | None
    apart: bool
    module: str


def take(program: Any, tensor: Tensor, value: Value, every: bool, actual: Tensor | None) -> None:
    """``tensor`` has just been written by the rank of its new ``value``; ``every``: it was every rank's before;
    ``actual``: what it is on its owner."""
    for known in program.taken:
        if known.alias is value.alias:
            known.segment = value.segment
    place = span(tensor) if every else None
    if place is None:
        return
    wrote = program.rank == value.owner and torch.is_grad_enabled()
    apart = actual is not tensor if wrote else tensor.requires_grad
    program.taken.append(
        Taken(
            tensor.untyped_storage(), *place, value.owner, value.alias, value.segment, apart, program.module
        )
    )


def taken_value(program: Any, tensor: Tensor) -> Value | None:
    """The value of a tensor that lies in such memory; None for any other.

    Raises:
        UsageError: A copy was written, and this tensor should show it.
    """
    place = span(tensor)
    if place is None:
        return None
    storage = tensor.untyped_storage().data_ptr()
    for taken in program.taken:
        if taken.storage.data_ptr() == storage and place[0] < taken.end and taken.first < place[1]:
            if taken.apart:
                raise UsageError(
                    f"a tensor of shape {list(tensor.shape)} that every rank has shares memory with one that "
                    f"{taken.module or 'the step'} has written into on one rank alone, and does not show that: use the "
                    "tensor that was written, or make the view anew from it"
                )
            value: Value = program.new_value(taken.owner, taken.alias)
            value.segment = taken.segment
            taken.alias.views.append(weakref.ref(tensor))
            tensor._weft_value = value  # type: ignore[attr-defined]
            return value
    return None


def span(tensor: Tensor) -> tuple[int, int] | None:
    """The first of the addresses between which a tensor's data lie, and the one after the last; None without data."""
    if memory(tensor) is None or not tensor.numel():
        return None
    ends = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (ends + 1) * tensor.element_size()


def join(program: Any, tensor: Tensor, alias: Alias) -> None:
    """``tensor``, a result of this rank, shares its memory with what has this alias."""
    alias.views.append(weakref.ref(tensor))
    for reference in alias.apart:
        other = reference()
        value = None if other is None else program.value_of(other)
        if value is not None:
            value.alias.apart.append(weakref.ref(tensor))


def aliases_of(
    program: Any, owner: int, passed: tuple[int, ...], tensors: Sequence[Tensor], entered: dict[int, Tensor]
) -> list[Alias | None]:
    """What each result of a call on ``owner`` shares memory with, if it is an argument, as its ``Spec`` tells.

    ``entered``: what the call got for its arguments on this rank; nothing on others.
    """
    return [None if number < 0 else _alias(program, owner, tensors[number], entered) for number in passed]


def _alias(program: Any, owner: int, tensor: Tensor, entered: dict[int, Tensor]) -> Alias | None:
    value: Value | None = program.value_of(tensor)
    if value is None:
        return None
    if value.owner != owner:
        alias = Alias()
        alias.apart.append(weakref.ref(tensor))
        return alias
    local = entered.get(id(tensor))
    if local is not None and memory(local) != memory(value.data(tensor)):
        renew(program, tensor, value, local)  # a copy was made, for a first call might have written into it
    if not value.alias.views:
        value.alias.views.append(weakref.ref(tensor))
    return value.alias


def without_grad(program: Any, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Value]]:
    """What shares memory with ``tensors`` on this rank and needs no gradient: what is written may change that."""
    values = [value for tensor in tensors if (value := program.value_of(tensor)) is not None]
    views = [view for value in values for reference in value.alias.views if (view := reference()) is not None]
    placed = [(view, known) for view in views if (known := program.value_of(view)) is not None]
    return [(view, known) for view, known in placed if not known.data(view).requires_grad]


def need_grad(program: Any, members: Sequence[tuple[Tensor, Value]]) -> None:
    """Those of ``members`` that need a gradient by now do so from the present segment on."""
    for view, known in members:
        if known.owner == program.rank and known.data(view).requires_grad:
            known.segment = program.tape.current


def root_of(tensor: Tensor) -> Tensor:
    """The whole of which autograd knows a tensor to be a view; itself if it is none."""
    base = base_of(tensor)
    return tensor if base is None else base


def whole_of(program: Any, root: Tensor) -> Tensor:
    """Where a root comes from, through the leaves by which that entered later segments."""
    entered = program.tape.entered.get(id(root))
    earlier = None if entered is None else entered()
    return root if earlier is None else whole_of(program, root_of(earlier))


def shares(program: Any, tensor: Tensor, local: Tensor) -> Value | None:
    """The value of a tensor if this rank has it, in the memory of ``local``."""
    value: Value | None = program.value_of(tensor)
    if value is None or value.owner != program.rank or value.stale:
        return None
    place = memory(local)
    return value if place is not None and memory(value.data(tensor)) == place else None


def memory(tensor: Tensor) -> tuple[Any, int] | None:
    """Where a tensor's data lie; None if it has none of its own."""
    if (
        tensor.layout != torch.strided
        or tensor.device.type == "meta"
        or not tensor.untyped_storage().nbytes()
    ):
        return None
    return tensor.device, tensor.untyped_storage().data_ptr()
