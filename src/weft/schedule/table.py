"""Every schedule by name: its generator, and all that is decided by the name.

Whoever needs to know something of a schedule by its name reads it here, and compares no names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.schedule.generators.dualpipev import dualpipev
from weft.schedule.generators.gpipe import gpipe
from weft.schedule.generators.interleaved_1f1b import interleaved_1f1b
from weft.schedule.generators.looped_bfs import looped_bfs
from weft.schedule.generators.one_f_one_b import one_f_one_b
from weft.schedule.generators.v_half import v_half
from weft.schedule.generators.v_min import v_min
from weft.schedule.generators.zb_h1 import zb_h1
from weft.schedule.generators.zbv import zbv
from weft.schedule.schedule import Schedule


@dataclass(frozen=True)
class Kind:
    """The properties of a schedule that follow from its name.

    Attributes:
        title: What the field calls it, as log lines and tables show it.
        generate: Its actions from (ranks, microbatches, active, chunks); None where more than these numbers is needed.
        chunks: How many stages a rank has: least, most; None where the stages are those of its input.
        limited: Whether a rank keeps to a limit on its microbatches in flight.
        splits: Whether backward passes are I and W.
        v: Whether a rank's second stage is as far from the end as its first is from the start; else stages go around.
        early: Whether a rank may start one microbatch more than its list holds, while it would wait.
        measured: Whether the first rank measures what units and messages take, and sends the others the schedule.
        timed: Whether the schedule follows from measured times, and so from chance.
    """

    title: str
    generate: Callable[[int, int, int | None, int | None], Schedule] | None = None
    chunks: tuple[int, int | None] | None = None
    limited: bool = False
    splits: bool = False
    v: bool = False
    early: bool = False
    measured: bool = False
    timed: bool = False

    @property
    def free_chunks(self) -> bool:
        """True if a job says how many stages a rank has."""
        return self.chunks is not None and self.chunks[1] is None


KINDS: Mapping[str, Kind] = {
    "1f1b": Kind("1F1B", lambda p, m, active, _: one_f_one_b(p, m, active), (1, 1), limited=True, early=True),
    "gpipe": Kind("GPipe", lambda p, m, *_: gpipe(p, m), (1, 1)),
    "interleaved_1f1b": Kind(
        "interleaved 1F1B", lambda p, m, _, chunks: interleaved_1f1b(p, m, chunks or 2), (2, None)
    ),
    "looped_bfs": Kind("looped BFS", lambda p, m, _, chunks: looped_bfs(p, m, chunks or 2), (2, None)),
    "zb_h1": Kind("ZB-H1", lambda p, m, active, _: zb_h1(p, m, active), (1, 1), limited=True, splits=True),
    "zbv": Kind("ZBV", lambda p, m, *_: zbv(p, m), (2, 2), splits=True, v=True),
    "dualpipev": Kind("DualPipeV", lambda p, m, *_: dualpipev(p, m), (2, 2), splits=True, v=True),
    "v_half": Kind("V-Half", lambda p, m, *_: v_half(p, m), (2, 2), splits=True, v=True),
    "v_min": Kind("V-Min", lambda p, m, *_: v_min(p, m), (2, 2), splits=True, v=True),
    "list": Kind("list scheduling", measured=True, timed=True),
    "file": Kind("schedule of a file", measured=True),
    "auto": Kind("best schedule", early=True, measured=True, timed=True),
}
"""All that a job may ask for; `auto` is no schedule of its own, but the best of the others."""

NAMES = tuple(name for name in KINDS if name != "auto")
"""All schedules."""

SECOND_NAMES: Mapping[str, str] = {
    "interleaved": "1f1b", "simple": "gpipe", "looped": "interleaved_1f1b", "zb_v": "zbv", "zbv_zero_bubble": "zbv",
}  # fmt: skip
"""Further names: those of SageMaker's library, former ones, and those of PyTorch's classes."""
_BARE = {"".join(name.split("_")): name for name in KINDS} | {
    "".join(name.split("_")): ours for name, ours in SECOND_NAMES.items()
}


def named(text: str) -> str:
    """The name of a schedule by any of its names, in any case, with or without "_"; other texts as they are.

    >>> named("1F1B"), named("Interleaved1F1B"), named("GPipe"), named("zb-v"), named("interleaved"), named("other")
    ('1f1b', 'interleaved_1f1b', 'gpipe', 'zbv', '1f1b', 'other')
    """
    return _BARE.get(text.lower().replace("_", "").replace("-", ""), text)


CHUNKS: Mapping[str, tuple[int, int | None]] = {
    name: kind.chunks for name, kind in KINDS.items() if kind.chunks is not None
}
"""The schedules that follow from the numbers alone, and how many chunks (stages a rank) each takes: least, most."""


def having(trait: Callable[[Kind], bool]) -> tuple[str, ...]:
    """The names of the kinds of which something is true.

    >>> having(lambda kind: kind.limited)
    ('1f1b', 'zb_h1')
    """
    return tuple(name for name, kind in KINDS.items() if trait(kind))
