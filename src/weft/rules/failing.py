"""Findings that end a program with an exit code of their own, as ``--fail-on`` names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.errors import UsageError
from weft.rules.configure import nearest
from weft.rules.rule import Finding, Rule, Status
from weft.untrusted import shown_text

LEVELS = {
    "any": (Status.WARNING, Status.CRITICAL),
    "warning": (Status.WARNING, Status.CRITICAL),
    "critical": (Status.CRITICAL,),
}
"""Names that stand for all rules, and from which status on."""


def wanted(names: Iterable[str], rules: Iterable[Rule]) -> list[str]:
    """The names as rules and levels have them; capitals and names of older tools do not matter.

    Raises:
        UsageError: There is no such rule; the message names the nearest one.
    """
    known = {name.lower(): rule.name for rule in rules for name in (rule.name, *rule.aliases)}
    known |= {level: level for level in LEVELS}
    found = []
    for name in names:
        if name.lower() not in known:
            hint = nearest(name, known.values()) or "write warning, critical, or the name of a rule"
            raise UsageError(f'--fail-on "{shown_text(name)}": there is no such rule; {hint}')
        found.append(known[name.lower()])
    return found


def failing(findings: Iterable[Finding], names: Sequence[str]) -> list[Finding]:
    """The findings that `names`, as `wanted` gives them, ask for: of a rule that is named those from a warning on."""
    return [each for each in findings if any(_matches(each, name) for name in names)]


def _matches(finding: Finding, name: str) -> bool:
    return finding.status in LEVELS.get(name, LEVELS["any"]) and name in (finding.rule, *LEVELS)
