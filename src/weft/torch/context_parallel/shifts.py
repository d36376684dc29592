"""Shifted positions and convolutions along them: `pad`, `cat`, slices, `conv1d`.

Models write these in two steps, of which the first gives more or fewer positions than the sequence has: a convolution
that is padded on both sides and then cut, zeros in front of a sequence without its last position. Parts of such a
length would be at other positions. So a `Window` is noted on the result instead, and computed when a later step has
brought it to the length of the sequence. The first step alone takes the whole.

    x                       0 1 2 3 4 5 6 7
    pad(x, (1, 0))        . 0 1 2 3 4 5 6 7          Window(start=-1, stop=8)
    pad(x, (1, 0))[:-1]   . 0 1 2 3 4 5 6            Window(start=-1, stop=7): as long as x
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.errors import UsageError
from weft.torch.pytorch.private import version
from weft.torch.pytorch.torch_functions import named
from weft.torch.tensor_parallel.rules import Rule, Unsplittable, shard_of
from weft.torch.tensor_parallel.shard_group import ShardGroup
from weft.torch.tensors.marks import WINDOW

from .exchange import gather, sharded
from .neighbours import with_neighbours
from .weights import used


@dataclass(frozen=True)
class Convolution:
    """A convolution with stride 1 and without padding."""

    weight: Tensor
    bias: Tensor | None
    dilation: int
    groups: int

    @property
    def lost(self) -> int:
        """The number of positions that the result lacks."""
        return self.dilation * (self.weight.shape[-1] - 1)

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight, self.bias, 1, 0, self.dilation, self.groups)

    def on_positions(self, shard_group: ShardGroup) -> Convolution:
        """The same for this rank's positions: gradients of all are summed."""
        bias = None if self.bias is None else used(self.bias, shard_group)
        return dataclasses.replace(self, weight=used(self.weight, shard_group), bias=bias)


@dataclass(frozen=True)
class Window:
    """The positions of a sharded sequence from ``start`` to ``stop``, with zeros beyond it, and a convolution of them.

    Attributes:
        x: The sequence.
        dim: Its dim of positions.
        head: What stands in front of it instead of zeros: ``-start`` positions.
        convolution: What is done with the positions.
        written: How often the sequence had been written.
    """

    x: DTensor
    dim: int
    start: int
    stop: int
    head: Tensor | None = None
    convolution: Convolution | None = None
    written: int = 0

    @classmethod
    def of(cls, x: DTensor) -> Window:
        """The window noted on a tensor, or all of its positions."""
        known: Window | None = getattr(x, WINDOW)
        if known is not None:
            return known
        dim = shard_of(x)
        if dim is None:
            raise Unsplittable("takes whole sequences")
        return cls(x, dim, 0, x.shape[dim], written=version(x.to_local()))

    @property
    def total(self) -> int:
        """The number of positions of the sequence."""
        return int(self.x.shape[self.dim])

    @property
    def length(self) -> int:
        """The number of positions of the window."""
        return self.stop - self.start - (self.convolution.lost if self.convolution else 0)

    def padded(self, before: int, behind: int) -> Window:
        """The window with zeros on both sides.

        Raises:
            Unsplittable: There are positions, or something else, where zeros are to be.
        """
        if self.convolution or (before and (self.start > 0 or self.head is not None)):
            raise Unsplittable("pads a part of a sequence")
        if behind and self.stop < self.total:
            raise Unsplittable("pads a part of a sequence")
        return dataclasses.replace(self, start=self.start - before, stop=self.stop + behind)

    def narrowed(self, first: int, stop: int) -> Window:
        """The positions from ``first`` to ``stop`` of the window."""
        start, head = self.start + first, self.head
        if head is not None:
            head = head.narrow(self.dim, first, -start) if start < 0 else None
        return dataclasses.replace(self, start=start, stop=self.stop - (self.length - stop), head=head)

    def computed(self, shard_group: ShardGroup) -> DTensor:
        """The window as a sharded tensor, if it is as long as the sequence; else as one that is still to be computed.

        Raises:
            Unsplittable: It sees more positions beside a rank's own than its neighbour has.
        """
        if self.length != self.total:
            local = self.x.to_local()
            if self.convolution:
                local = local.narrow(-2, 0, 1).expand(self._shape(local.shape))
            result = sharded(local.view_as(local), self.dim, max(self.length, 0), shard_group)
            setattr(result, WINDOW, self)
            return result
        self._unwritten()
        head = None if self.head is None else used(self.head, shard_group)
        blocks = with_neighbours(
            self.x.to_local(), self.dim, self.total, -self.start, self.stop - self.total, shard_group, head
        )
        if self.convolution:
            blocks = list(map(self.convolution.on_positions(shard_group), blocks))
        local = blocks[0] if len(blocks) == 1 else torch.cat(blocks, self.dim)
        return sharded(local.contiguous(), self.dim, self.total, shard_group)

    def _shape(self, shape: torch.Size) -> list[int]:
        assert self.convolution is not None
        return [*shape[:-2], self.convolution.weight.shape[0], shape[-1]]

    def _unwritten(self) -> None:
        if version(self.x.to_local()) != self.written:
            raise UsageError(
                "a sequence that is split over axis tp was written after it was padded, shifted or cut, and before the "
                "result was used: write into a copy, x.clone()"
            )

    def whole(self, shard_group: ShardGroup) -> Tensor:
        """A plain tensor with all of the window, for what every rank computes alike."""
        self._unwritten()
        full = gather(self.x, shard_group)
        full = full.narrow(self.dim, max(self.start, 0), min(self.stop, self.total) - max(self.start, 0))
        pieces = [full]
        if self.start < 0:
            pieces.insert(0, _zeros(full, self.dim, -self.start) if self.head is None else self.head)
        if self.stop > self.total:
            pieces.append(_zeros(full, self.dim, self.stop - self.total))
        full = torch.cat(pieces, self.dim)
        return self.convolution(full) if self.convolution else full


