"""The figures of one usual step as tables: where its time went, who waited, what another split would give."""

from __future__ import annotations

import statistics
from collections import defaultdict

from weft.analysis.series import median, quantile
from weft.report.run.labels import MOST_RANKS, PARTS, Table, milliseconds, number, of_ranks, percent
from weft.report.run.report import Report

LEAST_GAIN = 0.005
"""A gain that is shown, as a share of a step."""


def parts(report: Report) -> Table:
    """Each rank's usual step by parts, in milliseconds and shares; the parts add up to the step."""
    typical = report.analysis.typical
    used = [name for name in PARTS if any(getattr(each, name) > 0.0 for each in typical.values())]
    rows = []
    for rank, each in list(typical.items())[:MOST_RANKS]:
        cells = [
            f"{milliseconds(getattr(each, name))} ({_share(getattr(each, name), each.total)})"
            if getattr(each, name)
            else ""
            for name in used
        ]
        rows.append((f"rank {rank}", milliseconds(each.total), *cells))
    headers = ("rank", "step ms", *(PARTS[name].name for name in used))
    return Table(
        of_ranks("Each rank's usual step, ms and share", len(typical)),
        headers,
        rows,
        "<".ljust(len(headers), ">"),
    )


def _share(part: float, whole: float) -> str:
    return percent(part / whole) if whole else "0%"


def what_if(report: Report) -> Table:
    """The gains of changes, where the replay can be trusted; the largest gain first."""
    known = [
        (change.gain, change)
        for change in report.analysis.what_if.changes
        if (change.gain or 0.0) >= LEAST_GAIN
    ]
    rows = [
        (change.text, milliseconds(change.step_s), percent(gain), f"`{change.line}`" if change.line else "")
        for gain, change in sorted(known, key=lambda each: -(each[0] or 0.0))
        if gain is not None
    ]
    return Table("What would be gained", ("if", "step ms", "gain", "the line to write"), rows, "<>><")


def balance(report: Report) -> Table:
    """The units and work of each partition, now and with the suggested split."""
    suggestion = report.analysis.suggestion
    units = next((facts.units for facts in report.analysis.run.facts.values() if facts.units), ())
    work = report.analysis.partition_work
    mean_s = statistics.fmean(work.values()) if work else 0.0
    rows = []
    for partition, now_s in work.items():
        own = [unit for unit in units if unit.partition == partition]
        names = [own[0].name] if len(own) == 1 else [own[0].name, own[-1].name] if own else []
        rows.append(
            (f"partition {partition}", " to ".join(names), str(len(own) or ""), milliseconds(now_s),
             f"{now_s / mean_s - 1:+.1%}" if mean_s else "",
             milliseconds(suggestion.after_s[partition]) if suggestion is not None else "")
        )  # fmt: skip
    headers = ("partition", "units", "how many", "work ms", "against the mean", "suggested ms")
    return Table("Work of each partition in a step", headers, rows if len(rows) > 1 else [], "<<>>>>")


def moves(report: Report) -> Table:
    """The suggested split: which unit goes where, as all lines to write."""
    suggestion = report.analysis.suggestion
    if suggestion is None or not suggestion.moves:
        return Table("", (), [])
    rows = [(move.unit, str(move.source), str(move.target), f"`{move.line}`") for move in suggestion.marks]
    caption = 'Suggested split, with "auto_partition": False and all of these lines'
    if suggestion.gain is not None:
        step_ms, less = milliseconds(suggestion.step_s), percent(suggestion.gain)
        caption += f": a step would take {step_ms} ms, {less} less"
    return Table(caption, ("unit", "from partition", "to", "the line to write"), rows, "<>><")


def waits(report: Report) -> Table:
    """Who waited for whom in a usual step, in milliseconds."""
    found = report.analysis.waits
    ranks = sorted({rank for pair in found for rank in pair})[:MOST_RANKS]
    most = max(found.values(), default=0.0)
    rows, strong = [], {}
    for row, waiting in enumerate(ranks):
        for column, peer in enumerate(ranks, 1):
            if most and found.get((waiting, peer)):
                strong[row, column] = found[waiting, peer] / most
        rows.append(
            (f"rank {waiting}", *(milliseconds(found.get((waiting, peer), 0.0)) if found.get((waiting, peer)) else ""
                                  for peer in ranks))
        )  # fmt: skip
    headers = ("waited", *(f"for {peer}" for peer in ranks))
    return Table(
        of_ranks("Waiting in a usual step, ms", len(ranks)),
        headers,
        rows,
        "<".ljust(len(headers), ">"),
        strong,
    )


def links(report: Report) -> Table:
    """Messages between ranks in a usual step. How large they are is not recorded."""
    usual = report.analysis.usual_steps
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for message in report.analysis.messages:
        if message.step in usual:
            found[message.sender, message.receiver].append(message.arrived_s - message.ready_s)
    rows = [
        (f"{sender} to {receiver}", number(len(times) / len(usual), 2), milliseconds(median(times)),
         milliseconds(quantile(times, 0.95)), milliseconds(sum(times) / len(usual)))
        for (sender, receiver), times in sorted(found.items())[: 4 * MOST_RANKS]
    ]  # fmt: skip
    headers = ("from rank", "messages a step", "median ms", "95% below ms", "sum a step ms")
    return Table("Messages in a usual step", headers, rows, "<>>>>")
