"""Why a choice was made, as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from weft.graph.model import Graph
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


def nothing_fits(
    found: Sequence[Found], graph: Graph, memory_bytes: Sequence[int] | None, copies: int
) -> str | None:
    """Why nothing fits the memory, and the nearest choice, in one sentence; None if memory is not the reason."""
    near = [(_lack(one, memory_bytes), one) for one in found if one.fault and one.peak_bytes]
    if memory_bytes is None or not near:
        return None
    lack, one = min(near, key=lambda pair: pair[0])
    alone = copies * sum(unit.parameter_bytes for unit in graph)
    fits = sum(memory_bytes)
    ranks = len(memory_bytes)
    sentence = (
        f"nothing fits: parameters, gradients and optimizer states alone take {format_bytes(alone / ranks)} a rank, of "
        f"{format_bytes(fits / ranks)}; the nearest, {one.option}, lacks {format_bytes(lack)} on one rank"
    )
    if alone >= fits:
        return f"{sentence}: give at least {math.ceil(ranks * alone / fits) + 1} partitions, or more memory"
    return f"{sentence}: give more partitions, more memory, or smaller microbatches"


def _lack(one: Found, memory_bytes: Sequence[int] | None) -> float:
    """The bytes that the rank lacks that lacks most."""
    return max(needed - limit for needed, limit in zip(one.peak_bytes, memory_bytes or (), strict=False))


def _wrap(what: str, group: Sequence[Found]) -> list[str]:
    text = what + "; ".join(str(one.option) for one in group)
    return textwrap.wrap(
        text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
