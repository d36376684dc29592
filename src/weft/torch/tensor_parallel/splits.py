"""The modules split over axis ``tp``, how a script asks for that, which stay whole and why: a value, and its text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from weft.errors import FormatError, UsageError
from weft.torch.tensors.marks import WHOLE

_CONV1D = "transformers.pytorch_utils", "Conv1D"


def is_transposed(module: nn.Module) -> bool:
    """True if it is the ``Conv1D`` of `transformers`: a linear whose weight has the inputs first."""
    return (type(module).__module__, type(module).__name__) == _CONV1D


def is_linear(module: nn.Module) -> bool:
    """True if weft knows how to split the module; subclasses may do anything."""
    return type(module) is nn.Linear or is_transposed(module)


def features(module: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and of results of a linear."""
    shape = [*module.get_parameter("weight").shape]
    results, inputs = reversed(shape) if is_transposed(module) else shape
    return inputs, results


def wished(model: nn.Module) -> dict[str, str]:
    """The cut that the script wants for modules, by name; see ``weft.set_tensor_parallelism``."""
    found = {name: module.__dict__.get(WHOLE, (None,))[0] for name, module in model.named_modules()}
    return {name: how for name, how in found.items() if isinstance(how, str)}


def refuse_whole(model: nn.Module, faults: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` if modules cannot be split, and why, of which the script has said how to split them."""
    wanted = wished(model)
    faults = {name: why for name, why in faults.items() if name in wanted}
    if faults:
        reasons = "; ".join(
            f'{name} is set to "{wanted[name]}", and {why}' for name, why in sorted(faults.items())
        )
        raise UsageError(
            f"not all modules can be cut as weft.set_tensor_parallelism says: {reasons}. Write True to let "
            "weft decide, or False to keep it whole"
        )


COLUMN, ROW, HEADS, VOCABULARY = "column", "row", "heads", "vocabulary"
EXPERTS, MIXTURE = "experts", "mixture"
HOW = {
    COLUMN: "column-parallel", ROW: "row-parallel", HEADS: "split by its heads",
    VOCABULARY: "vocabulary-parallel", EXPERTS: "expert tensor parallel", MIXTURE: "expert-parallel",
}  # fmt: skip
ONCE, OF_EXPERTS = -1, 0
"""Dimensions of a parameter of experts: of one that stays whole and counts on the first rank only; and that with one
entry for each expert."""


@dataclass(frozen=True)
class PartOf:
    """The cut of a parameter of a module of experts.

    Attributes:
        name: The parameter.
        dim: The dimension that is cut; :data:`ONCE` for one that stays whole and counts on the first rank only.
        blocks: Sizes along ``dim`` of what is cut by itself.
    """

    name: str
    dim: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """An expert that is a module of its own, or a module beside the experts.

    Attributes:
        name: The module, as seen from the mixture.
        rank: Which rank has it; None for a module beside the experts, which all have and whose result counts once.
        width: How many numbers its result has for each token.
        rounded: Whether its result has the type of autocast, not that of its input.
        draws: Whether it draws random numbers.
    """

    name: str
    rank: int | None
    width: int = 0
    rounded: bool = False
    draws: bool = False


@dataclass(frozen=True)
class Linear:
    """The cut of a linear.

    Attributes:
        kind: ``column``: each rank computes some of its results; ``row``: each rank takes some of its inputs;
            ``heads``: a whole attention module, of whose heads each rank has some; ``vocabulary``: an embedding, or
            the linear that gives a score for each word, of whose words each rank has some; ``experts``: a module
            with weights for several experts, of each of which each rank has a part, or of which each rank has some;
            ``mixture``: a module around experts that are modules, of which each rank has some.
        blocks: Of a column linear, how many results each of its blocks has; more than one for a fused projection. Of a
            mixture, for each of its results what ranks do with it, see ``experts.expert_parallel``. Of experts that
            replicas share, the places of the tensors with a row for each token, see ``replicas.experts.dispatch``.
        parts: Of a module of experts, its parameters; those that are left out stay whole and count on all ranks.
        held: Of a mixture, its experts.
    """

    kind: str
    blocks: tuple[int, ...] = ()
    parts: tuple[PartOf, ...] = ()
    held: tuple[Held, ...] = ()

    def by_rank(self) -> bool:
        """True if each rank has some of the experts, whole."""
        return self.kind == MIXTURE or any(part.dim == OF_EXPERTS for part in self.parts)

    def to_record(self) -> list[Any]:
        """The same as values that JSON knows."""
        parts = [[part.name, part.dim, list(part.blocks)] for part in self.parts]
        held = [[each.name, each.rank, each.width, each.rounded, each.draws] for each in self.held]
        return [self.kind, list(self.blocks), *([parts] if parts or held else []), *([held] if held else [])]

    @classmethod
    def from_record(cls, record: Any) -> Linear:
        """The linear that :meth:`to_record` gave."""
        kind, blocks, *more = record
        parts, held = more[0] if more else (), more[1] if len(more) > 1 else ()
        return cls(
            {each: each for each in HOW}[kind],
            tuple(int(n) for n in blocks),
            tuple(PartOf(str(name), int(dim), tuple(int(n) for n in sizes)) for name, dim, sizes in parts),
            tuple(
                Held(str(name), None if rank is None else int(rank), int(width), bool(rounded), bool(draws))
                for name, rank, width, rounded, draws in held
            ),
        )


@dataclass(frozen=True)
class Region:
    """A module inside of which tensors are sharded.

    Attributes:
        name: The module.
        linears: Its linears by name.
    """

    name: str
    linears: Mapping[str, Linear]


@dataclass(frozen=True)
class Splits:
    """The result of :func:`find`.

    Attributes:
        size: Over how many ranks.
        regions: What is split.
        whole: The linears that stay whole, and why.
        stays_sharded: The linears and embeddings whose results stay sharded until somebody needs the whole.
        notes: Of some modules that are split, what becomes of their results.
        mixtures: Of modules that hold experts, how ranks share these, and why.
    """

    size: int
    regions: tuple[Region, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    stays_sharded: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    mixtures: Mapping[str, str] = field(default_factory=dict)

    def linears(self) -> dict[str, Linear]:
        """All linears that are split, by name."""
        return {name: linear for region in self.regions for name, linear in region.linears.items()}

    def drawing(self) -> list[str]:
        """Modules whose experts may draw random numbers."""
        return [
            name
            for name, each in self.linears().items()
            if each.kind == EXPERTS or any(h.draws for h in each.held)
        ]

    def apart(self) -> dict[str, str]:
        """Modules that take no parts of sequences as they are split, and why."""
        kinds = {HEADS: "attention of one module", EXPERTS: "experts", VOCABULARY: "a vocabulary"}
        return {
            name: f"it holds {kinds.get(linear.kind, 'a mixture of experts')} that is cut over other ranks"
            for name, linear in self.linears().items()
            if linear.kind not in (COLUMN, ROW)
        }

    def to_record(self) -> dict[str, Any]:
        """The same as values that JSON knows."""
        regions = [
            {"name": region.name, "linears": {n: v.to_record() for n, v in region.linears.items()}}
            for region in self.regions
        ]
        return {
            "size": self.size, "regions": regions, "whole": dict(self.whole), "spread": list(self.stays_sharded),
            "notes": dict(self.notes), "mixtures": dict(self.mixtures),
        }  # fmt: skip

    @classmethod
    def from_record(cls, record: Any) -> Splits:
        """The splits that :meth:`to_record` gave.

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
            notes, mixtures = (
                {str(name): str(note) for name, note in record.get(key, {}).items()}
                for key in ("notes", "mixtures")
            )
            spread = tuple(map(str, record.get("spread", ())))
            return cls(int(record["size"]), regions, whole, spread, notes, mixtures)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"no record of what is split over axis tp: {error!r}") from error

    def warning(self, model: str) -> str:
        """The warning about a model that every rank has whole all the same; empty where some weight is sharded.

        >>> Splits(2, (), {"head": "3 results do not divide by 2"}).warning("Net")
        'tensor_parallel_degree is 2, but no weight of Net is sharded, and every rank computes all of it: head stays \
whole (3 results do not divide by 2)'
        """
        if self.linears():
            return ""
        stays = [f"{name} stays whole ({why})" for name, why in self.whole.items()]
        reason = (
            stays
            or ["it has no nn.Linear, nn.Embedding, nn.MultiheadAttention or experts, which weft shards"]
        )[0]
        return (
            f"tensor_parallel_degree is {self.size}, but no weight of {model} is sharded, and every rank computes all "
            f"of it: {reason}"
        )

    def text(self) -> str:
        """A table: linears of layers that are alike in one line."""
        rows: dict[tuple[str, str], int] = {}
        for name, linear in self.linears().items():
            how = HOW[MIXTURE if linear.by_rank() else linear.kind]
            if linear.kind == COLUMN and len(linear.blocks) > 1:
                how += f", {len(linear.blocks)} blocks of {', '.join(map(str, dict.fromkeys(linear.blocks)))}"
            note = f"; {self.notes[name]}" if name in self.notes else ""
            key = pattern(name), f"{how}{note}"
            rows[key] = rows.get(key, 0) + 1
        for name, how in self.mixtures.items():
            rows[pattern(name), how] = rows.get((pattern(name), how), 0) + 1
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
