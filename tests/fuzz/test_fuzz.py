"""200 drawn programs, the same ones each time, of which `make test` runs some; and that faults of weft would be found.

`make fuzz` runs others.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import assume

from tests.fuzz.grammar import Block, Program, habits, programs
from tests.fuzz.run import ranks
from tests.fuzz.search import BATCH, search
from tests.fuzz.source import written
from tests.long import drawn, long

SEEDS = range(20)


@pytest.mark.parametrize("seeds", [drawn(20, SEEDS), pytest.param(SEEDS, marks=long)], ids=len)
def test_programs_give_what_one_process_gives(seeds: Sequence[int]) -> None:
    """Equal, or refused by an error of weft's own; and every habit is in some of them."""
    seen: Counter[str] = Counter()
    words: Counter[str] = Counter()
    with ranks() as job:

        def check(program: Program) -> None:
            source, used = written(program)
            outcome = job.run(source, program.ranks)
            words[outcome.word] += 1
            assume(outcome.word != "invalid")
            assert not outcome.is_fault, f"{outcome.word}: {outcome.text}\n\n{source}"
            seen.update(used)  # which of them are refused depends on where automatic splits cut

        for number in seeds:
            search(number, programs, check)
    assert words["equal"] + words["refused"] == len(seeds) * BATCH, words
    assert seeds != SEEDS or words["refused"] < len(seeds) * BATCH / 3, words
    assert set(seen) <= habits() and (seeds != SEEDS or set(seen) == habits()), (
        f"never: {sorted(habits() - set(seen))}, unknown: {sorted(set(seen) - habits())}"
    )


@long
def test_a_fault_is_found_and_made_small() -> None:
    found: list[Program] = []
    with ranks("tests.fuzz.broken:gradient_of_one_unit") as job:

        def check(program: Program) -> None:
            if job.run(written(program)[0], program.ranks).word == "differs":
                found.append(program)
                raise AssertionError

        for number in SEEDS:
            with contextlib.suppress(AssertionError):
                search(number, programs, check)
            if found:
                break
    smallest = found[-1]
    (model,) = smallest.models
    assert sum(len(block.children) for block in (model, *inside(model))) <= 3, smallest
    assert sum(do.kind != "nothing" for block in (model, *inside(model)) for do in block.body) <= 4, smallest
    assert (smallest.steps, smallest.ranks, smallest.ending) == (2, 2, "backward")


def inside(block: Block) -> list[Block]:
    return [child for child in block.children if isinstance(child, Block)]
