"""Rules, and their findings.

A rule of one's own is a class of ten lines:

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class ManySteps(Rule):
...     "The run has more steps than anybody needs."
...
...     most: int = 1000
...
...     def evaluate(self, analysis):
...         steps = len(analysis.timeline.steps)
...         if steps <= self.most:
...             return self.passed()
...         return self.warning(f"{steps} steps ran", evidence={"steps": steps}, advice=["stop earlier"])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, TypedDict

from weft.analysis.analysis import Analysis

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Status(Enum):
    """The outcome of a rule, the worst last."""

    NOT_APPLICABLE = "not applicable"
    NOT_ENOUGH_DATA = "not enough data"
    PASS = "pass"
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"
    ERROR = "error"


LEAST_GAIN = 0.01
"""The share of a step that a fault costs at least."""
FOUND = (Status.INFO, Status.WARNING, Status.CRITICAL)


@dataclass(frozen=True)
class Finding:
    """The finding of a rule about a run.

    Attributes:
        rule: The rule's name.
        text: One sentence: what is the matter, with its measure.
        evidence: The figures behind it, by what they are, each with its unit in the text.
        advice: What to do, a sentence each; a line to write stands in backticks.
        gain: The share of a step that doing so is expected to save, from 0 to 1; nothing if that is not known.
        ranks: Those that it is about.
        steps: Those on which it shows best.
        explained_by: The rule whose finding is the cause of this one.
    """

    rule: str
    status: Status
    text: str = ""
    evidence: Mapping[str, object] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    gain: float | None = None
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    explained_by: str = ""


class Said(TypedDict, total=False):
    """The arguments of a finding besides its sentence: fields of `Finding`."""

    evidence: Mapping[str, object]
    advice: Iterable[str]
    gain: float | None
    ranks: Iterable[int]
    steps: Iterable[int]


@dataclass(frozen=True)
class Rule(ABC):
    """One question to a run. Its fields are its parameters, each with a default."""

    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names, of older tools."""
    explains: ClassVar[tuple[str, ...]] = ()
    """Rules whose findings are consequences where this one finds something."""
    loses_run: ClassVar[bool] = False
    """What it finds costs not time but the run, or the recording: where it is critical it comes before all prices."""
    least_steps: ClassVar[int] = 5
    """With fewer usual steps the rule abstains."""

    @abstractmethod
    def evaluate(self, analysis: Analysis) -> Finding:
        """The finding about the run."""

    @property
    def name(self) -> str:
        """The class's."""
        return type(self).__name__

    @property
    def question(self) -> str:
        """The first sentence of its docstring."""
        return (type(self).__doc__ or "").strip().split("\n")[0]

    @property
    def parameters(self) -> dict[str, object]:
        """Names and values of its parameters."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def passed(self, text: str = "", **evidence: object) -> Finding:
        """Nothing is wrong."""
        return Finding(self.name, Status.PASS, text, evidence)

    def abstain(self, text: str) -> Finding:
        """The run has too little to say."""
        return Finding(self.name, Status.NOT_ENOUGH_DATA, text)

    def not_applicable(self, text: str) -> Finding:
        """The run is of another kind."""
        return Finding(self.name, Status.NOT_APPLICABLE, text)

    def info(self, text: str, **more: Unpack[Said]) -> Finding:
        """Worth knowing."""
        return self._found(Status.INFO, text, more)

    def warning(self, text: str, **more: Unpack[Said]) -> Finding:
        """It costs time."""
        return self._found(Status.WARNING, text, more)

    def critical(self, text: str, **more: Unpack[Said]) -> Finding:
        """It costs much time, or the run is lost."""
        return self._found(Status.CRITICAL, text, more)

    def graded(self, text: str, *measures: tuple[float, float, float], **more: Unpack[Said]) -> Finding:
        """Critical if a measure is above its second limit, else a warning if one is above its first, else passed.

        What is known to cost less than `LEAST_GAIN` of a step is worth knowing, and no more.

        Args:
            text: What was measured.
            measures: Each with the limit of a warning and the one from which it is critical.
            more: What is said besides.
        """
        if not any(value > warn for value, warn, _ in measures):
            return self.passed(text, **more.get("evidence", {}))
        gain = more.get("gain")
        if gain is not None and gain < LEAST_GAIN:
            return self._found(Status.INFO, text, {**more, "gain": max(0.0, gain)})
        severe = any(value > critical for value, _, critical in measures)
        return self._found(Status.CRITICAL if severe else Status.WARNING, text, more)

    def _found(self, status: Status, text: str, more: Said) -> Finding:
        return Finding(
            self.name, status, text, more.get("evidence", {}), tuple(more.get("advice", ())), more.get("gain"),
            tuple(more.get("ranks", ())), tuple(more.get("steps", ())),
        )  # fmt: skip


def judge(rules: Iterable[Rule], analysis: Analysis) -> list[Finding]:
    """The findings of the rules, one each; a rule that raises has the status `ERROR`."""
    found = []
    for rule in rules:
        if len(analysis.usual_steps) < rule.least_steps:
            found.append(
                rule.abstain(f"{len(analysis.usual_steps)} usual steps, it needs {rule.least_steps}")
            )
            continue
        try:
            found.append(rule.evaluate(analysis))
        except Exception as error:
            found.append(Finding(rule.name, Status.ERROR, f"{type(error).__name__}: {error}"))
    return found
