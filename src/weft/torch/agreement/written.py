"""Weights that something else than an optimizer or a step has written, found by their version counters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import Tensor

from weft.torch.pytorch.private import version
from weft.torch.session.divergence import digest_of, some_of

_State = tuple["weakref.ref[Tensor]", int, int]


def _state(tensor: Tensor) -> _State:
    return weakref.ref(tensor), version(tensor), tensor.data_ptr()


class Written:
    """Watches tensors between steps.

    A tensor whose counter is not the one of its last :meth:`note` was written by the script.
    """

    def __init__(self) -> None:
        self._known: dict[int, _State] = {}
        self._by_script: dict[int, weakref.ref[Tensor]] = {}
        self._before: set[str] = set()
        """The names of those that the script had written one step earlier."""

    def look(self, tensors: Iterable[Tensor]) -> None:
        """Find what the script has written up to now, right before something of PyTorch's or weft's writes."""
        known = self._known
        for tensor in tensors:
            before = known.get(id(tensor))
            # ids are used again: one that a freed tensor had says nothing of this one
            if before is not None and before != (now := _state(tensor)) and before[0] is now[0]:
                self._by_script[id(tensor)] = now[0]

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Take these as they are now for known."""
        self._known.update((id(tensor), _state(tensor)) for tensor in tensors)

    def take(self, named: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors that the script has written since the last call, by name."""
        found: dict[str, Tensor] = {}
        for each in named:
            self.look(each.values())
            if self._by_script:
                found |= {name: tensor for name, tensor in each.items() if self._has(tensor)}
        self._by_script.clear()
        self.note(found.values())
        return found

    def _has(self, tensor: Tensor) -> bool:
        written = self._by_script.get(id(tensor))
        return written is not None and written() is tensor  # not a freed one that had the same id

    def digests(self, found: Mapping[str, Tensor]) -> dict[str, str]:
        """A digest of each tensor that :meth:`take` gave; of a few values where the script writes before each step."""
        digests = {
            name: digest_of(some_of(tensor) if name in self._before and tensor.is_contiguous() else tensor)
            for name, tensor in found.items()
        }
        self._before = {*found}
        return digests

    def begin_anew(self, tensors: Iterable[Tensor]) -> None:
        """A step has ended: these are all that there is to watch, and known as they are now."""
        self._known = {id(tensor): _state(tensor) for tensor in tensors}
        self._by_script.clear()
