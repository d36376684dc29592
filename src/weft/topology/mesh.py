"""Ranks as coordinates: which ranks make one pipeline, and which hold the same part of the model.

A placement names the axes D (`rdp`), P (`pp`) and T (`tp`) from the slowest to the fastest: the
right-most letter changes with every rank. `cluster` is DPT, so that a pipeline's ranks are neighbours;
`spread` is TPD, so that replicas are.

Eight ranks, two partitions, `cluster`:    pipelines [0 1] [2 3] [4 5] [6 7]
Eight ranks, two partitions, `spread`:     pipelines [0 4] [1 5] [2 6] [3 7]
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.config import PLACEMENTS
from weft.errors import ConfigError, UsageError

_LETTERS = {"D": "rdp", "P": "pp", "T": "tp"}

_SHARED = {
    "world": (),
    "pp": ("rdp", "tp"),
    "tp": ("rdp", "pp"),
    "rdp": ("pp", "tp"),
    "dp": ("pp",),
    "stage": ("pp",),
    "mp": ("rdp",),
}
"""For each axis the coordinates that are equal for all ranks of one of its groups. `stage` is no axis of scripts: the
ranks of one partition."""


class Coordinates(NamedTuple):
    """Where a rank stands on the mesh."""

    rdp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """All ranks of a job as a grid with the axes `rdp`, `pp` and `tp`.

    >>> mesh = Mesh(world_size=8, pp=2, placement="spread")
    >>> mesh.groups("mp")
    ((0, 4), (1, 5), (2, 6), (3, 7))
    >>> mesh.coordinates(5)
    Coordinates(rdp=1, pp=1, tp=0)

    ``alike``: whether the ranks that split a tensor read the same samples. Axis `dp`, of ranks that read other ones,
    then is `rdp`; otherwise it has these ranks, too.
    """

    world_size: int
    pp: int
    tp: int = 1
    placement: str = "cluster"
    alike: bool = False

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {value}, it must be at least 1"
            for name, value in (("world_size", self.world_size), ("pp", self.pp), ("tp", self.tp))
            if value < 1
        ]
        if self.placement not in PLACEMENTS:
            faults.append(f'placement is "{self.placement}", it must be one of {", ".join(PLACEMENTS)}')
        if not faults and self.world_size % (self.pp * self.tp):
            faults.append(
                f"{self.world_size} ranks cannot be divided into copies of {self.pp * self.tp} "
                f"(pp {self.pp} x tp {self.tp})"
            )
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def rdp(self) -> int:
        """The number of replicas."""
        return self.world_size // (self.pp * self.tp)

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        if not 0 <= rank < self.world_size:
            raise UsageError(f"there is no rank {rank} among {self.world_size} ranks")
        return self._coordinates[rank]

    def rank_of(self, coordinates: Coordinates) -> int:
        """The rank that stands at `coordinates`."""
        for axis, value in coordinates._asdict().items():
            if not 0 <= value < self.size(axis):
                raise UsageError(f"{axis} is {value}, but the mesh has {self.size(axis)} there")
        return self._ranks[coordinates]

    def size(self, axis: str) -> int:
        """The number of ranks in a group of `axis`."""
        return len(self.group(axis, 0))

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that share a group of `axis` with `rank`, ascending."""
        here = self.coordinates(rank)
        return self._groups(axis)[self._shared(axis, here)]

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of `axis`, in the order of their first ranks."""
        return tuple(self._groups(axis).values())

    def position(self, axis: str, rank: int) -> int:
        """The index of `rank` inside its group of `axis`."""
        return self.group(axis, rank).index(rank)

    @cached_property
    def _coordinates(self) -> list[Coordinates]:
        extent = {"rdp": self.rdp, "pp": self.pp, "tp": self.tp}
        axes = [_LETTERS[letter] for letter in PLACEMENTS[self.placement]]
        grid = itertools.product(*(range(extent[axis]) for axis in axes))
        return [Coordinates(**dict(zip(axes, point, strict=True))) for point in grid]

    @cached_property
    def _ranks(self) -> dict[Coordinates, int]:
        return {coordinates: rank for rank, coordinates in enumerate(self._coordinates)}

    @cached_property
    def _grouped(self) -> dict[str, dict[tuple[int, ...], tuple[int, ...]]]:
        result: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
        for axis in _SHARED:
            members: dict[tuple[int, ...], list[int]] = {}
            for rank, here in enumerate(self._coordinates):
                members.setdefault(self._shared(axis, here), []).append(rank)
            result[axis] = {key: tuple(ranks) for key, ranks in members.items()}
        return result

    def _groups(self, axis: str) -> dict[tuple[int, ...], tuple[int, ...]]:
        if axis not in _SHARED:
            raise UsageError(
                f'there is no axis "{axis}", write one of {", ".join(each for each in _SHARED if each != "stage")}'
            )
        return self._grouped[axis]

    def _shared(self, axis: str, here: Coordinates) -> tuple[int, ...]:
        axis = "rdp" if axis == "dp" and self.alike else axis
        return tuple(getattr(here, name) for name in _SHARED.get(axis, ()))
