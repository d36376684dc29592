"""Drawn models whose layers, sequences or parameters ranks share, the same ones each time, beside one process.

`python -m tests.fuzz --layouts` runs others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume

from tests.fuzz.layouts.beside import IN_PARTS
from tests.fuzz.layouts.grammar import LAYOUTS, Program, programs
from tests.fuzz.layouts.source import written
from tests.fuzz.run import LAYOUTS as BESIDE
from tests.fuzz.run import ranks
from tests.fuzz.search import BATCH, search
from tests.long import one_in


@pytest.mark.parametrize("layout", one_in(16, range(len(LAYOUTS))))
def test_models_train_as_in_one_process(layout: int) -> None:
    words: Counter[str] = Counter()
    with ranks(beside=BESIDE) as job:

        def check(program: Program) -> None:
            source = written(program)
            outcome = job.run(source, program.ranks)
            words[outcome.text if outcome.word == "equal" else outcome.word] += 1
            assume(outcome.word != "invalid")
            assert not outcome.is_fault, f"{outcome.word}: {outcome.text}\n\n{source}"

        for seed in range(2):
            search(seed, programs.map(lambda program: replace(program, layout=layout)), check)
    assert words[IN_PARTS] >= BATCH / 2, words
