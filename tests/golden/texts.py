"""What is kept as text: the path of each file here, and who makes what stands in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.golden.plans import JOBS, plan_text
from weft.schedule import CHUNKS, ListCost, Schedule, greedy, make
from weft.schedule.legal import show

FOLDER = Path(__file__).parent
RANKS, MICROBATCHES = 4, 8

UNEVEN = [
    ListCost(rank, forward_s, backward_s, weight_s, activation_bytes, transfer_s=0.1)
    for rank, forward_s, backward_s, weight_s, activation_bytes in (
        (0, 1.0, 1.0, 0.8, 3),
        (1, 1.2, 1.3, 1.0, 2),
        (2, 0.9, 1.9, None, 2),
        (3, 1.1, 1.0, 1.0, 2),
        (0, 0.3, 0.3, 0.3, 1),
    )
]
"""For `list`: a model whose last layers share parameters with the first, so rank 0 is visited twice."""


def text_of(schedule: Schedule) -> str:
    owners = " ".join(map(str, schedule.rank_of_stage))
    return f"{schedule.name}, rank of each stage: {owners}\n{show(schedule, width=99)}\n"


def listed() -> Schedule:
    return greedy(UNEVEN, MICROBATCHES, memory_bytes=[12, 8, 8, 8])


TEXTS: Mapping[str, Callable[[], str]] = {
    **{
        f"schedules/{name}.txt": lambda name=name: text_of(make(name, RANKS, MICROBATCHES)) for name in CHUNKS
    },
    "schedules/interleaved_1f1b-3-chunks.txt": lambda: text_of(
        make("interleaved_1f1b", RANKS, MICROBATCHES, chunks=3)
    ),
    "schedules/list.txt": lambda: text_of(listed()),
    **{f"engines/{name}.txt": lambda job=job: plan_text(job) for name, job in JOBS.items()},
}
