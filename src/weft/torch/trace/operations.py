"""Tensors that would cross, for any choice of units: every operation of the traced pass, and whose results it used.

A tensor that a unit's code made is at home there. What glue makes is at home where its newest operand is, as in a
training run, and what depends on no unit is made everywhere. A tensor crosses once to each partition that uses it.

    y = x + block(x)       x is made by the unit before the block
                           a cut in front of the block: x crosses
                           a cut inside of the block: x crosses, and so does what is between the block's halves
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Operations:
    """The operations in program order: the module whose code ran it, whose results it used, and its result's bytes."""

    steps: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)

    def note(self, module: str, operands: Sequence[Tensor], result: Any) -> None:
        """Note that ``module``'s own code made ``result`` of ``operands``."""
        made_by = (tensor._weft_operation for tensor in operands)  # type: ignore[attr-defined]
        used = {number for whose, number in filter(None, made_by) if whose is self}
        made = [
            t for t in (result if isinstance(result, (list, tuple)) else (result,)) if isinstance(t, Tensor)
        ]
        for tensor in made:
            tensor._weft_operation = self, len(self.steps)  # type: ignore[attr-defined]
        size = sum(tensor.numel() * tensor.element_size() for tensor in made)
        self.steps.append((module, tuple(sorted(used)), size))

    def note_call(self, module: str, operands: Sequence[Tensor]) -> None:
        """``module`` is called with these tensors; its rank gets them, whether or not its code uses them."""
        self.note(module, operands, None)

    def _at(self, home: Mapping[str, int]) -> list[int]:
        """The number of the unit where each operation runs; -1 where it depends on none."""
        at: list[int] = []
        for module, operands, _ in self.steps:
            here = home.get(module, -1)
            at.append(here if here >= 0 else max((at[operand] for operand in operands), default=-1))
        return at

    def at_cuts(self, home: Mapping[str, int], units: int) -> list[list[int]]:
        """The bytes of the tensors that cross a cut, for a cut in front of each unit but the first one.

        Args:
            home: As for :meth:`crossing`.
            units: How many units there are.
        """
        at = self._at(home)
        until: dict[int, int] = {}
        for here, (_, operands, _) in zip(at, self.steps, strict=True):
            for operand in operands:
                until[operand] = max(until.get(operand, 0), here)
        found: list[list[int]] = [[] for _ in range(units - 1)]
        for operand, last in until.items():
            for cut in range(at[operand], last) if at[operand] >= 0 else ():
                found[cut].append(self.steps[operand][2])
        return found

    def flows(self, home: Mapping[str, int]) -> list[tuple[int, tuple[int, ...], int]]:
        """The flows between units: the unit that made a tensor, the later units that use it, and its bytes.

        Args:
            home: As for :meth:`crossing`.
        """
        at = self._at(home)
        users: dict[int, set[int]] = {}
        for here, (_, operands, _) in zip(at, self.steps, strict=True):
            for operand in operands:
                if 0 <= at[operand] < here:
                    users.setdefault(operand, set()).add(here)
        ordered = sorted(users, key=lambda operand: (at[operand], operand))
        return [(at[one], tuple(sorted(users[one])), self.steps[one][2]) for one in ordered]

    def crossing(self, home: Mapping[str, int], partitions: Sequence[int]) -> list[int]:
        """The bytes of each tensor that crosses, for a choice of units.

        Args:
            home: Module name to the number of the unit that it belongs to; glue is left out.
            partitions: The partition of each unit.
        """
        at = self._at(home)
        sent: set[tuple[int, int]] = set()
        for here, (_, operands, _) in zip(at, self.steps, strict=True):
            for operand in operands:
                there = at[operand]
                if 0 <= there and partitions[there] != partitions[here]:
                    sent.add((operand, partitions[here]))
        return [self.steps[operation][2] for operation, _ in sorted(sent)]
