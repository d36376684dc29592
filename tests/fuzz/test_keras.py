"""Drawn programs for Keras, the same ones each time, of which `make test` runs some; beside plain Keras.

`python -m tests.fuzz --keras` runs others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import assume

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from tests.fuzz.keras.grammar import Block, Program, programs  # noqa: E402
from tests.fuzz.keras.source import written  # noqa: E402
from tests.fuzz.run import KERAS, ranks  # noqa: E402
from tests.fuzz.search import BATCH, search  # noqa: E402
from tests.long import drawn, long  # noqa: E402

SEEDS = range(12)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", [drawn(12, SEEDS), pytest.param(SEEDS, marks=long)], ids=len)
def test_programs_give_what_plain_keras_gives(seeds: Sequence[int]) -> None:
    """Equal, or refused by an error of weft's own."""
    words: Counter[str] = Counter()
    with ranks(beside=KERAS) as job:

        def check(program: Program) -> None:
            source = written(program)
            outcome = job.run(source, program.ranks)
            words[outcome.word] += 1
            assume(outcome.word != "invalid")
            assert not outcome.is_fault, f"{outcome.word}: {outcome.text}\n\n{source}"

        for number in seeds:
            search(number, programs, check)
    assert words["equal"] + words["refused"] >= len(seeds) * BATCH, words
    assert words["refused"] < len(seeds) * BATCH / 2, words


@long
def test_a_fault_would_be_found() -> None:
    """Gradients of one rank that are a little too large."""
    program = Program((Block(0, (0, 0, 0, 0)),))
    with ranks("tests.fuzz.broken:gradient_of_one_variable", beside=KERAS) as job:
        outcome = job.run(written(program), program.ranks)
    assert outcome.word == "differs", outcome
