"""The findings of comparing a split step with one process: how far apart the two are, and where they part first.

Two tensors differ if their distance is more than a certain part of their size. That part depends on the precision that
the step computes in. Tensors far smaller than others of their kind are measured by those: what is zero in exact
arithmetic is noise.

    float64 1e-9    float32 1e-4    float16 1e-2    bfloat16 5e-2    ten times as much for gradients: they are sums
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from weft.torch.verify.fingerprint import Fingerprint, distance
from weft.torch.verify.reference import Reference

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
LOOSEST = 0.2
SMALL = 1e-3
"""The difference of a tensor counts as a part of the tensor's norm, or of this part of the largest norm of its kind."""
LEAST = 1e-6
"""The least norm that a difference is taken as a part of, whatever the kind."""

CAUSES = (
    "Usual causes: state that weft cannot see (a closure, a global, an object of another library, a file, a random "
    "generator of one's own) which microbatches share while they are in flight together, or which only one rank has. "
    "Hand such values from module to module as arguments and results, keep them in attributes or buffers of modules, "
    "or put the modules that share them on one partition: {advice}. See docs/assumptions.md; "
    '"verify": "off" trains without this comparison'
)


@dataclass
class Findings:
    """The findings of a comparison.

    ``fault``: what differs, where, why, and what to do; empty if nothing differs. ``proved``: what is equal.
    ``losses`` and ``gradients``: the largest relative differences; ``gradients`` is None where these were not compared.
    ``unsteady``: the numbers of returned tensors that differ even when one process runs the same microbatch twice.
    ``compared``: the step has tensors or gradients to compare.
    """

    fault: str = ""
    proved: str = ""
    losses: float = 0.0
    gradients: float | None = None
    unsteady: set[int] = field(default_factory=set)
    compared: bool = True

    @property
    def verdict(self) -> str:
        """The outcome in a few words, after "step 1"."""
        if self.fault:
            return "differs from one process"
        if not self.compared:
            return "has nothing to compare with one process"
        return "equals one process" + (" but for tensors that differ there, too" if self.unsteady else "")


@dataclass
class _Comparison:
    one: Reference
    split: Reference
    limit: float
    places: dict[str, int]
    found: Findings = field(default_factory=Findings)


def compare(one: Reference, split: Reference, precision: torch.dtype, places: dict[str, int]) -> Findings:
    """The findings for ``one`` process against the ``split`` step. ``places``: the partition of each unit."""
    work = _Comparison(one, split, LIMITS.get(precision, LOOSEST), places)
    fault = _losses(work) or _buffers(work) or _gradients(work)
    work.found.fault = fault
    tensors = sum(map(len, one.returned)) + sum(map(len, one.given))
    parts = [f"the losses of one process ({len(one.returned)} microbatches, {tensors} tensors"]
    parts[0] += f", largest difference {work.found.losses:.1e})"
    if work.found.gradients is not None:
        parts.append(f"its gradients ({len(one.gradients)} parameters, {work.found.gradients:.1e})")
    if one.buffers:
        parts.append(f"its {len(one.buffers)} buffers")
    work.found.proved = " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
    if one.buffers is None:
        work.found.proved += " (not its buffers, because activation checkpoints may write them again)"
    work.found.compared = bool(tensors) or len(parts) > 1
    if not work.found.compared:
        work.found.proved = "nothing to compare: it returns no tensor and has no backward pass"
    return work.found


def relative(one: Fingerprint | None, other: Fingerprint | None, least: float) -> float:
    """The difference of two tensors as a part of their norm, or of ``least`` if that is larger.

    None stands for zeros. Whole numbers are equal, or infinitely different.
    """
    if one is None or other is None:
        there = one or other
        difference = size = 0.0 if there is None else there.norm
    else:
        difference, size = distance(one, other), max(one.norm, other.norm)
        if one.exact:
            return math.inf if difference else 0.0
    return difference / max(size, least) if difference else 0.0


def _losses(work: _Comparison) -> str:
    """The first difference in what the microbatches returned, went backward from, or computed on the way."""
    fault = ""
    for index in range(len(work.one.returned)):
        for what, of_one, of_split in (
            ("returns", work.one.returned, work.split.returned),
            ("goes backward from", work.one.given, work.split.given),
        ):
            if len(of_one[index]) != len(of_split[index]):
                return fault or (
                    f"microbatch {index} {what} {len(of_split[index])} tensors, but in one process "
                    f"{len(of_one[index])}. {_where(work, index)}"
                )
            for number, (a, b) in enumerate(zip(of_one[index], of_split[index], strict=True)):
                if _rounding_decides(work, a):
                    continue
                least = SMALL * _largest(prints[number] for prints in of_one if len(prints) > number)
                difference = relative(a, b, max(least, LEAST))
                if difference > work.limit and what == "returns" and _unsteady(work, number):
                    work.found.unsteady.add(number)
                    continue
                work.found.losses = max(work.found.losses, difference)
                if difference > work.limit and not fault:
                    fault = (
                        f"microbatch {index} {what} another tensor than in one process (number {number}, "
                        f"{_show(b)} instead of {_show(a)}, difference {difference:.1e}). {_where(work, index)}"
                    )
        if not fault and _find_parting(work, index, work.limit):
            fault = f"microbatch {index} computes something else than in one process. {_where(work, index)}"
    return fault


