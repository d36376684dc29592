"""Activations of waiting microbatches outside of the device: what autograd keeps goes there, and comes back in time.

A schedule says which microbatches wait between their forward and their backward pass. What autograd keeps for those is
copied out while they run. The backward pass uses it in reverse order, so what comes next is fetched ahead, also that
of the microbatch whose backward pass the schedule has next. One whose backward pass follows its forward pass at once
keeps its activations.

Whole storages are copied, once each, however many tensors look at them. Weights stay, and so do small tensors.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from weft.runtime.microbatch import present
from weft.torch.offload.host_memory import HostMemory
from weft.torch.pytorch.private import PLAIN, base_of, in_backward, version
from weft.torch.tensors.kept import Kept, kept, taken

LEAST_BYTES = 256 << 10
"""A storage below this stays."""
AHEAD, AHEAD_BYTES = 16, 256 << 20
"""So many storages, of so many bytes, are fetched ahead of the backward pass."""


class Activations:
    """The tensors that autograd keeps for the microbatches of a rank, outside of its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = HostMemory(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copying: list[weakref.ref[_Storage]] = []
        self._weights: set[int] = set()
        self._groups: dict[tuple[int, int], _Group] = {}
        self._known: dict[StorageWeakRef, tuple[int, weakref.ref[_Storage]]] = {}

        def unpacked(known: Kept | _View) -> Tensor:
            return taken(known) if isinstance(known, Kept) else self._unpack(known)

        setattr(unpacked, PLAIN, True)
        self._hooks = self._pack, unpacked

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """A step of these modules begins."""
        self._groups.clear()
        self._known.clear()
        self.copying.clear()
        tensors = (itertools.chain(module.parameters(), module.buffers()) for module in modules)
        self._weights = {
            tensor.untyped_storage().data_ptr()
            for tensor in itertools.chain.from_iterable(tensors)
            if type(tensor) in (Tensor, nn.Parameter) and tensor.device == self.device
        }
        self.memory.forget_unused()

    def waiting(self) -> AbstractContextManager[object]:
        """Inside, what autograd keeps for a microbatch that will wait is kept outside of the device."""
        microbatch = present()
        if microbatch is None or microbatch.phase != "F" or not microbatch.waits_before_backward():
            return nullcontext()
        return self.all()

    def all(self) -> AbstractContextManager[object]:
        """Inside, what autograd keeps is kept outside of the device."""
        return torch.autograd.graph.saved_tensors_hooks(*self._hooks)

    def _pack(self, tensor: Tensor) -> Kept | _View:
        """A tensor as autograd keeps it: itself if it is small or a weight."""
        plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device == self.device
        if not plain or tensor.is_conj() or tensor.is_neg() or in_backward():
            return kept(tensor)
        storage = tensor.untyped_storage()
        is_weight = storage.data_ptr() in self._weights or isinstance(base_of(tensor), nn.Parameter)
        if is_weight or storage.nbytes() < LEAST_BYTES:
            return kept(tensor)
        place = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        return _View(self._copied(tensor), tensor.dtype, place)

    def _copied(self, tensor: Tensor) -> _Storage:
        """The storage of a tensor as it is now, outside of the device; copied once, unless it was written since."""
        key = StorageWeakRef(tensor.untyped_storage())
        written, known = self._known.get(key, (-1, None))
        found = None if known is None else known()
        if found is None or written != version(tensor):
            found = _Storage(self, self._group(), tensor)
            self._known[key] = version(tensor), weakref.ref(found)
        return found

    def _group(self) -> _Group:
        """The group of the present microbatch."""
        microbatch = present()
        place = (0, 0) if microbatch is None else (microbatch.stage, microbatch.index)
        if place not in self._groups:
            following = None if microbatch is None else microbatch.next_backward()
            self._groups[place] = _Group([], following)
        return self._groups[place]

    def _unpack(self, view: _View) -> Tensor:
        """The tensor, as autograd needs it."""
        storage = view.storage
        left = AHEAD_BYTES
        for other in itertools.islice(self._before(storage), AHEAD):
            left -= other.nbytes
            if left < 0:
                break
            other.fetch()
        found = torch.empty(0, dtype=view.dtype, device=self.device)
        return found.set_(storage.there().untyped_storage(), *view.place)

    def _before(self, storage: _Storage) -> Iterator[_Storage]:
        """The storages that the backward pass needs after this one: those kept before it, then the next one's."""
        group: _Group | None = storage.group
        number = storage.number
        while group is not None:
            for reference in reversed(group.storages[:number]):
                found = reference()
                if found is not None:
                    yield found
            group = None if group.following is None else self._groups.get(group.following)
            number = -1 if group is None else len(group.storages)


class _Group(NamedTuple):
    """The storages of a microbatch in a stage, in the order of the forward pass, and whose backward pass comes next."""

    storages: list[weakref.ref[_Storage]]
    following: tuple[int, int] | None


class _View(NamedTuple):
    """A tensor as autograd keeps it: its storage, and how it looks at it."""

    storage: _Storage
    dtype: torch.dtype
    place: tuple[int, torch.Size, tuple[int, ...]]


class _Storage:
    """The content of a storage outside of the device, until nobody needs it.

    A GPU copies it beside its computing. Meanwhile the source is held, so that nothing else takes its memory.
    """

    def __init__(self, owner: Activations, group: _Group, tensor: Tensor) -> None:
        self.owner, self.group, self.number = owner, group, len(group.storages)
        group.storages.append(weakref.ref(self))
        self.nbytes = tensor.untyped_storage().nbytes()
        self._home = owner.memory.take(self.nbytes)
        self._there: Tensor | None = None
        self._source: tuple[Tensor, int] | None = None
        self._event: Any = None
        self._written = False
        host, source = _bytes_of(self._home), _bytes_of(tensor.untyped_storage())
        if owner.stream is None:
            host.copy_(source)
            owner.memory.page_out(self._home)
            return
        owner.copying = [one for one in owner.copying if (known := one()) is not None and known.is_copying()]
        owner.stream.wait_stream(torch.cuda.current_stream(owner.device))
        with torch.cuda.stream(owner.stream):
            host.copy_(source, non_blocking=True)
            self._event = owner.stream.record_event()
        self._source = tensor.detach(), version(tensor)
        owner.copying.append(weakref.ref(self))

    def __del__(self) -> None:
        self.owner.memory.give(self._home)

    def is_copying(self) -> bool:
        """True if the source is not copied yet; else it is let go."""
        if self._source is not None and self._event.query():
            self._written = version(self._source[0]) != self._source[1]
            self._source = None
        return self._source is not None

    def fetch(self) -> None:
        """Begin to bring the content back."""
        stream = self.owner.stream
        if stream is None:
            self.owner.memory.page_in(self._home)
        elif self._there is None and self._source is None:
            with torch.cuda.stream(stream):
                self._there = _bytes_of(self._home).to(self.owner.device, non_blocking=True)
                self._event = stream.record_event()

    def there(self) -> Tensor:
        """The bytes on the device.

        Raises:
            RuntimeError: Somebody has written into the source while it was copied.
        """
        if self._source is not None:
            self._written = version(self._source[0]) != self._source[1]
        if self._written:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, "
                "while its memory was copied to the host (offload_activations)"
            )
        if self._there is None and self._source is not None:
            self._there = _bytes_of(self._source[0].untyped_storage())
            return self._there
        if self._there is None:
            if self.owner.stream is None:
                self._there = _bytes_of(self._home).clone()
                self.owner.memory.page_out(self._home)
                return self._there
            self.fetch()
        assert self._there is not None
        if self.owner.stream is not None and self._event is not None:
            current = torch.cuda.current_stream(self.owner.device)
            current.wait_event(self._event)
            self._there.record_stream(current)
        return self._there


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
