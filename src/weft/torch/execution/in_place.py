"""Writing into a tensor that shares memory with others, after a message has closed its segment.

A tensor of an earlier segment enters a later one as a leaf (see ``tape``), into which autograd lets nobody write. So
a copy is written, and whatever shared the tensor's memory has to share the copy's from then on: the whole of which
autograd knows them to be views is copied, and they become views of the copy.

    before the message    h = ...       part = h[:, 0]           one memory
    after it              h += 1        writes a copy h', and part becomes h'[:, 0]

Other ranks know of the memory by :class:`Alias`: its version grows with every write, so copies there count as old.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from weft.torch.calls.call_signature import meta_like
from weft.torch.execution.replicated import EVERYWHERE
from weft.torch.execution.tape import Tape
from weft.torch.execution.value import Alias, PlacedTensors, Value, memory_of
from weft.torch.pytorch.private import base_of

Member = tuple[Tensor, Value]
"""A tensor that shares memory with another one, and its value."""


class Aliases:
    """The tensors that share memory in one microbatch on this rank, and what becomes of them when it is written."""

    def __init__(self, placed: PlacedTensors, tape: Tape) -> None:
        self._rank = placed.rank
        self._placed = placed
        self._tape = tape
        self.renewed: list[tuple[Tensor, Value, Tensor | None]] = []
        """What the present call has got copies of, to write into: tensor, value, and ``Value.actual`` before."""

    # --- before a call ----------------------------------------------------------------------------------------

    def received(self, tensor: Tensor, value: Value) -> Value:
        """The value by which this rank receives another rank's tensor.

        It is a new one if the tensor was written since this rank got it: what the tensor was before has a gradient of
        its own.
        """
        if not value.needs_grad or value.copy_version == value.alias.version:
            return value
        new = Value(value.owner, value.number, value.batch, None, value.alias)
        new.actual = value.actual
        self._placed.replace_value(tensor, new)
        return new

    def writable(self, tensor: Tensor, value: Value, local: Tensor) -> Tensor:
        """The tensor that a call may write into for ``tensor``.

        That is ``local``, the tensor's data on this rank, unless autograd forbids to write into it. Then it is a copy
        of the data, and views of the data are views of the copy from now on.
        """
        if not torch.is_grad_enabled():  # what is written keeps the graph that it has
            if value.owner == self._rank:
                return value.data(tensor)
            with torch.enable_grad():
                return self._tape.enter(value, local).clone() if value.needs_grad else local.clone()
        root = root_of(local)
        leaf = root.is_leaf and root.requires_grad and not isinstance(root, nn.Parameter)
        if not leaf and (local is tensor or local is value.actual):
            return local
        members = [(tensor, value)] + [
            (view, known)
            for view in living(value.alias.views)
            if view is not tensor and (known := self._value_in(view, local))
        ]
        if len(members) == 1 or value.owner != self._rank:
            return local.clone()
        written = self._copy_whole(members)
        return local.clone() if written is None else written

    def _copy_whole(self, members: Sequence[Member]) -> Tensor | None:
        """The first member as a view of a copy; all members are views of that copy from now on. None without a copy.

        The copy is of the whole of which autograd knows them to be views. None if the whole has gaps, which a copy
        would not have.
        """
        held = [known.data(view) for view, known in members]
        roots = [root_of(data) for data in held]
        full_tensors = [self._whole_of(root) for root in roots]
        if not any(root is full_tensors[0] for root in roots):  # it is gone
            full_tensors = roots
        alias, whole = members[0][1].alias, full_tensors[0]
        segment = next(
            known.segment for (_, known), root in zip(members, roots, strict=True) if root is whole
        )
        copy = whole
        if segment is not self._tape.current and whole.requires_grad:
            stands_for = Value(self._rank, 0, self._placed.batch, segment, alias)
            self._tape.remember(stands_for, whole)
            copy = self._tape.enter(stands_for, whole)
        copy = copy.clone()
        self._placed.note_copy(alias)
        if copy.stride() != whole.stride():
            return None
        parts = [same_view(data, whole, copy) for data in held]
        if any(part is None for part in parts):
            return None
        for (view, known), data, of, part in zip(members, held, full_tensors, parts, strict=True):
            assert part is not None
            if of is whole or not data.requires_grad:
                self._renew(view, known, part if data.requires_grad else part.detach())
            elif known.segment is not self._tape.current:  # detached before, and of another graph by now
                self.renewed.append((view, known, known.actual))
                known.actual = self._tape.enter_anew(known, data, part.detach())
        value = self._placed.value_of(members[0][0])
        assert value is not None
        return value.actual

    def _whole_of(self, root: Tensor) -> Tensor:
        """Where a root comes from, through the leaves by which it entered later segments."""
        entered = self._tape.entered.get(id(root))
        earlier = None if entered is None else entered()
        return root if earlier is None else self._whole_of(root_of(earlier))

    def _renew(self, tensor: Tensor, value: Value, actual: Tensor) -> None:
        """Let ``tensor`` be ``actual`` on this rank from now on.

        Nothing has been written yet, and maybe nothing is: the copies that others got stay good. See
        :meth:`undo_copies`.
        """
        self.renewed.append((tensor, value, value.actual))
        new = Value(self._rank, value.number, self._placed.batch, self._tape.current, value.alias)
        new.actual = actual
        new.sent = value.sent
        self._placed.replace_value(tensor, new)

    def members_without_grad(self, tensors: Sequence[Tensor]) -> list[Member]:
        """The tensors that share memory with ``tensors`` on this rank and need no gradient; a call's writing may
        change that."""
        found: list[Member] = []
        for tensor in tensors:
            value = self._placed.value_of(tensor)
            for view in () if value is None else living(value.alias.views):
                known = self._placed.value_of(view)
                if known is not None and not known.data(view).requires_grad:
                    found.append((view, known))
        return found

    # --- after a call -----------------------------------------------------------------------------------------

    def note_grad(self, members: Sequence[Member]) -> None:
        """Move those of ``members`` that need a gradient by now into the present segment."""
        for view, known in members:
            if known.owner == self._rank and known.data(view).requires_grad:
                known.segment = self._tape.current

    def undo_copies(self) -> None:
        """Let the call's arguments be what they were, and no copies: it might have written, and has not.

        What asks for the gradient of one would else get that of a copy, which only the calls after it used.
        """
        for tensor, value, actual in reversed(self.renewed):
            value.actual = actual
            self._placed.replace_value(tensor, value)
        self.renewed.clear()

    def overwrite(self, tensor: Tensor, owner: int, actual: Tensor | None, module: str) -> None:
        """Give ``tensor``, which a call on ``owner`` has written, a new value there; copies elsewhere are old.

        ``actual``: the tensor on its owner, None on other ranks. ``module``: whose code wrote.
        """
        old = self._placed.value_of(tensor)
        if tensor._weft_owner is not None:  # type: ignore[attr-defined]
            if old is not None:
                old.alias.version += 1
            return
        if old is None and tensor.requires_grad and not torch.is_grad_enabled():
            actual = self._past_the_write(tensor, owner, actual)
        value = self._placed.new_value(owner, None if old is None else old.alias)
        value.alias.version += 1
        self._placed.take_memory(tensor, value, old is None, actual, module)
        if old is not None and self._rank != owner:
            self._outdate(tensor, old)
        if owner == self._rank:
            value.actual = actual if actual is not tensor else None
            if old is not None and old.owner == owner and not torch.is_grad_enabled():
                value.segment = old.segment
        elif old is not None and old.actual is not None:
            value.actual = meta_like(old.actual)
        tensor._weft_value = value  # type: ignore[attr-defined]

    def _past_the_write(self, tensor: Tensor, owner: int, actual: Tensor | None) -> Tensor | None:
        """A replicated tensor on ``owner``, which has written into it without grad mode: its gradient goes on to
        what every rank has computed, as if nothing had been written."""
        replicated = self._tape.need_replicated()
        value = replicated.use(tensor, owner, lambda: self._placed.new_value(EVERYWHERE), written=True)
        if actual is None:
            return None
        with torch.enable_grad():
            return self._tape.enter(value, actual)

    def _outdate(self, tensor: Tensor, value: Value) -> None:
        """Another rank has written into ``tensor``: what shares its memory here does not show that."""
        for written in (tensor, *living(value.alias.apart)):
            known = self._placed.value_of(written)
            if known is None or known.owner != self._rank:
                continue
            data = known.data(written)
            for view in (written, *living(known.alias.views)):
                if view is not tensor and (found := self._value_in(view, data)) is not None:
                    found.stale = True

    def of_results(
        self, owner: int, passed: Sequence[int], tensors: Sequence[Tensor], entered: dict[int, Tensor]
    ) -> list[Alias | None]:
        """The memory that each result of a call on ``owner`` shares, if it is an argument, as its ``Spec`` says.

        ``entered``: what the call got for its arguments on this rank; nothing on others.
        """
        return [None if number < 0 else self._of_result(owner, tensors[number], entered) for number in passed]

    def _of_result(self, owner: int, tensor: Tensor, entered: dict[int, Tensor]) -> Alias | None:
        value = self._placed.value_of(tensor)
        if value is None:
            return None
        if value.owner != owner:
            alias = Alias()
            alias.apart.append(weakref.ref(tensor))
            return alias
        local = entered.get(id(tensor))
        if local is not None and memory_of(local) != memory_of(value.data(tensor)):
            self._renew(tensor, value, local)  # a copy was made, for a first call might have written into it
        if not value.alias.views:
            value.alias.views.append(weakref.ref(tensor))
        return value.alias

    def join(self, tensor: Tensor, alias: Alias) -> None:
        """Note that ``tensor``, a result of this rank, shares its memory with what has this alias."""
        alias.views.append(weakref.ref(tensor))
        for other in living(alias.apart):
            value = self._placed.value_of(other)
            if value is not None:
                value.alias.apart.append(weakref.ref(tensor))

    # --- looking ----------------------------------------------------------------------------------------------

    def _value_in(self, tensor: Tensor, local: Tensor) -> Value | None:
        """The value of a tensor if this rank has it, in the memory of ``local``."""
        value = self._placed.value_of(tensor)
        if value is None or value.owner != self._rank or value.stale:
            return None
        memory = memory_of(local)
        return value if memory is not None and memory_of(value.data(tensor)) == memory else None


def living(references: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    """The tensors that there still are."""
    return [tensor for reference in references if (tensor := reference()) is not None]


def root_of(tensor: Tensor) -> Tensor:
    """The whole of which autograd knows a tensor to be a view; the tensor itself if it is no view."""
    base = base_of(tensor)
    return tensor if base is None else base


def same_view(view: Tensor, whole: Tensor, copy: Tensor) -> Tensor | None:
    """The view of a copy, whose memory begins with it, that a tensor is of the whole.

    It may read pairs of real numbers as complex ones, or the other way round. None if it reads the memory in yet
    another way: as another type, or conjugated.

    >>> whole = torch.arange(8.0).view(4, 2)
    >>> same_view(torch.view_as_complex(whole)[1:3], whole, whole + 10)
    tensor([12.+13.j, 14.+15.j])
    >>> same_view(whole.view(torch.int32), whole, whole.clone())
    """
    if view.is_conj() != whole.is_conj() or view.is_neg() != whole.is_neg():
        return None
    size, stride, at, start = [*view.size()], [*view.stride()], view.storage_offset(), whole.storage_offset()
    if view.dtype == whole.dtype:
        return copy.as_strided(size, stride, at - start)
    if view.is_complex() and view.dtype.to_real() == whole.dtype:
        pairs = copy.as_strided([*size, 2], [*(2 * each for each in stride), 1], 2 * at - start)
        return torch.view_as_complex(pairs)
    if whole.is_complex() and whole.dtype.to_real() == view.dtype:
        return torch.view_as_real(copy).as_strided(size, stride, at - 2 * start)
    return None
