"""Models with layers to cut and sequences to cut, as data that hypothesis draws and makes smaller.

    Program    the layout of the job, the optimizers, what goes in and what the loss is
      Layer    attention, an MLP, or something along the sequence; numbers that choose how it is written
      Event    what a script does between two steps

Every number means something (it is taken modulo what there is). Smaller numbers mean what is simpler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tensor_parallel_degree": 2}),
    (2, {"context_parallel_degree": 2}),
    (2, {"tensor_parallel_degree": 2, "sequence_parallel": True}),
    (2, {"sharded_data_parallel_degree": 2}),
    (4, {"tensor_parallel_degree": 2, "context_parallel_degree": 2}),
    (4, {"tensor_parallel_degree": 2, "partitions": 2}),
    (4, {"context_parallel_degree": 2, "partitions": 2}),
    (4, {"sharded_data_parallel_degree": 2, "partitions": 2}),
    (4, {"sharded_data_parallel_degree": 2, "partitions": 2, "sharded_parameters_gathered": "microbatch"}),
    (4, {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2}),
    (4, {"context_parallel_degree": 2, "sharded_data_parallel_degree": 2}),
    (4, {"tensor_parallel_degree": 2, "shard_optimizer_state": True}),
    (3, {"tensor_parallel_degree": 3}),
    (2, {"partitions": 2}),
    (2, {"ddp": True}),
    (2, {"shard_optimizer_state": True}),
    (4, {"partitions": 2, "ddp": True}),
]
"""Ranks, and the settings that say what each has."""

KINDS = ("attention", "mlp", "mixture", "along", "cross")
CHOICES = 10
"""How many numbers a layer has."""

EVENTS = ("rate", "weights", "states", "written", "average", "copy", "evaluation", "not finite", "resumed")
"""What happens between steps; see `between`."""


@dataclass(frozen=True)
class Layer:
    """`picks`: what `source` chooses by, each where it is needed."""

    kind: str
    picks: tuple[int, ...]


@dataclass(frozen=True)
class Event:
    """`at`: before which step. `alone`: one rank alone does it. `pick`: which rank, parameter, optimizer or layout."""

    kind: str
    at: int = 0
    alone: bool = False
    pick: int = 0


@dataclass(frozen=True)
class Program:
    """A model, and how it is trained. `several`: two optimizers, each with half of the parameters. `counted`: which
    quarters of a copy's samples count in the loss, as bits; all if it is 0."""

    layers: tuple[Layer, ...]
    layout: int = 0
    optimizer: int = 0
    head: int = 0
    loss: int = 0
    length: int = 0
    norms: int = 0
    clip: bool = False
    checkpointed: bool = False
    evaluate: bool = False
    verify: bool = False
    schedule: int = 0
    extras: int = 0
    frozen: int = 0
    twice: bool = False
    accumulate: bool = False
    several: bool = False
    counted: int = 0
    events: tuple[Event, ...] = ()

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout % len(LAYOUTS)][0]


_number = st.integers(0, 11)
_picks = st.lists(_number, min_size=CHOICES, max_size=CHOICES).map(tuple)
_layers = st.lists(st.builds(Layer, st.sampled_from(KINDS), _picks), min_size=1, max_size=4).map(tuple)
_events = st.builds(Event, st.sampled_from(EVENTS), st.integers(0, 2), st.booleans(), _number)
programs = st.builds(
    Program,
    layers=_layers, layout=st.integers(0, len(LAYOUTS) - 1), optimizer=_number, head=_number, loss=_number,
    length=_number, norms=_number, clip=st.booleans(), checkpointed=st.booleans(), evaluate=st.booleans(),
    verify=st.booleans(), schedule=_number, extras=_number, frozen=_number, twice=st.booleans(),
    accumulate=st.booleans(), several=st.booleans(), counted=st.sampled_from((0,) * 8 + tuple(range(1, 16))),
    events=st.lists(_events, max_size=3).map(tuple),
)  # fmt: skip
