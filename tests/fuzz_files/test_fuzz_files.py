"""Some hundred damaged inputs, the same ones each time; and that faults of weft would be found.

`make fuzz-files` runs others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.launching import FOREIGN, SOURCE
from tests.long import one_day_in

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json
from collections import Counter
from tests.fuzz_files import targets
from tests.fuzz_files.run import inputs

def check(drawn, count):
    words = Counter()
    for number in range(count):
        outcome = drawn.run(number)
        assert not outcome.is_fault, f"--number {number}: {outcome}"
        words[outcome.word] += 1
    return words
"""


def run(program: str) -> str:
    """A process of its own: children are forked from it, which no thread of the tests' may disturb."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    environ |= {"PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        capture_output=True,
        text=True,
        env=environ,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_damaged_inputs_are_read_whole_or_refused() -> None:
    words = json.loads(run("with inputs(7) as drawn: print(json.dumps(check(drawn, 200)))"))
    assert sum(words.values()) == 200 and words["right"] >= 3 and words["refused"] >= 100, words


@one_day_in(3)
def test_faults_are_found() -> None:
    """A reader that raises, one that takes for ever, one that takes all memory, and one that loads something else."""
    told = run(
        """
import time
def raises(at, made): return [][1]
def hangs(at, made): time.sleep(60)
def fills(at, made): return len(bytearray(1 << 40))
def alters(at, made):
    next(iter(made.saved.values())).add_(1)
    return targets.resumed(made, at, True, True)
import tests.fuzz_files.run as run
run.SECONDS = 2.0
with inputs(0) as drawn:
    for use in (raises, hangs, fills, alters):
        run.TARGETS = (targets.Target("own", ("newest",), use),)
        print(drawn.run(3).word)
"""
    )
    assert told.split() == ["traceback", "hang", "memory", "fault"]