def _rounding_decides(work: _Comparison, one: Fingerprint | None) -> bool:
    """True if rounding may decide these whole numbers: which of some values is the largest, say."""
    return one is not None and one.exact and work.limit > LIMITS[torch.float32]


def _unsteady(work: _Comparison, number: int) -> bool:
    """True if one process, too, returns another tensor (a time, say) when it runs the first microbatch twice."""
    first, again = work.one.returned[0], work.one.again
    return len(again) == len(first) and relative(first[number], again[number], LEAST) > LEAST


def _find_parting(work: _Comparison, index: int, limit: float) -> tuple[tuple[str, int], bool, str] | None:
    """The first call of a unit that differs, whether its inputs differ already, and the unit before it."""

    def differ(some: Sequence[Fingerprint], others: Sequence[Fingerprint]) -> bool:
        return any(
            relative(a, b, LEAST) > limit
            for a, b in zip(some, others, strict=True)
            if not _rounding_decides(work, a)
        )

    before = ""
    for key, (given, returned) in work.one.units[index].items():
        seen = work.split.units[index].get(key)
        if seen is not None and len(given) == len(seen[0]) and differ(given, seen[0]):
            return key, True, before  # of what others have left in a container a rank has a part only
        if seen is not None and (len(returned) != len(seen[1]) or differ(returned, seen[1])):
            return key, False, before
        before = key[0] if seen is not None else before
    return None


def _where(work: _Comparison, index: int) -> str:
    """A sentence on where the microbatch parts from one process, by units in the order of their calls."""
    found = _find_parting(work, index, work.limit / 10)
    if found is None:
        text = "All modules give the same, so look at the code after them. " if work.one.units[index] else ""
        return text + CAUSES.format(advice="weft.set_partition(module, index)")
    (unit, call), already, before = found
    name = (
        f"{unit or 'the model'} (partition {work.places.get(unit, 0)}{f', call {call}' if call > 1 else ''})"
    )
    if already:
        text = (
            f"The first module that differs is {name}: what it is given differs already, so look at the code "
        )
        text += f"between {before or 'the start'} and it. "
    else:
        text = f"The first module whose output differs is {name}, which is given the same. "
    return text + CAUSES.format(advice=f"weft.set_partition({unit or 'model'}, index)")


def _buffers(work: _Comparison) -> str:
    for name, value in (work.one.buffers or {}).items():
        seen = (work.split.buffers or {}).get(name)
        if seen is None or value is None:
            continue
        difference = relative(value, seen, LEAST)
        if difference > work.limit:
            return (
                f"the buffer {name} is another one than in one process after all microbatches ({_show(seen)} "
                f"instead of {_show(value)}, difference {difference:.1e}), though the losses are equal. "
                + CAUSES.format(advice=f"weft.set_partition({_module(name)}, index)")
            )
    return ""


def _gradients(work: _Comparison) -> str:
    if not (work.one.whole and work.split.whole):
        return ""
    limit = min(10 * work.limit, LOOSEST)
    least = SMALL * _largest(work.one.gradients.values())
    worst, fault = 0.0, ""
    order = {key[0]: number for number, key in enumerate(work.one.units[0])}
    apart_by = {
        name: relative(grad, work.split.gradients.get(name), max(least, LEAST * least))
        for name, grad in work.one.gradients.items()
    }
    wrong = [name for name, difference in apart_by.items() if difference > limit]
    worst = max(apart_by.values(), default=0.0)
    if wrong:
        last = max(wrong, key=lambda name: _place(name, order))
        fault = (
            f"the gradient of {last} (over all microbatches) is another one than in one process "
            f"({_show(work.split.gradients.get(last))} instead of {_show(work.one.gradients[last])}, difference "
            f"{apart_by[last]:.1e}), though the losses are equal; so are those of {len(wrong) - 1} more parameters. On "
            f"the way back {_module(last)} is the first module that differs. "
            + CAUSES.format(advice=f"weft.set_partition({_module(last)}, index)")
        )
    for (leaf, before, grad), (_, _, seen) in zip(work.one.outside, work.split.outside, strict=True):
        if before is not None and grad is not None and seen is not None:
            grad, seen = grad.less(before), seen.less(before)
        difference = relative(grad, seen, LEAST)
        worst = max(worst, difference)
        if difference > limit and not fault:
            fault = (
                f"the gradient of a tensor of shape {list(leaf.shape)} that is none of the model's is another one than "
                f"in one process ({_show(seen)} instead of {_show(grad)}, difference {difference:.1e}). "
                + CAUSES.format(advice="weft.set_partition(module, index)")
            )
    work.found.gradients = worst
    return fault


def _place(name: str, order: dict[str, int]) -> int:
    """The place in the order of calls of the unit around a parameter; -1 if there is none."""
    around = [number for unit, number in order.items() if name.startswith(f"{unit}.")]
    return max(around, default=-1)


def _module(name: str) -> str:
    return name.rpartition(".")[0] or "the model"


def _largest(prints: Iterable[Fingerprint | None]) -> float:
    return max((one.norm for one in prints if one is not None), default=0.0)


def _show(one: Fingerprint | None) -> str:
    """A fingerprint for people: a number as it is, a tensor by its norm."""
    if one is None:
        return "none"
    if not one.shape:
        return f"{one.sums[0]:.6g}" if not one.wrong else "a number that is not finite"
    return f"one of norm {one.norm:.6g}"
