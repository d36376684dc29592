"""One sentence about a run: of all findings the cause comes first, and what it causes stands under it.

Rules say which others they explain (`Rule.explains`). Where the cause is found, the consequence is no fault of its
own: it is at most a warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.rules.rule import LEAST_GAIN, Finding, Rule, Status
from weft.rules.table import RULES

FAULTS = (Status.WARNING, Status.CRITICAL)
LINE = re.compile(r'`(?:"|weft\.|DataLoader\()')
"""A line that can be written as it stands: a setting or a call. `.item()` and `top` are none."""
Weight = Callable[[Finding], tuple[bool, bool, float]]


@dataclass(frozen=True)
class Verdict:
    """The finding to look at first.

    Attributes:
        text: One sentence.
        status: Of the finding; `PASS` if nothing is wrong, `NOT_ENOUGH_DATA` if no rule could judge.
        finding: The first cause, if there is one.
        under: All other findings: the consequences of the first one, then the rest, each with what it explains.
    """

    text: str
    status: Status
    finding: Finding | None
    under: tuple[Finding, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them, in this order."""
        return self.under if self.finding is None else (self.finding, *self.under)


def verdict(findings: Iterable[Finding], rules: Iterable[Rule] = RULES) -> Verdict:
    """The first cause among findings, and all others under it.

    Causes are ordered by weight: first what is critical and loses the run (`Rule.loses_run`: a lost loss, a full
    memory), then by status, then by gain, where one that is not known counts as none, then as they come. Status comes
    before gain, since more microbatches often promise most also where a partition is at fault. A cause weighs at least
    what the heaviest of its consequences weighs.

    Args:
        findings: As `judge` gives them.
        rules: Those that were asked; they say what explains what.
    """
    asked = list(rules)
    found, weight = list(findings), _weight_by(asked)
    explained = explain(found, asked)
    causes = [each for each in explained if each.status in FAULTS and not each.explained_by]
    causes.sort(
        key=lambda cause: min(
            weight(finding)
            for finding, each in zip(found, explained, strict=True)
            if each is cause or (each.explained_by == cause.rule and finding.status in FAULTS)
        )
    )
    if not causes:
        return _without_cause(explained)
    first = causes[0]
    under: list[Finding] = []
    for cause in causes:
        under += [] if cause is first else [cause]
        under += sorted((each for each in explained if each.explained_by == cause.rule), key=weight)
    under += _quiet(explained)
    gain = f" Mending it is expected to save {100 * first.gain:.0f} % of a step." if first.gain else ""
    gain += _best_line(first, found)
    return Verdict(f"{first.rule}: {first.text}.{gain}", first.status, first, tuple(under))


def _best_line(first: Finding, findings: Iterable[Finding]) -> str:
    """The sentence for a line to write that gains more than mending the first cause; empty if there is none."""
    lines = [
        (each.gain, each.rule, advice)
        for each in findings
        if each.status in FAULTS and each.gain
        for advice in each.advice
        if LINE.search(advice)
    ]
    gain, rule, advice = max(lines, key=lambda line: line[0], default=(0.0, "", ""))
    if rule == first.rule or gain < (first.gain or 0.0) + LEAST_GAIN:
        return ""
    return f" Most is gained by one line of {rule}: {advice} ({100 * gain:.0f} % of a step)."


def explain(findings: Sequence[Finding], rules: Iterable[Rule] = RULES) -> list[Finding]:
    """The same findings, where one is the consequence of another with that one's name, and no more than a warning.

    Of several causes the first one by weight is named; of a chain the begin.
    """
    asked = list(rules)
    explains, weight = {rule.name: rule.explains for rule in asked}, _weight_by(asked)
    faults = {each.rule: each for each in findings if each.status in FAULTS}
    return [
        each
        if (cause := _cause(each.rule, faults, explains, weight)) is None
        or each.status not in (*FAULTS, Status.INFO)
        else replace(
            each,
            explained_by=cause.rule,
            status=Status.WARNING if each.status is Status.CRITICAL else each.status,
        )
        for each in findings
    ]


def _cause(
    rule: str, faults: Mapping[str, Finding], explains: Mapping[str, tuple[str, ...]], weight: Weight
) -> Finding | None:
    """The weightiest of the faults that explain a rule and are explained by none."""
    reached: set[str] = set()
    waiting = [rule]
    while waiting:
        name = waiting.pop()
        found = {each for each in faults if name in explains.get(each, ()) and each != rule} - reached
        reached |= found
        waiting += found
    roots = [
        faults[each]
        for each in faults
        if each in reached and not any(each in explains.get(other, ()) for other in reached if other != each)
    ]
    return min(roots, key=weight, default=None)


def _weight_by(rules: Iterable[Rule]) -> Weight:
    """The key by which findings of these rules are sorted: the smaller, the earlier it is shown."""
    losing = {rule.name for rule in rules if rule.loses_run}

    def weight(finding: Finding) -> tuple[bool, bool, float]:
        critical = finding.status is Status.CRITICAL
        return not (critical and finding.rule in losing), not critical, -(finding.gain or 0.0)

    return weight


def _quiet(findings: Iterable[Finding]) -> list[Finding]:
    """Those that are no faults: what is worth knowing, rules that failed, the rest."""
    order = [Status.ERROR, Status.INFO, Status.PASS, Status.NOT_ENOUGH_DATA, Status.NOT_APPLICABLE]
    rest = [each for each in findings if each.status in order]
    return sorted((each for each in rest if not each.explained_by), key=lambda each: order.index(each.status))


def _without_cause(findings: list[Finding]) -> Verdict:
    """Nothing is wrong, as far as rules could judge."""
    under = tuple(_quiet(findings))
    asked = [each for each in findings if each.status in (Status.PASS, Status.INFO)]
    failed = [each.rule for each in findings if each.status is Status.ERROR]
    more = f" {len(failed)} rules failed: {', '.join(failed)}." if failed else ""
    if not any(each.status is Status.PASS for each in findings):
        return Verdict(f"The run has too little to say.{more}", Status.NOT_ENOUGH_DATA, None, under)
    return Verdict(
        f"Nothing is wrong: {len(asked)} rules found no fault, {len(findings) - len(asked) - len(failed)} had too "
        f"little to say or do not apply.{more}",
        Status.PASS,
        None,
        under,
    )
