"""The findings of comparing a split step with one process: how far apart the two are, and where they part first.

Two tensors differ if their distance is more than a certain part of their size. That part follows from the least precise
type that the step computes in. Tensors far smaller than others of their kind are measured by those: what is zero in
exact arithmetic is noise.

    float64 1e-9    float32 1e-4    float16 1e-2    bfloat16 5e-2    ten times as much for gradients: they are sums
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LIMITS = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
LOOSEST = 0.2
SMALL, LEAST = 1e-3, 1e-6
"""The difference of a tensor counts as a part of its norm, or of this part of the largest one of its kind, or of the
least norm that counts."""
CAUSES = (
    "Usual causes: numbers of Python that are others on other ranks when the step is traced (weft.rank(), a random "
    "generator of one's own, the time, a file), and state that weft cannot see. Give every rank the same program; "
    '"verify": "off" trains without this comparison. See docs/assumptions.md'
)


def precision_of(operations: Iterable[Any]) -> str:
    """The least precise type that operations of a step compute in."""
    kinds = {tensor.dtype.name for each in operations for tensor in each.outputs} & set(LIMITS)
    return max(kinds, key=LIMITS.__getitem__, default="float32")


@dataclass
class Numbers:
    """The numbers of a step, of one process or of all ranks together.

    Attributes:
        passed: For each microbatch, what goes from partition to partition, in the order of the program.
        returned: For each microbatch, what the step returns, by its number.
        gradients: The gradients that it returns, over all microbatches, by their number.
        variables: What it has written into variables, by their number.
    """

    passed: list[list[Any]] = field(default_factory=list)
    returned: list[dict[int, Any]] = field(default_factory=list)
    gradients: dict[int, Any] = field(default_factory=dict)
    variables: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Names:
    """The names of values that are passed, gradients and variables, and the partition of the former."""

    passed: Sequence[str]
    partitions: Sequence[int]
    gradients: dict[int, str]
    variables: dict[int, str]


@dataclass
class Findings:
    """The outcome of a comparison.

    Attributes:
        fault: What differs, and where; empty if nothing does.
        losses: The largest relative difference of what is passed and returned.
        gradients: That of gradients; None where there are none.
    """

    fault: str = ""
    losses: float = 0.0
    gradients: float | None = None


def compare(one: Numbers, split: Numbers, names: Names, precision: str) -> Findings:
    """The findings for ``one`` process against the ``split`` step, which computes in ``precision``."""
    found, limit = Findings(), LIMITS.get(precision, LOOSEST)
    found.fault = (
        _microbatches(one, split, names, limit, found)
        or _gradients(one, split, names, min(10 * limit, LOOSEST), found)
        or _variables(one, split, names, limit)
    )
    return found


def relative(one: Any, other: Any, least: float, limit: float = 0.0) -> float:
    """The difference of two arrays as a part of their norm, or of ``least`` if that is larger.

    Of whole numbers one in a thousand may differ: rounding decides which of two is the larger one.

    >>> relative(np.array([3.0, 4.0]), np.array([3.0, 4.5]), 1e-6) < 0.1
    True
    """
    if one.shape != other.shape:
        return math.inf
    if one.dtype.kind in "biu":
        return math.inf if np.count_nonzero(one != other) > one.size / 1000 else 0.0
    one, other = (
        each.astype("complex128" if each.dtype.kind == "c" else "float64").ravel() for each in (one, other)
    )
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return math.inf
    one, other = one[finite], other[finite]
    difference = float(np.linalg.norm(one - other))
    size = max(float(np.linalg.norm(one)), float(np.linalg.norm(other)), least)
    return difference / size if difference else 0.0 if not math.isnan(difference) else math.inf


def _microbatches(one: Numbers, split: Numbers, names: Names, limit: float, found: Findings) -> str:
    largest = _largest(each for values in one.passed for each in values)
    of_kind = {
        number: _largest(each[number] for each in one.returned)
        for number in (one.returned[0] if one.returned else ())
    }
    for index, (returned, of_split) in enumerate(zip(one.returned, split.returned, strict=True)):
        where = ""
        for at, (a, b) in enumerate(zip(one.passed[index], split.passed[index], strict=True)):
            difference = relative(a, b, max(LEAST, 1e-6 * largest))
            found.losses = max(found.losses, difference)
            if difference > limit and not where:
                where = f"The first to differ is {names.passed[at]} (partition {names.partitions[at]})"
                shown = f"passes on {_show(b)}, where one process has {_show(a)}"
        for number, a in returned.items():
            difference = relative(a, of_split[number], max(LEAST, SMALL * of_kind[number]))
            found.losses = max(found.losses, difference)
            if difference > limit:
                where = (
                    where
                    or "What goes from partition to partition is the same, so look at what comes after it"
                )
                return (
                    f"microbatch {index} returns another tensor than in one process (number {number}, "
                    f"{_show(of_split[number])} instead of {_show(a)}, difference {difference:.1e}). {where}. {CAUSES}"
                )
        if where:
            return f"microbatch {index} {shown}. {where}. {CAUSES}"
    return ""


def _gradients(one: Numbers, split: Numbers, names: Names, limit: float, found: Findings) -> str:
    least = max(LEAST, SMALL) * _largest(one.gradients.values())
    apart = {
        number: relative(each, split.gradients[number], max(least, LEAST * LEAST))
        for number, each in one.gradients.items()
    }
    if apart:
        found.gradients = max(apart.values())
    wrong = [number for number, difference in apart.items() if difference > limit]
    if not wrong:
        return ""
    last = wrong[-1]
    return (
        f"the gradient of {names.gradients[last]} (over all microbatches) is another one than in one process "
        f"({_show(split.gradients[last])} instead of {_show(one.gradients[last])}, difference {apart[last]:.1e}), "
        f"though the losses are equal; so are those of {len(wrong) - 1} more variables. {CAUSES}"
    )


def _variables(one: Numbers, split: Numbers, names: Names, limit: float) -> str:
    for number, value in one.variables.items():
        seen = split.variables[number]
        difference = relative(value, seen, LEAST)
        if difference > min(10 * limit, LOOSEST):
            return (
                f"the variable {names.variables[number]} is another one than in one process after all microbatches "
                f"({_show(seen)} instead of {_show(value)}, difference {difference:.1e}), though the losses are equal. "
                + CAUSES
            )
    return ""


def _largest(arrays: Iterable[Any]) -> float:
    sizes = (_norm(each) for each in arrays)
    return max((size for size in sizes if math.isfinite(size)), default=0.0)


def _norm(array: Any) -> float:
    return float(np.linalg.norm(array.astype("float64").ravel())) if array.dtype.kind not in "biuc" else 0.0


def _show(array: Any) -> str:
    """An array for people: a number as it is, more of them by their norm."""
    return f"{array.item():.6g}" if array.size == 1 else f"one of norm {_norm(array):.6g}"
