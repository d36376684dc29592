"""A timeline as one page to look around in: a file that needs nothing else, and no network.

The page holds the spans as data, and a script that draws those in view. Everything shown comes through `text`
or as JSON without `<`; the policy at its head names the script and the style by their hashes, so the browser
runs nothing else and loads nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import NamedTuple

from weft.report.embedded import embed, page_data, timeline_data
from weft.report.shapes import text
from weft.report.styles import STYLES, TILE
from weft.timeline import Timeline

SCRIPTS = ("spans.js", "drawing.js", "control.js")
OPEN_RANKS = 8
"""Up to how many ranks the table of figures is open from the start."""


class Entry(NamedTuple):
    """One timeline of a page, and what it is called there."""

    name: str
    timeline: Timeline


def page(title: str, entries: Sequence[Entry]) -> str:
    """The text of an HTML file that shows timelines, one above the other, on one axis from their starts.

    >>> from weft.timeline import Span
    >>> page("a step", [Entry("recorded", Timeline([Span(0, "F", 0, 0.0, 0.002)]))]).startswith("<!DOCTYPE html>")
    True
    """
    style, source = asset("page.css"), script()
    ranks = max((len(entry.timeline.ranks) for entry in entries), default=0)
    parts = {
        "policy": policy(style, source),
        "title": text(title),
        "style": style,
        "script": source,
        "summary": "".join(f"<li>{_summary(entry)}</li>" for entry in entries),
        "label": text("Timeline. " + " ".join(f"{_plain_summary(entry)}." for entry in entries)),
        "legend": legend({span.kind for entry in entries for span in entry.timeline.spans}),
        "open": " open" if ranks <= OPEN_RANKS else "",
        "tables": "".join(map(_table, entries)),
        "buttons": asset("buttons.html"),
        "keys": asset("keys.html"),
        "data": embed(page_data(timeline_data(*entry) for entry in entries)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def asset(name: str) -> str:
    """A file of this room's `static`."""
    return files("weft.report").joinpath("static").joinpath(name).read_text(encoding="utf-8")


def script() -> str:
    """The script that draws timelines: one function, so that no name of it is seen outside."""
    return "".join(['"use strict";\n(() => {\n', *map(asset, SCRIPTS), "})();\n"])


def policy(style: str, script: str = "") -> str:
    """A content security policy: the browser applies and runs these two texts only, and loads nothing."""
    running = f"; script-src {_hash(script)}" if script else ""
    return f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_hash(style)}{running}"


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def _plain_summary(entry: Entry) -> str:
    timeline = entry.timeline
    ranks = f"{len(timeline.ranks)} rank{'s' if len(timeline.ranks) != 1 else ''}"
    return f"{entry.name}: {ranks}, {timeline.duration_s * 1e3:.3f} ms, bubble {timeline.bubble:.1%}"


def _summary(entry: Entry) -> str:
    name, _, rest = _plain_summary(entry).rpartition(": ")
    return f"<b>{text(name)}</b>: {text(rest)}"


def legend(kinds: Iterable[str]) -> str:
    """The legend of the kinds of spans, as items of a list; their patterns are there for the whole page."""
    kinds = set(kinds)
    return "".join(
        f'<li>{_swatch(kind)}<span>{text(style.name)}</span></li>'
        for kind, style in STYLES.items()
        if kind in kinds
    ) + ('<li><svg viewBox="0 0 20 16" aria-hidden="true"><rect class="ground" width="20" height="16"/></svg>'
         "<span>idle</span></li>")  # fmt: skip


def _swatch(kind: str) -> str:
    """A piece of the pattern. What waits is drawn in the colours of the ground, which the theme chooses."""
    style = STYLES[kind]
    ground = ' class="ground"' if kind == "wait" else f' fill="{style.fill}"'
    stroke = ' class="hatch"' if kind == "wait" else f' stroke="{style.stroke}"'
    return (
        f'<svg viewBox="0 0 20 16" aria-hidden="true"><defs><pattern id="weft-{kind}" width="{TILE}" height="{TILE}" '
        f'patternUnits="userSpaceOnUse"><path{stroke} stroke-width="{style.stroke_width:g}" '
        f'd="{style.pattern.path}"/></pattern></defs><rect{ground} width="20" height="16"/>'
        f'<rect fill="url(#weft-{kind})" width="20" height="16"/></svg>'
    )


def _table(entry: Entry) -> str:
    """The figures of each rank, and of all."""
    timeline = entry.timeline
    kinds = [kind for kind in STYLES if any(span.kind == kind for span in timeline.spans)]
    heads = ["rank", "idle", "work ms", *(f"{STYLES[kind].name} ms" for kind in kinds)]
    rows = []
    for rank in timeline.ranks:
        spent = dict.fromkeys(kinds, 0.0)
        for span in timeline.of_rank(rank):
            if span.kind in spent:
                spent[span.kind] += span.duration_s
        milliseconds = [timeline.busy_s(rank), *spent.values()]
        cells = [f"{timeline.idle_share(rank):.1%}", *(f"{seconds * 1e3:.3f}" for seconds in milliseconds)]
        rows.append(_row(f"rank {rank}", cells))
    rows.append(_row("bubble", [f"{timeline.bubble:.1%}"] + [""] * (len(heads) - 2)))
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in heads)
    return (
        f'<div class="scroll"><table><caption>{_summary(entry)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(name: str, cells: Sequence[str]) -> str:
    return f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