def _zeros(tensor: Tensor, dim: int, count: int) -> Tensor:
    return tensor.new_zeros([*tensor.shape[:dim], count, *tensor.shape[dim + 1 :]])


def pad(args: Any, kwargs: Any) -> Window | None:
    """Zeros before and behind positions."""
    given = {**dict(zip(("input", "pad", "mode", "value"), args, strict=False)), **kwargs}
    window, sides = _window_in(given["input"]), [*given["pad"]]
    if window is None:
        return None
    at = 2 * (window.x.ndim - 1 - window.dim)
    before, behind = sides[at : at + 2] or (0, 0)
    if not (before or behind):
        return None
    rest = [*sides[:at], *sides[at + 2 :]]
    if any(rest) or given.get("mode", "constant") != "constant" or given.get("value"):
        raise Unsplittable("pads positions with other values than zeros, or more than positions")
    window = window.padded(max(before, 0), max(behind, 0))
    return window.narrowed(max(-before, 0), window.length - max(-behind, 0))


def item(args: Any, kwargs: Any) -> Window | None:
    """Positions from one to another, by an index."""
    x, index = args
    window, index = _window_in(x), index if isinstance(index, tuple) else (index,)
    if window is None or any(each is None or isinstance(each, (Tensor, list)) for each in index):
        return None
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (x.ndim - len(index) + 1), *index[at + 1 :])
    if len(index) <= window.dim or not isinstance(index[window.dim], slice):
        return None
    taken = index[window.dim].indices(x.shape[window.dim])
    if taken == (0, x.shape[window.dim], 1):
        return None
    others = [each for dim, each in enumerate(index) if dim != window.dim]
    first, stop, step = taken
    if step != 1 or stop <= first or any(each != slice(None) for each in others):
        raise Unsplittable("takes some positions")
    return window.narrowed(first, stop)


def narrow(args: Any, kwargs: Any) -> Window | None:
    """Positions from one to another."""
    if kwargs or len(args) != 4 or any(isinstance(each, Tensor) for each in args[1:]):
        return None
    x, dim, first, count = args
    window = _window_in(x)
    if window is None or dim % x.ndim != window.dim or count == x.shape[dim]:
        return None
    return window.narrowed(first % x.shape[dim], first % x.shape[dim] + count)


def behind_each_other(args: Any, kwargs: Any) -> Window | None:
    """Something in front of positions of which the last ones are left out."""
    if not args or not isinstance(args[0], (list, tuple)) or len(args[0]) != 2:
        return None
    first, x = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    window = _window_in(x)
    if window is None or dim % x.ndim != window.dim or shard_of(first) is not None or first.shape == (0,):
        return None
    if window.start or window.head is not None or window.convolution or first.ndim != x.ndim:
        raise Unsplittable("takes whole sequences")
    if isinstance(first, DTensor):
        first = first.to_local()  # replicated
    head = first.to(x.dtype)
    return dataclasses.replace(window, start=-first.shape[window.dim], head=head)


def _window_in(x: Any) -> Window | None:
    return Window.of(x) if isinstance(x, DTensor) and shard_of(x) is not None else None


def convolution(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """A convolution along positions."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    window = _window_in(x)
    if window is None or window.dim != x.ndim - 1 or isinstance(weight, DTensor):
        raise Unsplittable("goes along another dim than positions")
    stride, dilation = (_one(given.get(name, 1)) for name in ("stride", "dilation"))
    if stride != 1 or window.convolution:
        raise Unsplittable("takes some positions")
    layer = Convolution(weight, bias, dilation, given.get("groups", 1))
    sides = given.get("padding", 0)
    if sides == "same":
        window = window.padded(layer.lost // 2, layer.lost - layer.lost // 2)
    elif sides != "valid":
        window = window.padded(_one(sides), _one(sides))
    return dataclasses.replace(window, convolution=layer).computed(shard_group)


def _one(value: Any) -> int:
    return int(value[0]) if isinstance(value, (list, tuple)) else int(value)


def shifted(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that give some positions, or more than there are."""
    window = SHIFTS[func](args, kwargs)
    return NotImplemented if window is None else window.computed(shard_group)


CONVOLUTIONS: dict[Any, Rule] = dict.fromkeys(named((torch, F), ("conv1d",)), convolution)
SHIFTS: dict[Any, Callable[[Any, Any], Window | None]] = {
    **dict.fromkeys(named((torch, F), ("pad", "constant_pad_nd")), pad),
    **dict.fromkeys(named((torch, Tensor), ("narrow",)), narrow),
    **dict.fromkeys(named((torch,), ("cat", "concat", "concatenate")), behind_each_other),
    Tensor.__getitem__: item,
}
"""The positions that a function gives, of a sequence; None if it does something else."""
