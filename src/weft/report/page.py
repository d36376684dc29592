"""A timeline as one page to look around in: a file that needs nothing else, and no network.

The page holds the spans as data, and a script that draws those in view. Everything shown comes through `text`
or as JSON without `<`; the policy at its head names the script and the style by their hashes, so the browser
runs nothing else and loads nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from weft.report.styles import STYLES, TILE
from weft.report.svg import text
from weft.timeline import Span, Timeline

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
    style, script = _asset("page.css"), _script()
    ranks = max((len(entry.timeline.ranks) for entry in entries), default=0)
    parts = {
        "policy": f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src {_hash(style)}; script-src {_hash(script)}",
        "title": text(title),
        "style": style,
        "script": script,
        "summary": "".join(f"<li>{_summary(entry)}</li>" for entry in entries),
        "label": text("Timeline. " + " ".join(f"{_plain_summary(entry)}." for entry in entries)),
        "legend": _legend({span.kind for entry in entries for span in entry.timeline.spans}),
        "open": " open" if ranks <= OPEN_RANKS else "",
        "tables": "".join(map(_table, entries)),
        "data": embed(_data(entries)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("weft.report").joinpath("static").joinpath(name).read_text(encoding="utf-8")


def _script() -> str:
    """One function, so that no name of it is seen outside."""
    return "".join(['"use strict";\n(() => {\n', *map(_asset, SCRIPTS), "})();\n"])


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def embed(value: Any) -> str:
    """JSON for a script element: no text in it can end the element or begin another one."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _plain_summary(entry: Entry) -> str:
    timeline = entry.timeline
    ranks = f"{len(timeline.ranks)} rank{'s' if len(timeline.ranks) != 1 else ''}"
    return f"{entry.name}: {ranks}, {timeline.duration_s * 1e3:.3f} ms, bubble {timeline.bubble:.1%}"


def _summary(entry: Entry) -> str:
    name, _, rest = _plain_summary(entry).rpartition(": ")
    return f"<b>{text(name)}</b>: {text(rest)}"


def _legend(kinds: set[str]) -> str:
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


def _data(entries: Sequence[Entry]) -> dict[str, Any]:
    kinds = [*STYLES, "step"]
    return {
        "kinds": [
            {
                "kind": kind,
                "name": style.name,
                "fill": style.fill,
                "ink": style.ink,
                "stroke": style.stroke,
                "width": style.stroke_width,
                "path": style.pattern.path,
            }
            for kind, style in STYLES.items()
        ],
        "tile": TILE,
        "timelines": [
            {
                "name": entry.name,
                "length": _nanoseconds(entry.timeline.duration_s),
                "ranks": [
                    {"rank": rank, "spans": _columns(entry.timeline, entry.timeline.of_rank(rank), kinds)}
                    for rank in entry.timeline.ranks
                ],
            }
            for entry in entries
        ],
    }


def _columns(timeline: Timeline, spans: Sequence[Span], kinds: list[str]) -> dict[str, list[Any]]:
    """Column by column, which is shorter than span by span. Times in nanoseconds from the timeline's start."""
    labels = {label: number for number, label in enumerate(dict.fromkeys(span.label for span in spans))}
    return {
        "kind": [kinds.index(span.kind) for span in spans],
        "start": [_nanoseconds(span.start_s - timeline.start_s) for span in spans],
        "end": [_nanoseconds(span.end_s - timeline.start_s) for span in spans],
        "microbatch": [span.microbatch for span in spans],
        "stage": [span.stage for span in spans],
        "step": [span.step for span in spans],
        "label": [labels[span.label] for span in spans],
        "labels": list(labels),
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
