"""`docs/settings.md` shows the settings that there are."""

import re

from tests.settings_page import PAGE, filled, table
from weft.config import ALIASES, describe


def test_the_page_has_the_present_table():
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page), "run `python -m tests.settings_page`"


def test_every_setting_has_a_row_with_four_cells():
    rows = table().splitlines()[2:]
    assert [re.match(r"\| `(\w+)`", row)[1] for row in rows] == [row.name for row in describe()]
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {6}


def test_the_page_tells_of_aliases_and_explains_what_the_table_cannot():
    text = PAGE.read_text(encoding="utf-8").partition("<!-- /settings -->")[2]
    for alias, name in ALIASES.items():
        assert f"`{alias}` is another name for `{name}`" in text
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    explained = [word for heading in headings for word in re.findall(r"\w+", heading)]
    assert {"partitions", "microbatches", "pipeline", "heartbeat_timeout", "wait_timeout"} <= {*explained}
    assert {*explained} <= {row.name for row in describe()}
