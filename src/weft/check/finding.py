"""Findings of a check, and their form as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum

from weft.terminal_text import visible
from weft.untrusted import cut

LONGEST = 240
"""Characters of a line to write that are shown."""


class Grade(Enum):
    """The grade of a finding, the worst first."""

    WRONG = "wrong"
    SLOW = "slow"
    HINT = "hint"


@dataclass(frozen=True)
class Finding:
    """One thing that will hurt.

    Attributes:
        rule: The name of what was looked for.
        grade: Wrong: the job fails, or learns something else. Slow: it takes longer. Hint: it depends on what the
            script does not say.
        line: Where in the script, from 1.
        reason: Why, in a sentence.
        write: What to write there instead; often one line.
    """

    rule: str
    grade: Grade
    line: int
    reason: str
    write: str


def as_text(file: str, findings: Iterable[Finding]) -> str:
    """Two lines for each finding, and one that counts them."""
    found = list(findings)
    lines = []
    for each in found:
        lines.append(f"{file}:{each.line}: {each.grade.value}: {each.reason} ({each.rule})")
        lines.append("    write: " + cut(each.write, LONGEST).replace("\n", "\n           "))
    counts = {grade: sum(each.grade is grade for each in found) for grade in Grade}
    counted = ", ".join(f"{count} {_counted(grade, count)}" for grade, count in counts.items() if count)
    return visible("\n".join([*lines, f"{file}: {counted or 'nothing found'}"]), keep="\n")


def as_json(file: str, findings: Iterable[Finding]) -> dict[str, object]:
    """The file, and its findings with all their attributes."""
    return {
        "weft": "check",
        "version": 1,
        "file": file,
        "findings": [{**asdict(each), "grade": each.grade.value} for each in findings],
    }


def _counted(grade: Grade, count: int) -> str:
    return "hints" if grade is Grade.HINT and count > 1 else grade.value
