"""What can be split over axis ``tp``, and what stays whole and why: a value, and its text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import FormatError

COLUMN, ROW, HEADS, VOCABULARY, EXPERTS = "column", "row", "heads", "vocabulary", "experts"
HOW = {
    COLUMN: "split by its results", ROW: "split by its inputs", HEADS: "split by its heads",
    VOCABULARY: "split by its vocabulary", EXPERTS: "split inside of each expert",
}  # fmt: skip
ONCE = -1
"""The dimension of a parameter that stays whole and counts on the first rank only."""


@dataclass(frozen=True)
class PartOf:
    """How a parameter of a module of experts is split.

    Attributes:
        name: The parameter.
        dim: The dimension that is cut; :data:`ONCE` for one that stays whole and counts on the first rank only.
        blocks: Sizes along ``dim`` of what is cut by itself.
    """

    name: str
    dim: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Linear:
    """How a linear is split.

    Attributes:
        kind: ``column``: each rank computes some of its results; ``row``: each rank takes some of its inputs;
            ``heads``: a whole attention module, of whose heads each rank has some; ``vocabulary``: an embedding, or
            the linear that gives a score for each word, of whose words each rank has some; ``experts``: a module
            with weights for several experts, of each of which each rank has a part.
        blocks: Of a column linear, how many results each of its blocks has; more than one for a fused projection.
        parts: Of a module of experts, its parameters; those that are left out stay whole and count on all ranks.
    """

    kind: str
    blocks: tuple[int, ...] = ()
    parts: tuple[PartOf, ...] = ()

    def to_record(self) -> list[Any]:
        """The same as values that JSON knows."""
        parts = [[part.name, part.dim, list(part.blocks)] for part in self.parts]
        return [self.kind, list(self.blocks), *([parts] if parts else [])]

    @classmethod
    def from_record(cls, record: Any) -> Linear:
        """What :meth:`to_record` gave."""
        kind, blocks, *more = record
        parts = tuple(
            PartOf(str(name), int(dim), tuple(int(n) for n in sizes))
            for each in more
            for name, dim, sizes in each
        )
        return cls({each: each for each in HOW}[kind], tuple(int(n) for n in blocks), parts)


@dataclass(frozen=True)
class Region:
    """A module inside of which tensors are in parts.

    Attributes:
        name: The module.
        linears: Its linears by name.
    """

    name: str
    linears: Mapping[str, Linear]


@dataclass(frozen=True)
class Splits:
    """What :func:`find` found.

    Attributes:
        size: Over how many ranks.
        regions: What is split.
        whole: The linears that stay whole, and why.
        spread: The linears and embeddings whose results stay in parts until somebody needs the whole.
        notes: Of some modules that are split, what becomes of their results.
    """

    size: int
    regions: tuple[Region, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    spread: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    def linears(self) -> dict[str, Linear]:
        """All linears that are split, by name."""
        return {name: linear for region in self.regions for name, linear in region.linears.items()}

    def apart(self) -> dict[str, str]:
        """Modules that take no parts of sequences as they are split, and why."""
        kinds = {HEADS: "attention of one module", EXPERTS: "experts", VOCABULARY: "a vocabulary"}
        return {
            name: f"it holds {kinds[linear.kind]} that is cut over other ranks"
            for name, linear in self.linears().items()
            if linear.kind in kinds
        }

    def to_record(self) -> dict[str, Any]:
        """The same as values that JSON knows."""
        regions = [
            {"name": region.name, "linears": {n: v.to_record() for n, v in region.linears.items()}}
            for region in self.regions
        ]
        return {
            "size": self.size, "regions": regions, "whole": dict(self.whole), "spread": list(self.spread),
            "notes": dict(self.notes),
        }  # fmt: skip

    @classmethod
    def from_record(cls, record: Any) -> Splits:
        """What :meth:`to_record` gave.

        Raises:
            FormatError: The record is none of those.
        """
        try:
            regions = tuple(
                Region(
                    str(region["name"]),
                    {str(name): Linear.from_record(each) for name, each in region["linears"].items()},
                )
                for region in record["regions"]
            )
            whole = {str(name): str(reason) for name, reason in record["whole"].items()}
            notes = {str(name): str(note) for name, note in record.get("notes", {}).items()}
            return cls(int(record["size"]), regions, whole, tuple(map(str, record.get("spread", ()))), notes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"no record of what is split over axis tp: {error!r}") from error

    def text(self) -> str:
        """A table: linears of layers that are alike in one line."""
        rows: dict[tuple[str, str], int] = {}
        for name, linear in self.linears().items():
            how = HOW[linear.kind]
            if len(linear.blocks) > 1:
                how += f", {len(linear.blocks)} blocks of {', '.join(map(str, dict.fromkeys(linear.blocks)))}"
            note = f"; {self.notes[name]}" if name in self.notes else ""
            key = pattern(name), f"{how}{note}"
            rows[key] = rows.get(key, 0) + 1
        for name, reason in self.whole.items():
            key = pattern(name), f"whole: {reason}"
            rows[key] = rows.get(key, 0) + 1
        if not rows:
            return f"axis tp ({self.size} ranks): the model has no linears"
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:{width}}  {count:3}  {how}" for (name, how), count in rows.items()]
        return "\n".join([f"linears over the {self.size} ranks of axis tp", *lines])


def pattern(name: str) -> str:
    """A module's name with a star for numbers of layers: what is alike has one pattern.

    >>> pattern("model.layers.12.mlp.up_proj"), pattern("blocks.3.mlp.0")
    ('model.layers.*.mlp.up_proj', 'blocks.*.mlp.0')
    """
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", name)
