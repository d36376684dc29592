"""Rules about runs that are slow or wrong: each looks for one thing and says what to change.

rules(parameters)   the rules, with thresholds as the user wants them
judge(rules, ...)   a finding of each
verdict(findings)   which one is the cause, and what stands under it
"""

from __future__ import annotations

from weft.rules.configure import add, load_rule, rules
from weft.rules.rule import FOUND, Finding, Rule, Status, judge
from weft.rules.table import RULES
from weft.rules.verdict import Verdict, verdict

__all__ = [
    "FOUND", "RULES", "Finding", "Rule", "Status", "Verdict", "add", "judge", "load_rule", "rules", "verdict",
]  # fmt: skip
