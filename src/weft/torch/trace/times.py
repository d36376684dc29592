"""Times of a trace: estimated where a model has no memory, and one for each thing that was measured several times.

On the meta device a clock counts instead of running. An operation takes

    flops / FLOPS + bytes read and written / BYTES    seconds

by PyTorch's own formulas for flops (``torch.utils.flop_counter``). Only ratios between units matter, so the rates are
those of one CPU core, unless the device is known.

Where a step was measured, each thing of a kind gets the smallest time that was measured of any of them. Else blocks
that are alike would look different where the machine changed its speed between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.torch.pytorch.private import ATTENTION, TorchDispatchMode
from weft.torch.trace.record import Record

FLOPS = 5e10
BYTES = 1e10


class Rates(Protocol):
    """A device, by how long operations take there."""

    def seconds(self, flops: float, moved_bytes: float, dtype: torch.dtype | None) -> float:
        """The seconds of an operation that computes so much, and reads and writes so much."""


class CoreRates:
    """A core of a CPU."""

    def seconds(self, flops: float, moved_bytes: float, dtype: torch.dtype | None) -> float:
        return flops / FLOPS + moved_bytes / BYTES


CORE = CoreRates()


class Clock(TorchDispatchMode):
    """Counts in ``seconds`` what the operations inside would have taken."""

    def __init__(self, rates: Rates = CORE) -> None:
        super().__init__()
        self._rates = rates
        from torch.utils.flop_counter import flop_registry  # it loads Triton

        self.seconds = 0.0
        alike = {mine: flop_registry[known] for mine, known in ATTENTION.items() if known in flop_registry}
        self._formulas = {**flop_registry, **alike}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        formula = self._formulas.get(func.overloadpacket)
        flops = 0.0 if formula is None else formula(*args, **(kwargs or {}), out_val=result)
        outputs = result if isinstance(result, (list, tuple)) else (result,)
        tensors = [each for each in (*args, *outputs) if isinstance(each, Tensor)]
        dtype = (
            tensors[0].dtype if tensors else None
        )  # results of attention end with sums in single precision
        self.seconds += self._rates.seconds(flops, sum(each.nbytes for each in tensors), dtype)
        return result


Pass = Mapping[Any, tuple[float, ...]]
"""The times of each thing in one pass over all of them."""

Kinds = Mapping[Any, Any]
"""The kind of each thing that has others like it."""
NO_KINDS: Kinds = {}

AGREED = 1.08
"""A pass agrees with the smallest times if it takes at most this times what the smallest times add up to."""


def typical_times(passes: Sequence[Pass], kinds: Kinds = NO_KINDS) -> dict[Any, tuple[float, ...]]:
    """The smallest of each key's times, scaled to what the passes that agree take on average.

    Where no pass agrees, the times are scaled to what the shortest pass takes.

    >>> typical_times([{"a": (1.0, 2.0), "b": (3.0, 3.0)}, {"a": (2.0, 1.0), "b": (2.0, 5.0)}])
    {'a': (1.2857142857142858, 1.2857142857142858), 'b': (2.5714285714285716, 3.8571428571428577)}
    >>> typical_times([{"a": (1.0,), "b": (3.0,), "c": (2.0,)}], {"a": "block", "b": "block"})
    {'a': (1.5,), 'b': (1.5,), 'c': (3.0,)}
    >>> typical_times([{"a": (20.0,)}, {"a": (21.0,)}, {"a": (35.0,)}])
    {'a': (20.5,)}
    """
    least = _least(passes, kinds)
    smallest = _sum(least)
    sums = [_sum(one) for one in passes]
    alike = [one for one in sums if one <= AGREED * smallest] or [min(sums)]
    scale = mean(alike) / smallest if smallest else 1.0
    return {key: tuple(scale * time_s for time_s in times) for key, times in least.items()}


def agree(passes: Sequence[Pass], kinds: Kinds = NO_KINDS) -> bool:
    """True if two passes agree with the smallest times: both ran at one speed of the machine from end to end.

    One pass is not enough. Where the speed changed in the middle of a pass, half of the smallest times may be that
    pass's own.

    >>> fast, slow, changed = {"a": (1.0,), "b": (1.0,)}, {"a": (1.5,), "b": (1.5,)}, {"a": (1.0,), "b": (1.5,)}
    >>> agree([slow, slow]), agree([changed, slow]), agree([changed, slow, slow, fast, fast])
    (True, False, True)
    """
    limit = AGREED * _sum(_least(passes, kinds))
    return sum(_sum(one) <= limit for one in passes) >= 2


def kinds_of(records: Iterable[Record]) -> Kinds:
    """The kind of each record by its id, after the pass that watches: class, sizes, what the module did.

    Modules that were not called are of no kind: one may hold a weight that another module applies.
    """
    return {id(record): _kind(record) for record in records if record.calls}


def _kind(record: Record) -> Any:
    own = tuple((name, p.shape, p.dtype) for name, p in record.module.named_parameters(recurse=False))
    inside = sum(1 for _ in record.module.children())
    did = (record.calls, record.saved_bytes, record.output_bytes, record.operations)
    return type(record.module), own, inside, did


def _least(passes: Sequence[Pass], kinds: Kinds) -> dict[Any, tuple[float, ...]]:
    measured: dict[Any, list[tuple[float, ...]]] = {}
    for one in passes:
        for key, times in one.items():
            measured.setdefault(kinds.get(key, key), []).append(times)
    least = {kind: tuple(map(min, zip(*times, strict=True))) for kind, times in measured.items()}
    return {key: least[kinds.get(key, key)] for key in passes[0]}


def _sum(one: Pass) -> float:
    return sum(map(sum, one.values()))
