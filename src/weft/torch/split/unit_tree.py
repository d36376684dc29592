"""The traced modules as a tree, and the units that a choice of opened modules leaves.

A module that was called and is not opened is a unit, unless something above it is one already. Units come in three
kinds: with state (parameters, or buffers that they write), without any (they *float*: they run where their newest
argument is), and modules with constant buffers only, which are always opened, so that what they compute from
replicated tensors (position tables, masks) stays replicated.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from weft.graph.model import Unit
from weft.torch.pytorch.private import has_backward_hooks, is_compiled
from weft.torch.trace.record import Record, Trace


@dataclass
class Piece:
    """A module that is a unit.

    Attributes:
        unit: What its whole subtree costs; parameters count in the graph only, see ``open_modules.graph_of``.
        module: The module.
        order: When it was first called, among all modules.
        floating: Whether it has no state, and so runs where its newest argument is.
        parameters: Those that go with it, by ``id``.
        tied: Pieces of one number must lie together.
    """

    unit: Unit
    module: nn.Module
    order: float
    floating: bool
    parameters: dict[int, nn.Parameter] = field(default_factory=dict)
    tied: int | None = None

    @property
    def name(self) -> str:
        """The name of the module in the model."""
        return self.unit.name

    def add(self, other: Unit) -> None:
        """Count what ``other`` costs here."""
        self.unit = self.unit.plus_work(other)

    def module_parameters(self) -> set[int]:
        """The parameters of the module itself, by ``id``; ``parameters`` may hold others that go with it."""
        return {id(parameter) for parameter in self.module.parameters()}


GRADIENTS = 2
"""An operation's backward pass has the gradient of its result and that of its input at once. Each is as large as the
activation that was kept."""


def cost_of(record: Record) -> Unit:
    """The cost of a module by itself, without the modules that it called."""
    measured = record.input_s or record.weight_s
    return Unit(
        record.name,
        record.forward_s * 1e3,
        record.backward_s * 1e3,
        parameter_bytes=0,
        activation_bytes=record.saved_bytes,
        output_bytes=record.output_bytes,
        transient_bytes=GRADIENTS * record.largest_bytes + record.recomputed_bytes,
        input_ms=record.input_s * 1e3 if measured else None,
        weight_ms=record.weight_s * 1e3 if measured else None,
    )


class Tree:
    """The called modules of ``root``, by name."""

    def __init__(self, root: nn.Module, trace: Trace) -> None:
        self.root = root
        self.trace = trace
        self._pieces: dict[tuple[frozenset[str], frozenset[str]], list[Piece]] = {}
        """The units by what is opened and closed: a search asks for the same ones many times."""
        self.closed: frozenset[str] = frozenset()
        """Modules that stay in one piece because their weights are cut over ranks."""
        self.records = trace.records
        self.parent: dict[str, str | None] = {}
        self.children: dict[str, list[str]] = {name: [] for name in self.records}
        for name in self.records:
            above = self._called_ancestor(name)
            self.parent[name] = above
            if above is not None:
                self.children[above].append(name)
        self.parameter_names = {id(p): n for n, p in root.named_parameters()}

    def _called_ancestor(self, name: str) -> str | None:
        while name:
            name = name.rpartition(".")[0]
            if name in self.records:
                return name
        return None

    def subtree(self, name: str) -> Iterator[Record]:
        yield self.records[name]
        for child in self.children[name]:
            yield from self.subtree(child)

    def openable(self, name: str) -> bool:
        """True if the module's children may be units, and its own code glue.

        Backward hooks see input and output of the module, so they keep it together. A module without children is opened
        where tensors get out of it by another way than its result.
        """
        module = self.records[name].module
        if isinstance(module, torch.jit.ScriptModule) or name in self.trace.whole or name in self.closed:
            return False
        if name and (has_backward_hooks(module) or is_compiled(module)):
            return False
        if not self.children[name]:
            return bool(name) and self.records[name].describable and name in self.trace.leaking
        return not any(map(self.stuck, self.children[name]))

    def stuck(self, name: str) -> bool:
        """True if the module must be opened, and cannot be: the module that calls it stays in one piece."""
        return self.must_open(name) and not self.openable(name)

    def writes(self, name: str) -> bool:
        """True if the module's own code writes its buffers: opened, microbatches would see each other's half-way."""
        start = f"{name}." if name else ""
        return any(
            buffer.startswith(start) and "." not in buffer[len(start) :]
            for buffer in self.trace.written_buffers
        )

    def must_open(self, name: str) -> bool:
        """True if the module cannot be one unit: its result cannot be sent, or tensors get out by another way."""
        return not self.records[name].describable or name in self.trace.leaking

    def always_opened(self, name: str) -> bool:
        """True if the module has constant buffers and nothing else: its code is glue that every rank runs."""
        module = self.records[name].module
        if next(module.parameters(), None) is not None:
            return False
        buffers = [f"{name}.{inner}" if name else inner for inner, _ in module.named_buffers()]
        return bool(buffers) and not any(buffer in self.trace.written_buffers for buffer in buffers)

    def has_state(self, name: str) -> bool:
        """True if the module has parameters, buffers, or attributes that go from microbatch to microbatch."""
        module = self.records[name].module
        return (
            next(module.parameters(), None) is not None
            or next(module.buffers(), None) is not None
            or any(each.in_order and each.inside(name) for each in self.trace.attributes)
        )

    def pieces(self, opened: set[str]) -> list[Piece]:
        """The units that remain when ``opened`` are opened (the root is, if it can be), in program order."""
        known = frozenset(opened), frozenset(self.closed)
        if known not in self._pieces:
            self._pieces[known] = self._pieces_of(opened)
        return list(self._pieces[known])

    def _pieces_of(self, opened: set[str]) -> list[Piece]:
        found: list[Piece] = []
        roots = [name for name, above in self.parent.items() if above is None]
        self._collect(roots, opened, found)
        found.sort(key=lambda piece: piece.order)
        self._add_glue(found, opened)
        self._tie(found)
        return found

    def _collect(self, names: Iterable[str], opened: set[str], found: list[Piece]) -> None:
        for name in names:
            if name in opened or (self.openable(name) and (name == "" or self.must_open(name))):
                self._collect(self.children[name], opened, found)
                continue
            if self.always_opened(name):
                self._collect(self.children[name], opened, found)
                continue
            record = self.records[name]
            piece = Piece(cost_of(record), record.module, record.order, floating=not self.has_state(name))
            for part in itertools.islice(self.subtree(name), 1, None):
                piece.add(cost_of(part))
            piece.parameters = {id(p): p for p in record.module.parameters()}
            found.append(piece)

    def glue(self, pieces: list[Piece]) -> list[Record]:
        """The opened modules: everything that was called outside of every piece."""
        inside = {part.name for piece in pieces for part in self.subtree(piece.name)}
        return [record for record in self.records.values() if record.name not in inside]

    def _add_glue(self, pieces: list[Piece], opened: set[str]) -> None:
        """Count what glue and floating units cost for the unit before them, and the parameters that glue uses.

        Each part of a module's own code counts where it runs: a loss that a model computes, for the last unit.
        """
        fixed = [piece for piece in pieces if not piece.floating]
        if not fixed:
            return
        for record in self.glue(pieces):
            for order, part in record.spread():
                last_before(fixed, order).add(cost_of(part))
        fixed[-1].add(cost_of(self.trace.around))  # a loss, in most steps
        for piece in pieces:
            if piece.floating:
                last_before(fixed, piece.order).add(piece.unit)
        for parameter, at in self.glue_parameters(pieces):
            at.parameters[id(parameter)] = parameter

    def glue_parameters(self, pieces: list[Piece]) -> list[tuple[nn.Parameter, Piece]]:
        """Parameters of opened modules, each with the unit that it goes with: the one before its first use."""
        fixed = [piece for piece in pieces if not piece.floating]
        owned = {id(p) for piece in fixed for p in piece.module.parameters()}
        used: dict[int, float] = {}
        for record in self.glue(pieces):
            for number, order in record.parameters_used.items():
                used[number] = min(order, used.get(number, order))
        rest = [p for p in self.root.parameters() if id(p) not in owned]
        return [(p, last_before(fixed, used.get(id(p), 0))) for p in rest] if fixed else []

    def _tie(self, pieces: list[Piece]) -> None:
        """Number groups of units that must lie together."""
        home = {part.name: piece for piece in pieces for part in self.subtree(piece.name)}
        leader: dict[str, str] = {piece.name: piece.name for piece in pieces}

        def find(name: str) -> str:
            while leader[name] != name:
                name = leader[name]
            return name

        def tie(one: Piece | None, other: Piece | None) -> None:
            if one is not None and other is not None and not one.floating and not other.floating:
                leader[find(one.name)] = find(other.name)

        holders: dict[int, Piece] = {}
        for piece in pieces:
            for number in piece.parameters:
                tie(piece, holders.setdefault(number, piece))
        for piece in pieces:
            for part in self.subtree(piece.name):
                for callee in part.called:
                    tie(piece, home.get(callee))
                for number in part.parameters_used:
                    tie(piece, holders.get(number))
        for _, names in self.trace.function_calls:
            homes = [home[name] for name in names if name in home and not home[name].floating]
            for one, other in itertools.pairwise(homes):
                tie(one, other)
        numbers: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for piece in pieces:
            sizes[find(piece.name)] = sizes.get(find(piece.name), 0) + 1
        for piece in pieces:
            if sizes[find(piece.name)] > 1:
                piece.tied = numbers.setdefault(find(piece.name), len(numbers))


def last_before(pieces: list[Piece], order: float) -> Piece:
    """The last piece that was first called no later than ``order``; the first one if none was."""
    return pieces[max(0, bisect_right(pieces, order, key=lambda piece: piece.order) - 1)]
