"""200 drawn programs, the same ones each time; and that faults of weft would be found.

`make fuzz` runs others.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, find, given, settings

from tests.fuzz.grammar import Block, Program, habits, programs
from tests.fuzz.run import ranks
from tests.fuzz.source import written

PROGRAMS = 200
FIXED = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
)


def test_programs_give_what_one_process_gives() -> None:
    """Equal, or refused by an error of weft's own; and every habit is in programs that are equal."""
    seen: Counter[str] = Counter()
    words: Counter[str] = Counter()
    with ranks() as job:

        @settings(FIXED, max_examples=PROGRAMS)
        @given(programs)
        def run(program: Program) -> None:
            source, used = written(program)
            outcome = job.run(source, program.ranks)
            words[outcome.word] += 1
            assume(outcome.word != "invalid")
            assert not outcome.is_fault, f"{outcome.word}: {outcome.text}\n\n{source}"
            if outcome.word == "equal":
                seen.update(used)

        run()
    assert words["equal"] + words["refused"] >= PROGRAMS and words["refused"] < PROGRAMS / 5, words
    assert set(seen) == habits(), (
        f"never: {sorted(habits() - set(seen))}, unknown: {sorted(set(seen) - habits())}"
    )


@pytest.mark.parametrize("fault", ["gradient_of_one_unit", "attributes_stay"])
def test_a_fault_is_found_and_made_small(fault: str) -> None:
    with ranks(f"tests.fuzz.broken:{fault}") as job:

        def differs(program: Program) -> bool:
            return job.run(written(program)[0], program.ranks).word == "differs"

        smallest = find(programs, differs, settings=settings(FIXED, max_examples=500))
    (model,) = smallest.models
    assert sum(len(block.children) for block in (model, *inside(model))) <= 3, smallest
    assert len(model.body) <= 4, smallest
    assert (smallest.steps, smallest.ranks, smallest.ending) == (2, 2, "backward")


def inside(block: Block) -> list[Block]:
    return [child for child in block.children if isinstance(child, Block)]
