"""Buffers that the code between units writes: microbatches use them one after the other, or the step is refused."""

from __future__ import annotations

import pytest
import torch

from weft.errors import UsageError
from weft.torch.session.pipeline import SharedBuffer


def run(uses: str) -> None:
    """`r0 w1`: microbatch 0 reads, then microbatch 1 writes."""
    buffer = torch.zeros(2)
    shared = SharedBuffer("m.level", buffer)
    shared.begin()
    for kind, number in uses.split():
        shared.use(int(number))
        if kind == "w":
            buffer.add_(1)
    shared.end()


@pytest.mark.parametrize(
    "uses", ["r0 w0 r1 w1", "w0 w0 w1 w2", "r1 r0 r2 r0", "w0", "r0 r1 r2", "w0 r1 r0 r1", "r1 w1"]
)
def test_in_order(uses: str) -> None:
    run(uses)


@pytest.mark.parametrize(
    ("uses", "later", "earlier"),
    [
        ("w0 w1 r0", 1, 0),
        ("w0 w1 w0", 1, 0),
        ("r0 r1 w0", 1, 0),
        ("r0 r1 w0 w1", 1, 0),
        ("w2 r1", 2, 1),
        ("r0 w0 r2 w1", 2, 1),
    ],
)
def test_a_later_one_first(uses: str, later: int, earlier: int) -> None:
    text = (
        f"m.level is a buffer of a module that is split over partitions. Microbatch {later} used it before "
    )
    with pytest.raises(UsageError, match=f"{text}microbatch {earlier} was done with it"):
        run(uses)


def test_a_step_begins_anew() -> None:
    buffer = torch.zeros(2)
    shared = SharedBuffer("m.level", buffer)
    for _ in range(2):
        shared.begin()
        for number in range(3):
            shared.use(number)
            buffer.add_(1)
        shared.end()
    buffer.add_(1)  # between steps anybody may
    shared.begin()
    shared.use(0)
