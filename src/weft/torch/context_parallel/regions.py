"""Modules that compute on sharded sequences, those that need full ones and why: a value, and its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import FormatError
from weft.torch.tensor_parallel.splits import pattern

BALANCED = "balanced"


@dataclass(frozen=True)
class Sequences:
    """The result of :func:`find`.

    Attributes:
        size: Over how many ranks.
        regions: The modules inside of which each rank has some positions; by name, the dimension of positions in what
            a module gets.
        whole: Modules that were tried and stay whole, and why.
        order: ``BALANCED``, if ranks have positions from both ends of a sequence; else why each has one block.
        kept: The modules whose results stay sharded until somebody needs the whole.
        notes: What becomes of the modules' results.
    """

    size: int
    regions: Mapping[str, int] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    order: str = BALANCED
    kept: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def balanced(self) -> bool:
        """True if ranks have positions from both ends of a sequence, where lengths allow it."""
        return self.order == BALANCED

    def to_record(self) -> dict[str, Any]:
        """The same as values that JSON knows."""
        return {
            "size": self.size, "regions": dict(self.regions), "whole": dict(self.whole), "order": self.order,
            "kept": list(self.kept), "notes": dict(self.notes),
        }  # fmt: skip

    @classmethod
    def from_record(cls, record: Any) -> Sequences:
        """The value that :meth:`to_record` gave.

        Raises:
            FormatError: The record is none of those.
        """
        try:
            regions = {str(name): int(dim) for name, dim in record["regions"].items()}
            whole = {str(name): str(reason) for name, reason in record["whole"].items()}
            notes = {str(name): str(note) for name, note in record["notes"].items()}
            kept = tuple(map(str, record["kept"]))
            return cls(int(record["size"]), regions, whole, str(record["order"]), kept, notes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"no record of what shares sequences over axis tp: {error!r}") from error

    def text(self) -> str:
        """A table: modules of layers that are alike in one line."""
        rows: dict[tuple[str, str], int] = {}
        by_name = {
            name: ", ".join(filter(None, (f"cut along dim {dim}", self.notes.get(name))))
            for name, dim in self.regions.items()
        }
        by_name.update((name, f"whole: {reason}") for name, reason in self.whole.items())
        for name, how in by_name.items():
            key = pattern(f"{name}.")[:-1], how
            rows[key] = rows.get(key, 0) + 1
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f"  {name:{width}}  {count:3}  {how}" for (name, how), count in rows.items()]
        order = (
            f"in blocks from both ends, where {2 * self.size} blocks divide them"
            if self.balanced
            else f"in one block for each rank: {self.order}"
        )
        return "\n".join([f"sequences over the {self.size} ranks of axis tp, {order}", *lines])
