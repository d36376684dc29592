"""Programs as data: a tree of frozen dataclasses, which hypothesis draws and makes smaller.

    Program    settings of the job, and what the script does around its steps
      Block    a module with children, and the statements of its forward
        Leaf   a child without statements: one of `parts`
        Do     a statement: a kind, and numbers that choose what it works on

Every number means something whatever the rest is (it is taken modulo what there is), so each tree is a program.
Smaller numbers mean what is simpler.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

LEAVES = (
    "Dense", "Plain", "Same", "Aux", "Norm", "Counted", "Dropped", "Reads", "Running", "Tally", "Rows", "Branch",
    "Pair", "Mapped", "Collects", "Writes", "Viewed", "Sequence", "Frozen", "Checkpointed",
    "Attention", "Packed", "Embedded", "Stores", "Nothing",
)  # fmt: skip
"""Classes of `parts`."""

STATEMENTS = {
    "call": "calls of modules",
    "new": "glue",
    "write": "in-place writes",
    "view": "views",
    "write_view": "writes into views",
    "set": "attributes that a module writes",
    "get": "attributes that a module reads",
    "carry": "attributes from microbatch to microbatch",
    "count": "counters",
    "tally": "numbers of a module that another reads",
    "hand": "attributes that a module hands to another",
    "aux": "attributes of a module that another reads",
    "list": "containers",
    "read": "values read",
    "exit": "early exit",
    "rows": "shapes that depend on data",
    "draw": "random numbers",
    "own": "own parameters",
    "buffer": "own buffers",
    "autocast": "autocast",
    "no_grad": "no gradients inside",
    "checkpoint": "activation checkpoints",
    "loop": "loops",
}
"""What a statement of a forward may be, see `source`, and the habit that it is."""

ENDINGS = (
    "backward", "loss_backward", "retained", "twice", "chunks", "several", "outside", "input_gradient", "gradient",
    "penalty", "aux", "prompt", "kept", "list_returned", "grads_read", "detached",
)  # fmt: skip
"""What a step does with what the models give; see `source`."""

PIPELINES = (
    "1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "looped_bfs", "zbv", "v_half", "v_min", "list", "auto",
)  # fmt: skip

OTHERS = (
    "revisits", "skips", "ties", "nested modules", "2 ranks", "3 ranks", "split by hand", "split by weft",
    "uneven batches", "evaluation in between", "gradients of several steps", "several models", "double precision",
)  # fmt: skip
"""Habits that are no part of the tree by themselves."""

HOOKS = ("", "result", "input", "collects", "backward")
"""A hook on a child: on its result, on its input, one that notes results, one in its backward pass."""


@dataclass(frozen=True)
class Leaf:
    """A child. `at`: its partition plus one, if it is placed by hand (0: as its parent). `tie`: it shares the weight of
    an earlier sibling with a `linear`, if there is one."""

    kind: str
    at: int = 0
    hook: str = ""
    tie: bool = False


@dataclass(frozen=True)
class Do:
    """A statement: what it works on is `a` (and `b`) steps back from the newest; `how` chooses between forms."""

    kind: str
    a: int = 0
    b: int = 0
    how: int = 0


@dataclass(frozen=True)
class Block:
    """A module with its own forward."""

    children: tuple[Leaf | Block, ...]
    body: tuple[Do, ...]
    at: int = 0


@dataclass(frozen=True)
class Program:
    """A whole script. `accumulate`: gradients of all steps add up. `extra`: samples by which a batch is uneven.
    `verify`: weft compares the first step with one process by itself, too."""

    models: tuple[Block, ...]
    ending: str = "backward"
    steps: int = 2
    ranks: int = 2
    microbatches: int = 2
    rows: int = 2
    extra: int = 0
    pipeline: str = "1f1b"
    by_hand: bool = False
    evaluate: bool = False
    accumulate: bool = False
    double: bool = False
    verify: str = "off"


numbers = st.integers(0, 3)
rarely = st.integers(0, 5).map(lambda number: number == 5)
leaves = st.builds(
    Leaf,
    st.sampled_from(("Dense",) * 8 + LEAVES),
    numbers,
    st.sampled_from(("",) * 8 + HOOKS),
    rarely,
)
statements = st.builds(
    Do,
    st.sampled_from(("nothing",) + ("call",) * 8 + tuple(STATEMENTS)),
    numbers,
    numbers,
    st.integers(0, 39),
)
"""Of a forward; one of the kind "nothing" leaves no line."""


def blocks(children: st.SearchStrategy[Leaf | Block], most: int) -> st.SearchStrategy[Block]:
    """Modules with up to so many children, and a forward."""
    several = st.lists(children, min_size=1, max_size=most).map(tuple)
    body = st.lists(statements, min_size=2 * most, max_size=2 * most).map(tuple)
    return st.builds(Block, several, body, numbers)


inner = blocks(leaves, 2)
outer = blocks(rarely.flatmap(lambda nested: inner if nested else leaves), 4)
programs = st.builds(
    Program,
    models=rarely.flatmap(lambda several: st.tuples(outer, outer) if several else st.tuples(outer)),
    ending=st.sampled_from(("backward",) * 8 + ENDINGS),
    steps=st.integers(2, 3),
    ranks=st.sampled_from((2, 2, 3)),
    microbatches=st.sampled_from((2, 1, 3, 4)),
    rows=st.integers(1, 3),
    extra=st.sampled_from((0, 0, 1)),
    pipeline=st.sampled_from(PIPELINES),
    by_hand=st.booleans(),
    evaluate=st.booleans(),
    accumulate=st.booleans(),
    double=st.booleans(),
    verify=st.sampled_from(("off", "off", "losses", "gradients")),
)
"""All of them."""


def habits() -> frozenset[str]:
    """All that a program may have."""
    named = {"module": LEAVES, "ending": ENDINGS, "schedule": PIPELINES, "hook": HOOKS[1:]}
    several = {f"{kind} {name}" for kind, names in named.items() for name in names}
    return frozenset(several.union(STATEMENTS.values(), OTHERS))
