"""The cut of a step's arguments into microbatches, as its decorator says, and the faults that it can have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Joined:
    """Rows of a mini-batch that a loss joins, and that are therefore in one microbatch.

    Each ``rows`` neighbours; 0 stands for all rows. ``blocks``: the mini-batch is made of so many blocks of one size,
    the first rows of which belong together, and the second rows, and so on.

    >>> Joined(blocks=2).units(8), Joined(rows=2).units(8), Joined(rows=0).units(8), Joined(rows=4).units(6)
    (4, 4, 1, 1)
    """

    rows: int = 1
    blocks: int = 1

    def units(self, size: int) -> int:
        """Into how many pieces a mini-batch of ``size`` rows can be cut at most."""
        rows_at_once = self.rows * self.blocks
        return size // rows_at_once if rows_at_once and size % rows_at_once == 0 else 1

    def ranges(self, size: int, count: int, index: int) -> list[tuple[int, int]]:
        """First and one past the last row of microbatch ``index`` of ``count`` in each block.

        >>> Joined(blocks=2).ranges(8, 2, 1), Joined(rows=2).ranges(8, 3, 1), Joined(rows=0).ranges(8, 1, 0)
        ([(2, 4), (6, 8)], [(2, 4)], [(0, 8)])
        """
        units = self.units(size)
        if units == 1:
            return [(0, size)]
        start, stop = (self.rows * (at * units // count) for at in (index, index + 1))
        length = size // self.blocks
        return [(block * length + start, block * length + stop) for block in range(self.blocks)]


@dataclass(frozen=True)
class Tokens:
    """Where the tokens of a step's rows are.

    Args:
        mask: The argument, or the entry of a dict among the arguments, that is not 0 where a row has a token; or a
            function of the step's arguments that gives such a tensor.
        trimmed: The dims of each tensor among the arguments, by its path, that are positions of tokens; ``None`` until
            the cut was compared with the whole batch.
        sides: If padding in front of the tokens is cut off, and if that behind them: as in the comparison, since a
            model that takes positions from the start of a row bears the one and not the other.
    """

    mask: str | Callable[..., Any]
    trimmed: Mapping[str, Sequence[int]] | None = None
    sides: tuple[bool, bool] = (True, True)


@dataclass(frozen=True)
class Group:
    """The rows of a microbatch, and the positions in them that it has: those from ``start`` to ``stop`` of ``length``.

    >>> Group((3, 0), 0, 5, 8).cost
    10
    """

    rows: tuple[int, ...]
    start: int
    stop: int
    length: int

    @property
    def cost(self) -> int:
        """The number of positions to compute."""
        return len(self.rows) * (self.stop - self.start)


@dataclass(frozen=True)
class Cut:
    """The cut of the arguments of one step function.

    ``whole``: arguments that are not cut; ``axes``: the dim of an argument that is not cut along dim 0; ``uneven``:
    sizes of microbatches may differ by one. ``joined``: the rows that no cut may part. ``adapts``: a mini-batch of
    tensors with different numbers of rows is one microbatch, and no error. ``tokens``: microbatches are alike in tokens
    instead of rows.
    """

    whole: Collection[str] = ()
    axes: Mapping[str, int] = field(default_factory=dict)
    uneven: bool = False
    joined: Joined = Joined()
    adapts: bool = False
    tokens: Tokens | None = None


def argument_names(function: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """The name of each positional argument, as the decorated signature has it."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [parameter.name] * (len(args) - len(names))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[: len(args)] + ["?"] * (len(args) - len(names))


def find_unknown(function: Callable[..., Any], cut: Cut) -> list[str]:
    """The fault of names that are no arguments of the step; none if there are no such names."""
    parameters = inspect.signature(function).parameters
    unknown = [name for name in [*cut.whole, *cut.axes] if name not in parameters]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        name = getattr(function, "__name__", "the step")
        return [f"{name} has no argument {', '.join(unknown)}, which weft.step names"]
    return []


def find_different(sizes: Sequence[tuple[str, int | None, Sequence[int | None]]]) -> list[str]:
    """The fault of tensors with different numbers of samples. ``sizes``: path, samples and shape of each."""
    if len({size for _, size, _ in sizes if size is not None}) <= 1:
        return []
    listed = ", ".join(f"{path} {list(shape)}" for path, _, shape in sizes)
    path = sizes[-1][0].partition("[")[0].partition(".")[0]
    return [
        f"the tensors given to the step do not have the same batch size: {listed}. One that has no batch dim goes "
        f'whole to every microbatch with @weft.step(non_split_inputs=["{path}"]); one that has it elsewhere is cut '
        f'along another dim with @weft.step(input_split_axes={{"{path}": 1}})'
    ]
