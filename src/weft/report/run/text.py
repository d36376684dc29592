"""A run as plain text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill, indent

from weft.report.run import comparison_tables, run_tables, step_tables
from weft.report.run.labels import Table, number, percent, sentence
from weft.report.run.report import Report
from weft.report.text import table
from weft.rules.rule import Finding, Status
from weft.terminal_text import visible

WIDTH = 110


def run_text(report: Report) -> str:
    """The verdict, the findings with what to do, where the time went, how far the figures can be trusted."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    verdict, run = report.verdict, report.analysis.run
    yield visible(run.name)
    yield _wrapped(f"{verdict.status.value.upper()}: {verdict.text}")
    if not run.complete:
        yield "the run has not come to its end"
    for warning in run.warnings:
        yield _wrapped(f"warning: {warning}")
    for finding in report.found:
        yield ""
        yield from _finding(finding)
    for text in (each.text for each in (report.comparison, report.scaling, report.plan) if each is not None):
        yield ""
        yield _wrapped(text)
    for each in _tables(report):
        if each.rows:
            yield ""
            yield visible(each.caption)
            yield table(each.headers, each.rows, each.align)
    yield ""
    yield _rest(report)


def _tables(report: Report) -> list[Table]:
    parts, whole = step_tables.parts(report), run_tables.run_times(report)
    return [
        whole.turned() if len(whole.rows) < len(whole.headers) else whole,
        *(comparison_tables.compared(report.comparison) if report.comparison is not None else []),
        *(comparison_tables.scaled(report.scaling) if report.scaling is not None else []),
        *(comparison_tables.planned(report.plan) if report.plan is not None else []),
        parts.turned() if len(parts.rows) < len(parts.headers) else parts,
        step_tables.what_if(report),
        step_tables.balance(report),
        step_tables.moves(report),
        step_tables.waits(report),
        run_tables.steps(report),
        run_tables.memory(report),
        *run_tables.system(report),
        run_tables.values(report),
        run_tables.quality(report),
        run_tables.facts(report),
    ]


def _finding(finding: Finding) -> Iterator[str]:
    cause = f" (a consequence of {finding.explained_by})" if finding.explained_by else ""
    saves = f" Expected to save {percent(finding.gain)} of a step." if finding.gain else ""
    yield _wrapped(f"{finding.status.value.upper()} {finding.rule}{cause}: {sentence(finding.text)}{saves}")
    for line in finding.advice:
        yield indent(_wrapped(f"-> {line}"), "   ")
    if finding.evidence:
        figures = "; ".join(
            f"{name}: {number(value) if isinstance(value, (int, float)) else value}"
            for name, value in finding.evidence.items()
        )
        yield indent(_wrapped(figures), "   ")
    if finding.ranks or finding.steps:
        places = [
            f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:16]))}"
            for what, numbers in (("rank", finding.ranks), ("step", finding.steps))
            if numbers
        ]
        yield indent(f"on {'; '.join(places)}", "   ")


def _rest(report: Report) -> str:
    """One line for the rules that found nothing, with what those say that failed."""
    passed = sum(each.status is Status.PASS for each in report.others)
    abstained = [each.rule for each in report.others if each.status is not Status.PASS]
    text = f"{passed} other rule{'' if passed == 1 else 's'} found nothing."
    return _wrapped(
        text + (f" Not applicable, or too little data: {', '.join(abstained)}." if abstained else "")
    )


def _wrapped(text: str) -> str:
    return fill(visible(text), WIDTH, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False)
