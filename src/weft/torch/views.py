"""Writing into a tensor that shares memory with others, after a message has closed its segment.

A tensor of an earlier segment enters a later one as a leaf (see ``tape``), into which autograd lets nobody write. So
a copy is written, and whatever shared the tensor's memory has to share the copy's from then on: the whole of which
autograd knows them to be views is copied, and they become views of the copy.

    before the message    h = ...       part = h[:, 0]           one memory
    after it              h += 1        writes a copy h', and part becomes h'[:, 0]
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from weft.torch.tape import Value


def writable(program: Any, tensor: Tensor, value: Value, local: Tensor) -> Tensor:
    """``local``, the data of a tensor of this microbatch's ``program``, or what to write into instead."""
    root = root_of(local)
    leaf = root.is_leaf and root.requires_grad and not isinstance(root, nn.Parameter)
    if not leaf and (local is tensor or local is value.actual):
        return local
    found = [view for reference in value.alias.views if (view := reference()) is not None]
    shared = {
        id(view): (view, known) for view in found if (known := shares(program, view, local)) is not None
    }
    if id(tensor) not in shared or len(shared) < 2:
        return local.clone()
    held = {number: data_of(view, known) for number, (view, known) in shared.items()}
    number = max(
        held, key=lambda number: (root_of(held[number]).requires_grad, root_of(held[number]).numel())
    )
    root, segment = root_of(held[number]), shared[number][1].segment
    entered = root
    if segment is not program.tape.current and root.requires_grad:
        whole = Value(program.rank, 0, program, segment, value.alias)
        program.tape.remember(whole, root)
        entered = program.tape.enter(whole, root)
    copy = entered.clone()
    if copy.stride() != root.stride():  # the whole has gaps
        return local.clone()
    for number, (view, known) in shared.items():
        data = held[number]
        new = Value(program.rank, known.number, program, program.tape.current, known.alias)
        new.actual = copy.as_strided(
            data.size(), data.stride(), data.storage_offset() - root.storage_offset()
        )
        if not data.requires_grad:
            new.actual = new.actual.detach()
        view._weft_value = new  # type: ignore[attr-defined]
    renewed: Tensor = tensor._weft_value.actual  # type: ignore[attr-defined]
    return renewed


def root_of(tensor: Tensor) -> Tensor:
    """The whole of which a tensor is a view; itself if it is none."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def data_of(tensor: Tensor, value: Value) -> Tensor:
    return tensor if value.actual is None else value.actual


def shares(program: Any, tensor: Tensor, local: Tensor) -> Value | None:
    """The value of a tensor if this rank has it, in the memory of ``local``."""
    value: Value | None = program.value_of(tensor)
    if value is None or value.owner != program.rank or value.born < value.alias.moved:
        return None
    data = data_of(tensor, value)
    same = (
        data.device == local.device
        and data.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    )
    return value if same else None
