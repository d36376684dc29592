"""The pictures of `docs/schedules.md`: every schedule for four ranks and eight microbatches.

python -m tests.golden.gallery        # draws them anew
"""

from __future__ import annotations

from pathlib import Path

from tests.golden.texts import MICROBATCHES, RANKS, UNEVEN, listed
from weft.report.picture import timeline_svg
from weft.schedule import CHUNKS, NAMES, Schedule, make
from weft.simulate import StageCost, simulate
from weft.timeline import Timeline

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
FOLDER = PAGE.parent / "images" / "schedules"
MS = 1e-3
DRAWN = tuple(name for name in NAMES if name != "file")
"""`file` looks as what stands in the file."""


def planned(name: str) -> tuple[Schedule, list[StageCost]]:
    """The schedule, and what its stages cost: a rank's chunks together 1 ms each for F, I and W, and 2 ms for B."""
    if name == "list":
        return listed(), [_uneven(one.forward_s, one.backward_s, one.weight_s) for one in UNEVEN]
    schedule = make(name, RANKS, MICROBATCHES)
    unit_s = MS * RANKS / schedule.stages
    return schedule, [StageCost(unit_s, 2 * unit_s, unit_s, unit_s)] * schedule.stages


def _uneven(forward: float, backward: float, weight: float | None) -> StageCost:
    split = (
        {"backward_s": backward * MS}
        if weight is None
        else {"input_s": backward * MS, "weight_s": weight * MS}
    )
    return StageCost(forward * MS, **split)


def simulated(name: str) -> Timeline:
    schedule, costs = planned(name)
    return simulate(schedule.ranks, schedule.rank_of_stage, costs).timeline


def drawn(name: str) -> str:
    chunks = CHUNKS.get(name, (1, 1))[0]
    title = f"{name}, {chunks} chunks a rank" if chunks > 1 else name
    return timeline_svg(simulated(name), title)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in DRAWN:
        (FOLDER / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
