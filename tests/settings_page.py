"""The table of settings in `docs/settings.md`, made from `weft.config`.

python -m tests.settings_page        # writes it anew
"""

from __future__ import annotations

from pathlib import Path

from weft.config import PLACEMENTS, describe

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
START, END = "<!-- settings:", "<!-- /settings -->"
_LONG = " | ".join(f'"{word}"' for word in PLACEMENTS)
SHORTER = {_LONG: '"cluster" \\| "spread" \\| an order of D, P and T'}
"""Types that are too long for a column, and what stands there instead."""


def table() -> str:
    """The rows of `describe` as Markdown."""
    lines = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for row in describe():
        kind = SHORTER.get(row.type) or row.type.replace("|", "\\|")
        lines.append(f"| `{row.name}` | {kind} | {row.default} | {row.meaning} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """`page` with the present table between its two comments."""
    head, start, rest = page.partition(START)
    note, _, old = rest.partition("\n")
    _, end, tail = old.partition(END)
    return f"{head}{start}{note}\n{table()}\n{end}{tail}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
