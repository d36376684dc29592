"""The table of rules in `docs/rules.md`, made from `weft.rules`.

python -m tests.rules_page        # writes it anew
"""

from __future__ import annotations

import inspect
from pathlib import Path

from weft.rules import RULES, Rule

PAGE = Path(__file__).parents[1] / "docs" / "rules.md"
START, END = "<!-- rules:", "<!-- /rules -->"
GROUPS = {
    "Models that are split": ("pipeline",),
    "Ranks that do the same": ("replicas",),
    "The way of the data": ("data",),
    "Processors, GPUs and memory": ("machine", "memory"),
    "The run itself": ("training", "learning"),
}
"""The titles of the page, each with the files of `weft.rules` that have its rules."""
HEAD = "| rule | question and measure | parameters |"


def table() -> str:
    """A table for each group: what a rule asks, how it measures that, its parameters."""
    lines: list[str] = []
    for title, files in GROUPS.items():
        lines += [f"### {title}", "", HEAD, "| --- | --- | --- |"]
        lines += [row(rule) for rule in RULES if type(rule).__module__.split(".")[-1] in files]
        lines.append("")
    return "\n".join(lines).rstrip()


def row(rule: Rule) -> str:
    """One rule."""
    text = " ".join(inspect.cleandoc(type(rule).__doc__ or "").split())
    parameters = ", ".join(f"`{name}` {value:g}" for name, value in rule.parameters.items())  # type: ignore[str-format]
    names = f"`{rule.name}`" + "".join(f" (`{alias}`)" for alias in rule.aliases)
    return f"| {names} | {text} | {parameters} |".replace("|  |", "| |")


def filled(page: str) -> str:
    """`page` with the present tables between its two comments."""
    head, start, rest = page.partition(START)
    note, _, old = rest.partition("\n")
    _, end, tail = old.partition(END)
    return f"{head}{start}{note}\n\n{table()}\n\n{end}{tail}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
