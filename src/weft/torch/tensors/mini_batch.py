"""Cutting a mini-batch into microbatches, and the weight of each.

Every tensor among the step's arguments is cut along dim 0 (or along the dim that ``input_split_axes`` gives for its
argument), inside lists, tuples, dicts and dataclasses too. Modules, optimizers and anything else without tensors go
whole to each microbatch, as do the arguments named in ``non_split_inputs``. Rows that the loss joins stay together, see
`weft.session.cut.Joined`.

With ``tokens`` rows are grouped by their lengths instead, see `weft.session.lengths`.

A microbatch counts by its samples, or by what ``weight`` of the step counts:

    gradient of a step = sum over microbatches i of  n_i / (n_1 + ... + n_m) * gradient of loss_i

Let the loss be a mean over the tokens of a microbatch. If n_i counts these tokens, the sum is the gradient of the mean
over all tokens of the batch. A script whose loss leaves out padding, but which counts samples, is warned in its first
step if the microbatches differ in padding.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from weft.errors import SplitError, UsageError, warn
from weft.session.cut import Cut, Group, Joined, argument_names, find_different, find_unknown
from weft.torch.tensors.pytree import CONTAINERS, map_nodes, nodes_with_paths

Piece = Sequence[tuple[int, int]] | Group
"""First and one past the last row of neighbours, for each block of a mini-batch; or a group of rows."""
_CUT = (*CONTAINERS, set, frozenset, UserDict)
"""Containers of which each microbatch gets one of its own."""


@dataclass(frozen=True)
class MiniBatch:
    """The arguments of a step, ready to be cut.

    ``names``: those of the positional arguments; ``size``: how many samples, ``None`` if nothing is cut; ``fault``: why
    this mini-batch may not be trained on, empty if it may; ``shares``: the weights of the microbatches, ``None`` if
    their samples are what counts; ``notice``: why it is one microbatch, if nobody has asked for that. ``groups``: the
    microbatches, if they are alike in tokens instead of rows; ``trimmed``: by path of a tensor, which of its dims are
    cut to the positions of a group.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: list[str]
    cut: Cut
    microbatches: int
    size: int | None
    fault: str = ""
    shares: tuple[float, ...] | None = None
    notice: str = ""
    groups: tuple[Group, ...] = ()
    trimmed: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def ranges(self, microbatch: int) -> Piece:
        """First and one past the last sample of a microbatch, in each block of the mini-batch; or its group."""
        if self.groups:
            return self.groups[microbatch]
        return self.cut.joined.ranges(self.size or 0, self.microbatches, microbatch)

    def samples(self, microbatch: int) -> int:
        """The number of samples of a microbatch."""
        return len(rows_of(self.ranges(microbatch)))

    @property
    def costliest(self) -> int:
        """The microbatch with the most tokens; the first one, if they are alike in rows."""
        return max(range(len(self.groups)), key=lambda index: self.groups[index].cost, default=0)

    def weight(self, microbatch: int) -> float:
        """The weight of a microbatch in the mini-batch: its share of the samples, or the share that the step gives."""
        if self.shares is not None:
            return self.shares[microbatch]
        if not self.size:
            return 1.0 / self.microbatches
        return self.samples(microbatch) / self.size

    def weights(self) -> list[float]:
        """The weights of all microbatches."""
        return [self.weight(index) for index in range(self.microbatches)]

    def slice(self, microbatch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for one microbatch; tensors are views."""
        return self.take(self.ranges(microbatch), microbatch)

    def take(self, ranges: Piece, microbatch: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for these samples, which are the microbatch of that index or no microbatch at all."""
        args = tuple(
            self._one(name, arg, ranges, microbatch) for name, arg in zip(self.names, self.args, strict=True)
        )
        return args, {name: self._one(name, arg, ranges, microbatch) for name, arg in self.kwargs.items()}

    def _one(self, name: str, argument: Any, ranges: Piece, microbatch: int | None) -> Any:
        if name in self.cut.whole or is_whole(argument):
            return argument
        axis = self.cut.axes.get(name, 0)
        if isinstance(ranges, Group):
            dims = {id(tensor): self.trimmed.get(path, ()) for path, tensor in named_tensors(argument, name)}
            return _cut(argument, lambda t: group_of(t, dims[id(t)], ranges), self.microbatches, None, axis)
        if type(argument) is Tensor and not _cuts_itself(argument):
            return part(argument, axis, ranges)
        return _cut(argument, lambda t: part(t, axis, ranges), self.microbatches, microbatch, axis)


def rows_of(piece: Piece) -> list[int]:
    """The rows of a piece of a mini-batch."""
    if isinstance(piece, Group):
        return list(piece.rows)
    return [row for start, stop in piece for row in range(start, stop)]


def group_of(tensor: Tensor, dims: Sequence[int], group: Group) -> Tensor:
    """A group's part of a tensor: a copy of its rows, with its positions along ``dims``."""
    plain = tensor if tensor.requires_grad else tensor.data
    for dim in dims:
        plain = plain.narrow(dim, group.start, group.stop - group.start)
    return plain.index_select(0, torch.tensor(group.rows, device=tensor.device))


def padded(parts: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """Results of pieces of a mini-batch, with zeros where padding was cut off, if all have their piece's positions."""
    groups = [piece for piece in pieces if isinstance(piece, Group)]
    if len(groups) < len(parts) or any(
        part.dim() < 2 or part.shape[1] != group.stop - group.start
        for part, group in zip(parts, groups, strict=True)
    ):
        return [*parts]
    return [
        F.pad(part, (0, 0) * (part.dim() - 2) + (group.start, group.length - group.stop))
        for part, group in zip(parts, groups, strict=True)
    ]


def part(tensor: Tensor, axis: int, ranges: Piece) -> Tensor:
    """A microbatch's part of a tensor: a view with a count of writes of its own, or a copy of several ranges.

    Microbatches are in flight together. A write of one into its part must not make autograd refuse the parts of others.
    """
    if isinstance(ranges, Group):
        return group_of(tensor, (), ranges)
    plain = tensor if tensor.requires_grad else tensor.data
    pieces = [plain.narrow(axis, start, stop - start) for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)


def is_whole(argument: Any) -> bool:
    """True if an argument has nothing to cut, by its type alone."""
    return argument is None or isinstance(argument, (nn.Module, Optimizer, str, int, float, nn.Parameter))


def _cuts_itself(item: Any) -> bool:
    return hasattr(item, "smp_slice")


def _cut(tree: Any, narrow: Callable[[Tensor], Tensor], count: int, microbatch: int | None, axis: int) -> Any:
    """``tree`` with its tensors narrowed; the same object where nothing was cut."""

    def cut(item: Any) -> Any:
        if _cuts_itself(item):
            if microbatch is None:
                raise UsageError(f"{type(item).__qualname__} cuts itself, and into microbatches only")
            return item.smp_slice(count, microbatch, axis)
        return narrow(item) if isinstance(item, Tensor) and not isinstance(item, nn.Parameter) else item

    return map_nodes(tree, cut, _CUT)


def prepare(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], cut: Cut, microbatches: int
) -> MiniBatch:
    """Check the arguments of a step and make them ready to be cut.

    A size that ``microbatches`` does not divide is cut as evenly as possible; fewer samples than microbatches are cut
    one by one.

    Raises:
        SplitError: Tensors differ in size along the dim that they are cut, or have no samples; all of them are named.
    """
    names = argument_names(function, args)
    tensors: list[tuple[str, Tensor]] = []
    sizes: list[tuple[str, int, tuple[int, ...]]] = []
    faults: list[str] = []
    for name, argument in [*zip(names, args, strict=True), *kwargs.items()]:
        if name in cut.whole or is_whole(argument):
            continue
        axis = cut.axes.get(name, 0)
        for path, tensor in named_tensors(argument, name):
            if not -tensor.dim() <= axis < tensor.dim():
                faults.append(
                    f"{path} has the shape {list(tensor.shape)} and so no dim {axis} to cut: if every microbatch "
                    f'needs it whole, write @weft.step(non_split_inputs=["{name}"])'
                )
            else:
                tensors.append((path, tensor))
                sizes.append((path, tensor.shape[axis], tuple(tensor.shape)))
    faults += find_unknown(function, cut)
    size = sizes[0][1] if sizes else None
    different, notice = find_different(sizes), ""
    if different and cut.adapts:
        shown = ", ".join(f"{path} {list(shape)}" for path, _, shape in sizes)
        notice = (
            f"tensors of a batch have different numbers of rows ({shown}), so the batch is one microbatch"
        )
        cut = replace(cut, joined=Joined(rows=0), whole=[*names, *kwargs])
    else:
        faults += different
    if not faults and size == 0:
        faults.append(f"{sizes[0][0]} has no samples: leave the step out for an empty batch")
    if faults:
        raise SplitError("\n".join(faults))
    even = size is None or cut.uneven or cut.joined != Joined() or cut.tokens is not None
    fault = "" if even else _find_remainder(sizes[0][0], size or 0, microbatches)
    count = microbatches if size is None else min(cut.joined.units(size), microbatches)
    batch = MiniBatch(args, kwargs, names, cut, count, size, fault, notice=notice)
    if cut.tokens is None or size is None:
        return batch
    from weft.torch.tensors.tokens import group_rows, trimmed_dims  # here: few steps are cut so

    groups = group_rows(cut.tokens, tensors, args, kwargs, count)
    return replace(batch, groups=groups, trimmed=trimmed_dims(cut.tokens, tensors, groups[0].length))


def refuse_elsewhere(batch: MiniBatch, device: torch.device) -> None:
    """Refuse tensors among the arguments that cannot be computed with on ``device``.

    Raises:
        UsageError: Some have no data, or lie on a device of another kind; all of them are named.
    """
    fits = {"cpu", device.type}
    found = [(path, t.device) for path, t in _tensors_of(batch) if t.device.type not in fits]
    if found:
        path, elsewhere = found[0]
        listed = f"{', '.join(each for each, _ in found)} {'is' if len(found) == 1 else 'are'}"
        if elsewhere.type == "meta":
            raise UsageError(
                f"{listed} on the device meta, where tensors have no data, and this rank computes on {device}: give "
                f'the step a tensor with data, made by torch.zeros(..., device="{device.type}"), say'
            )
        raise UsageError(
            f"{listed} on {elsewhere}, and this rank computes on {device}: write "
            f'{path} = {path}.to("{device.type}") before the step'
        )


def told_of_devices(error: RuntimeError, batch: MiniBatch, device: torch.device) -> str:
    """Advice where PyTorch found tensors of the step on two devices; empty where that is not so."""
    paths = [path for path, t in _tensors_of(batch) if t.device.type != device.type]
    if "same device" not in str(error) or not paths:
        return ""
    which = f"{', '.join(paths)} {'is' if len(paths) == 1 else 'are'}"
    return (
        f"{which} on the cpu, and this rank computes on {device}, where weft brings the arguments of the model only: "
        f'write {paths[-1]} = {paths[-1]}.to("{device.type}") before the step'
    )


def _tensors_of(batch: MiniBatch) -> list[tuple[str, Tensor]]:
    """All tensors among the arguments, each with its path."""
    named = [*zip(batch.names, batch.args, strict=True), *batch.kwargs.items()]
    return [
        found for name, argument in named if not is_whole(argument) for found in named_tensors(argument, name)
    ]


def _find_remainder(path: str, size: int, microbatches: int) -> str:
    """The fault of samples that cannot be divided evenly; empty if they can."""
    if size % microbatches == 0:
        return ""
    return (
        f"{path} has {size} samples, which {microbatches} microbatches do not divide: choose a batch size that is a "
        f"multiple of {microbatches}; for the last batch of a data loader give it drop_last=True, or cut it as evenly "
        "as possible with @weft.step(allow_uneven=True)"
    )


def named_tensors(tree: Any, path: str) -> list[tuple[str, Tensor]]:
    """The tensors in an argument that are cut, each with its path."""
    nodes = nodes_with_paths(tree, path, _CUT, _cuts_itself)
    found = [(where, node) for where, node in nodes if isinstance(node, Tensor) and not _cuts_itself(node)]
    return [(where, tensor) for where, tensor in found if not isinstance(tensor, nn.Parameter)]


LOSSES = {F.cross_entropy, F.nll_loss}


def shares_of(weight: Callable[..., Any], batch: MiniBatch) -> tuple[float, ...]:
    """The share of each microbatch in the step, by the numbers that ``weight`` gives for their arguments."""
    counts = []
    with torch.no_grad():
        for index in range(batch.microbatches):
            args, kwargs = batch.slice(index)
            counts.append(float(weight(*args, **kwargs)))
    if not all(math.isfinite(count) and count >= 0 for count in counts):
        raise UsageError(
            f"the weight of this step gives {counts} for its microbatches: it must count something, the tokens of the "
            "loss say, so give numbers of at least 0"
        )
    total = sum(counts)
    return tuple(count / total if total else 1 / len(counts) for count in counts)


class Padding(TorchFunctionMode):
    """Notes, while the step is traced, which targets the mean losses leave out: their ``ignore_index``."""

    def __init__(self) -> None:
        super().__init__()
        self.done = False
        self.ignored: set[int] = set()

    def __exit__(self, *details: Any) -> None:
        self.done = True
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOSSES:
            self._look(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _look(
        self, input: Any, target: torch.Tensor, weight: Any = None, size_average: Any = None,
        ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> None:  # fmt: skip
        if reduction == "mean" and not target.is_floating_point():
            self.ignored.add(ignore_index)

    def warn(self, batch: MiniBatch) -> None:
        """Warn, once, if microbatches weigh alike though mean losses look at different numbers of their targets."""
        for name, argument in [*zip(batch.names, batch.args, strict=True), *batch.kwargs.items()]:
            for path, tensor in named_tensors(argument, name) if name not in batch.cut.whole else ():
                for ignored in () if tensor.is_floating_point() or tensor.is_complex() else self.ignored:
                    padded = tensor == ignored
                    axis = batch.cut.axes.get(name, 0)
                    numbers = range(batch.microbatches)
                    counts = [int((~part(padded, axis, batch.ranges(number))).sum()) for number in numbers]
                    samples = map(batch.samples, numbers)
                    if padded.any() and len({n / s for n, s in zip(counts, samples, strict=True)}) > 1:
                        shown = ", ".join(map(str, counts[:8])) + (", ..." if counts[8:] else "")
                        warn(
                            f"the loss is a mean over targets without {ignored}, and the microbatches have {shown} of "
                            f"them in {path}, but weigh by their samples: for the mean over all tokens of the batch "
                            f"let them be counted: @weft.step(weight=...), a function of the step's arguments that "
                            f"gives ({name} != {ignored}).sum()",
                        )
                        return
