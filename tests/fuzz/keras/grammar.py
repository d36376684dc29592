"""Programs for Keras as data that hypothesis draws and makes smaller.

    Program    what goes in, the heads, how the model is written, how it is trained and called
      Block    some layers, with numbers that choose which

Every number means something (it is taken modulo what there is). Smaller numbers mean what is simpler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

PICKS = 4
"""The count of a block's numbers."""
CHOICES = (
    "form", "optimizer", "change", "rate", "loss", "losses", "metrics", "data", "weights", "validation", "callback",
    "compiled", "between", "microbatches", "executor", "pipeline", "step", "epochs", "rows", "dtype", "outputs",
)  # fmt: skip
"""The other choices of a program; see `source`, which knows the meaning of each number."""


@dataclass(frozen=True)
class Block:
    """Layers; what follows from ``kind`` depends on how many dims the tensor before has."""

    kind: int
    picks: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A model and a script. `habit`: by what it is trained. `heads`: the kinds of its outputs. `second`: the kind of a
    second input; none if it is 0."""

    blocks: tuple[Block, ...]
    input: int = 0
    second: int = 0
    heads: tuple[int, ...] = (0,)
    habit: int = 0
    choices: dict[str, int] = field(default_factory=dict)
    ranks: int = 2

    def pick(self, name: str, choices: Any) -> Any:
        """One of the choices."""
        return choices[self.choices.get(name, 0) % len(choices)]


def rarely(most: int) -> st.SearchStrategy[int]:
    """A number, which is 0 in half of all cases."""
    return st.one_of(st.just(0), st.integers(0, most))


numbers = st.integers(0, 23)
blocks = st.builds(Block, numbers, st.tuples(*[numbers] * PICKS))
programs = st.builds(
    Program,
    st.lists(blocks, min_size=1, max_size=5).map(tuple),
    st.integers(0, 3),
    rarely(2),
    st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple),
    st.integers(0, 5),
    st.fixed_dictionaries({name: rarely(23) for name in CHOICES}),
)
