"""What findings promise, against what doing what they say gives, on a machine that does nothing else.

python -m tests.planted.gains
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.planted.jobs import COARSE, MANY, Planted
from weft.analysis.analysis import Analysis
from weft.profiler.reading import read_run


@dataclass(frozen=True)
class Mended:
    """A job with a fault, and the same one after doing what the finding says.

    Attributes:
        change: The change of `weft.analysis.whatif` that is promised.
    """

    before: Planted
    after: Planted
    change: str


CASES = {
    "a slow module on the last of 2: one block moved": Mended(
        Planted((), ("--fault", "heavy_last", *COARSE)), Planted((), ("--fault", "heavy_last", "--cut", "5", *COARSE)),
        "split",
    ),
    "a loader that sleeps: it does not": Mended(
        Planted((), ("--fault", "late_data", *COARSE)), Planted((), COARSE), "no data wait"
    ),
    "2 microbatches on 2 ranks: 16, as it says": Mended(
        Planted((), ("--microbatches", "2", "--block-s", "0.064")),
        Planted((), ("--microbatches", "16", "--block-s", "0.064")), "microbatches",
    ),
    "another process on a rank's core: ended": Mended(
        Planted((), ("--fault", "straggler", "--spin", "--core", "1", *MANY), hog_core=1),
        Planted((), ("--spin", "--core", "1", *MANY)), "straggler",
    ),
    "collector pauses: none": Mended(
        Planted((), ("--fault", "collector", *COARSE)), Planted((), COARSE), "no collector"
    ),
}  # fmt: skip


def analysed(planted: Planted) -> Analysis:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        planted.run(Path(folder) / "out")
        return Analysis(read_run(Path(folder) / "out"))


def main() -> None:
    print("| mended | promised | measured | replay off by |\n| --- | ---: | ---: | ---: |")
    for name, case in CASES.items():
        before, after = analysed(case.before), analysed(case.after)
        promised = before.what_if.gain(case.change)
        measured = 1 - after.step_s / before.step_s
        told = "not shown" if promised is None else f"{promised:.1%}"
        lines = [change.line for change in before.what_if.changes if change.name == case.change]
        print(
            f"| {name} | {told} {' '.join(lines)} | {measured:.1%} | {before.what_if.fidelity:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
