"""Draws programs and hands them to a check; one that fails it is made smaller."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

Program = TypeVar("Program")

BATCH = 10
"""Programs of one seed. Of more, hypothesis would make most from earlier ones, which meet less than new ones."""


def search(
    number: int, programs: SearchStrategy[Program], check: Callable[[Program], None], shrink: bool = True
) -> None:
    """Calls `check` with those of the programs that a seed gives, always the same ones.

    What the check raises comes out of here, for the smallest program that was found. `hypothesis.assume` inside of it
    asks for another program.
    """
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]

    @seed(number)
    @settings(
        max_examples=BATCH, database=None, deadline=None, report_multiple_bugs=False, print_blob=False, phases=phases,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs)
    def run(program: Program) -> None:
        check(program)

    run()
