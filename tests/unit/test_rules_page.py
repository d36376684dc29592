"""`docs/rules.md` shows the rules that there are."""

import re

from tests.rules_page import PAGE, filled, table
from weft.rules import RULES


def test_the_page_has_the_present_tables():
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page), "run `python -m tests.rules_page`"


def test_every_rule_has_a_row_with_three_cells():
    rows = [line for line in table().splitlines() if line.startswith("| `")]
    assert sorted(re.match(r"\| `(\w+)`", row)[1] for row in rows) == sorted(rule.name for rule in RULES)
    assert {len(row.split("|")) for row in rows} == {5}
