"""Units as a chain of links: what the exact methods cut.

Units of one group (they share a parameter) must lie together. A group of neighbours is one link of the
chain; a group that is spread over the program (a tied embedding and head) goes to one partition as a whole
and the rest stays a chain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.errors import PlacementError

Choice = tuple[int, ...]
"""The partition of each spread group."""

Window = tuple[int, int]
"""The first and the last start that a segment may have."""


@dataclass(frozen=True)
class Link:
    """Units that go to one partition: a unit, a group of neighbours, or a spread group."""

    units: tuple[int, ...]
    fixed: int | None = None

    @property
    def spread(self) -> bool:
        """True if other units stand between its own."""
        return self.units[-1] - self.units[0] + 1 != len(self.units)

    def sum(self, values: Sequence[float]) -> float:
        """The sum of the values of its units."""
        return sum(values[unit] for unit in self.units)


@dataclass(frozen=True)
class Chain:
    """Links in program order, and everything that does not depend on the choice for the spread ones."""

    links: Sequence[Link]
    partitions: int

    @cached_property
    def units(self) -> int:
        """The number of units."""
        return sum(len(link.units) for link in self.links)

    @cached_property
    def chain(self) -> list[Link]:
        """The links without the spread ones."""
        return [link for link in self.links if not link.spread]

    @cached_property
    def spread(self) -> list[Link]:
        """The spread groups."""
        return [link for link in self.links if link.spread]

    @cached_property
    def options(self) -> list[list[int]]:
        """The partitions that each spread group may go to."""
        every = list(range(self.partitions))
        return [every if link.fixed is None else [link.fixed] for link in self.spread]

    @cached_property
    def windows(self) -> list[Window]:
        """For each partition, and one past the last, where its segment may start: what `fixed` leaves."""
        n = len(self.chain)
        first, last = [0] * (self.partitions + 1), [n] * (self.partitions + 1)
        last[0], first[-1] = 0, n
        for number, link in enumerate(self.chain):
            for partition in range(1, self.partitions if link.fixed is not None else 0):
                if link.fixed is not None and partition <= link.fixed:
                    last[partition] = min(last[partition], number)
                else:
                    first[partition] = max(first[partition], number + 1)
        return list(zip(first, last, strict=True))

    @cached_property
    def joined(self) -> list[bool]:
        """For each link of the chain whether it and the one before are neighbours in the program."""
        ends = [-2, *(link.units[-1] for link in self.chain)]
        return [link.units[0] == end + 1 for link, end in zip(self.chain, ends, strict=False)]

    @cached_property
    def beside(self) -> list[tuple[int, int]]:
        """(link of the chain, spread group) for each pair of neighbours in the program."""
        owner = {unit: number for number, link in enumerate(self.spread) for unit in link.units}
        return [
            (number, owner[unit])
            for number, link in enumerate(self.chain)
            for unit in (link.units[0] - 1, link.units[-1] + 1)
            if unit in owner
        ]

    def placement(self, choice: Choice, starts: Sequence[int]) -> list[int]:
        """The partition of every unit."""
        result = [0] * self.units
        for partition, (start, end) in enumerate(itertools.pairwise(starts)):
            _assign(result, self.chain[start:end], itertools.repeat(partition))
        _assign(result, self.spread, choice)
        return result


def _assign(result: list[int], links: Sequence[Link], partitions: Iterable[int]) -> None:
    for link, partition in zip(links, partitions, strict=False):
        for unit in link.units:
            result[unit] = partition


def make_links(groups: Sequence[int | str | None], fixed: Mapping[int, int]) -> list[Link]:
    """Units and groups by their first unit; raises if `fixed` contradicts the groups or the order."""
    members: dict[tuple[str, int | str], list[int]] = {}
    for unit, group in enumerate(groups):
        members.setdefault(("unit", unit) if group is None else ("group", group), []).append(unit)
    links = []
    reached, reached_by = 0, -1
    for units in members.values():
        pinned = {fixed[unit]: unit for unit in units if unit in fixed}
        if len(pinned) > 1:
            (one, unit), (other, another) = list(pinned.items())[:2]
            raise PlacementError(
                f"fixed puts the units {unit} and {another} of one group on the partitions {one} and "
                f"{other}: give them the same partition, or leave one out"
            )
        link = Link(tuple(units), next(iter(pinned), None))
        links.append(link)
        if link.fixed is None or link.spread:
            continue
        if link.fixed < reached:
            raise PlacementError(
                f"fixed puts unit {reached_by} on partition {reached} and unit {pinned[link.fixed]} after it "
                f"on partition {link.fixed}, but partitions follow the program: give the later one at least "
                f"{reached}"
            )
        reached, reached_by = link.fixed, pinned[link.fixed]
    return links
