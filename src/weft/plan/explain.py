"""Why a choice was made, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from weft.plan.search import Found
from weft.units import format_bytes

BEST = 5
"""How many choices an explanation shows."""

WIDTH = 110
"""Of an explanation, in characters."""


def explain(found: Sequence[Found]) -> str:
    """The best choices with what they take, and why the others fell out, as text."""
    good = [one for one in found if not one.fault]
    rows = [("schedule", "step ms", "bubble", "peak of a rank")]
    rows += [
        (str(one.option), f"{one.step_s * 1e3:.3f}", f"{one.bubble:.1%}", format_bytes(max(one.peak_bytes)))
        for one in good[:BEST]
    ]
    lines = []
    if good:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
    else:
        lines.append("no choice is possible")
    if good[BEST:]:
        lines += _wrap("slower: ", good[BEST:])
    reasons: dict[str, list[Found]] = {}
    for one in found:
        if one.fault:
            reasons.setdefault(one.fault, []).append(one)
    if reasons:
        lines.append("fell out:")
    for fault, group in reasons.items():
        lines += _wrap(f"  {fault}: ", group)
    return "\n".join(lines)


def _wrap(what: str, group: Sequence[Found]) -> list[str]:
    text = what + "; ".join(str(one.option) for one in group)
    return textwrap.wrap(
        text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
