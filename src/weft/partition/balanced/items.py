"""Items to place: the units of a group together, every other unit by itself; and orders of these items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.errors import PlacementError
from weft.graph.model import Flow
from weft.partition.balanced.candidate import Balance
from weft.partition.problem import Problem


@dataclass(frozen=True)
class Items:
    """Groups contracted to one item each; items in the order of their first units.

    Attributes:
        units: The units of each item.
        flows: Tensors between items, with items as numbers; those with equal ends are one.
        weights: For each balance the weight of each item.
        fixed: Item to the partition that it must go to.
    """

    units: tuple[tuple[int, ...], ...]
    flows: tuple[Flow, ...]
    weights: tuple[tuple[float, ...], ...]
    fixed: dict[int, int]

    @classmethod
    def of(cls, problem: Problem, balances: Sequence[Balance]) -> Items:
        """The items of a problem.

        Raises:
            PlacementError: If units of one group are fixed to several partitions.
        """
        graph = problem.graph
        units: dict[str | int, list[int]] = {}
        for number, group in enumerate(unit.group for unit in graph):
            units.setdefault(number if group is None else group, []).append(number)
        item_of = {unit: item for item, own in enumerate(units.values()) for unit in own}
        sizes: dict[tuple[int, tuple[int, ...]], int] = {}
        for source, targets, size in graph.flows:
            home = item_of[source]
            there = tuple(sorted({item_of[target] for target in targets} - {home}))
            if there:
                sizes[home, there] = sizes.get((home, there), 0) + size
        wanted: dict[int, set[int]] = {}
        for unit, partition in problem.fixed_units.items():
            wanted.setdefault(item_of[unit], set()).add(partition)
        groups = list(units)
        faults = [
            f'fixed puts units of group "{groups[item]}" on the partitions {", ".join(map(str, sorted(several)))}: '
            "give them one"
            for item, several in wanted.items()
            if len(several) > 1
        ]
        if faults:
            raise PlacementError("; ".join(faults))
        return cls(
            tuple(map(tuple, units.values())),
            tuple((source, targets, size) for (source, targets), size in sizes.items()),
            tuple(
                tuple(sum(one.weights[unit] for unit in own) for own in units.values()) for one in balances
            ),
            {item: partition for item, (partition,) in wanted.items()},
        )

    def __len__(self) -> int:
        return len(self.units)

    def of_units(self, where: Sequence[int]) -> list[int]:
        """The partition of each unit, from that of each item."""
        found = {unit: partition for own, partition in zip(self.units, where, strict=True) for unit in own}
        return [found[unit] for unit in range(len(found))]

    @cached_property
    def received(self) -> tuple[tuple[int, ...], ...]:
        """For each item the numbers of the flows that it gets."""
        return self._flows_by(lambda flow: flow[1])

    @cached_property
    def sent(self) -> tuple[tuple[int, ...], ...]:
        """For each item the numbers of the flows that it makes."""
        return self._flows_by(lambda flow: (flow[0],))

    def _flows_by(self, ends: Callable[[Flow], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.units]
        for number, flow in enumerate(self.flows):
            for item in ends(flow):
                found[item].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def orders(self) -> dict[str, tuple[int, ...]]:
        """Different orders in which items come after those whose tensors they get, by name.

        Groups may make circles; there an order goes back as little as its rule sees.
        """
        found = {
            "program order": self._sorted(few_live_bytes=False),
            "depth first": self._depth_first(),
            "few live bytes": self._sorted(few_live_bytes=True),
        }
        names = {order: name for name, order in reversed(found.items())}
        return {name: order for name, order in found.items() if names[order] == name}

    def _sorted(self, few_live_bytes: bool) -> tuple[int, ...]:
        """Kahn's algorithm: of the items that are ready the first, or the one that leaves the fewest live bytes."""
        live = _Live(self)
        missing = [len({self.flows[flow][0] for flow in flows}) for flows in self.received]
        ready = {item for item in range(len(self)) if not missing[item]}
        waits = set(range(len(self))) - ready
        order: list[int] = []
        while ready or waits:
            free = ready or {min(waits)}  # a circle is opened at its first item
            item = min(free, key=lambda one: (live.change(one) if few_live_bytes else 0, one))
            ready.discard(item)
            waits.discard(item)
            order.append(item)
            live.run(item)
            for target in {target for flow in self.sent[item] for target in self.flows[flow][1]} & waits:
                missing[target] -= 1
                if not missing[target]:
                    waits.discard(target)
                    ready.add(target)
        return tuple(order)

    def _depth_first(self) -> tuple[int, ...]:
        """Backwards from the last items: each after all that it needs, and as near to them as possible."""
        done: set[int] = set()
        order: list[int] = []
        for last in (item for item in range(len(self)) if not self.sent[item]):
            path = [(last, iter(self.received[last]))]
            done.add(last)
            while path:
                item, flows = path[-1]
                before = next(
                    (self.flows[flow][0] for flow in flows if self.flows[flow][0] not in done), None
                )
                if before is None:
                    order.append(item)
                    path.pop()
                else:
                    done.add(before)
                    path.append((before, iter(self.received[before])))
        return (*order, *(item for item in range(len(self)) if item not in done))


class _Live:
    """The bytes that are made and still needed while items run one after the other."""

    def __init__(self, items: Items) -> None:
        self.items = items
        self.left = [len(targets) for _, targets, _ in items.flows]

    def change(self, item: int) -> int:
        """By how much they grow if the item runs next."""
        flows, items = self.items.flows, self.items
        made = sum(flows[flow][2] for flow in items.sent[item])
        return made - sum(flows[flow][2] for flow in items.received[item] if self.left[flow] == 1)

    def run(self, item: int) -> None:
        """The item runs."""
        for flow in self.items.received[item]:
            self.left[flow] -= 1
