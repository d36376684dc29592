"""A plan as one page: a file that needs nothing else, no network and no script.

Pictures are inline SVG in per cent of their width, so that letters keep their size on a narrow screen. The policy at
the page's head allows one style, by its hash, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.plan.parallelism.search import Found, Plan
from weft.report.page import asset, policy
from weft.report.plan.pictures import LOOKS, memory_bars, memory_rows, memory_table, scatter
from weft.report.plan.pipeline import Pipeline
from weft.report.run.labels import Table
from weft.report.styles import TILE
from weft.report.templates import environment
from weft.units import format_bytes


@dataclass(frozen=True)
class ToWrite:
    """The lines that start a plan.

    Attributes:
        head: What of it weft runs.
        command: For a shell.
        settings: Of `weft.init`.
        batch: What a replica takes in a step.
    """

    head: str
    command: str
    settings: dict[str, object]
    batch: str


@dataclass(frozen=True)
class PlanReport:
    """A question with its answer.

    Attributes:
        question: What is trained, where; several lines.
        answer: The recommendation in a sentence, or why there is none.
        found: The divisions.
        limit_bytes: What of a device may be used.
        write: How to start the best plan that weft runs; None if there is none.
        best: The fastest divisions, in the order of `found.best`.
        of_kind: The fastest of each kind.
        guide: What to try, in order.
        storage: What the storage must give, and which file systems and services do; None if nobody asked.
        others: Why others fell out, a line each.
        terms: The terms of the best one's step and memory.
        pipeline: The best one's step, if it has a pipeline.
        assumptions: What is taken for granted, a line each.
        how_right: How far the figures can be trusted, a line each.
        machine: The machine's figures.
    """

    question: str
    answer: str
    found: Found
    limit_bytes: float
    write: ToWrite | None
    best: Table
    of_kind: Table
    guide: Table | None = None
    storage: tuple[str, Sequence[Table]] | None = None
    others: Sequence[str] = ()
    terms: Sequence[Table] = ()
    pipeline: Pipeline | None = None
    assumptions: Sequence[str] = ()
    how_right: Sequence[str] = ()
    machine: Table = field(default=Table("", (), ()))

    @property
    def kinds(self) -> list[Plan]:
        """The fastest plan of each kind, the fastest first."""
        return sorted(self.found.of_kind.values(), key=lambda plan: plan.seconds)


def plan_page(report: PlanReport) -> str:
    """The text of an HTML file that says how to run a job, and why not otherwise.

    Raises:
        UsageError: Jinja2 is not installed.
    """
    made = environment("a plan", "it")
    return made.get_template("plan/plan.html").render(_values(report))


def _values(report: PlanReport) -> dict[str, Any]:
    from markupsafe import Markup  # comes with Jinja2

    style = "".join(map(asset, ("page.css", "run/run.css", "plan/plan.css")))
    first, *rest = report.question.splitlines()
    rows = memory_rows(report.found, report.kinds)
    return {
        "report": report,
        "policy": policy(style),
        "style": Markup(style),
        "title": first,
        "question": rest,
        "looks": LOOKS,
        "tile": TILE,
        "best": numbered(report.best),
        "of_kind": with_kinds(report),
        "scatter": scatter(report.found, report.limit_bytes),
        "memory": memory_bars(rows, report.limit_bytes) if rows else None,
        "guide": report.guide._replace(caption="") if report.guide else None,
        "parts": memory_table(rows),
        "limit": format_bytes(report.limit_bytes),
        "sections": sections(report),
    }


def sections(report: PlanReport) -> list[tuple[str, str]]:
    """The anchors and titles of what there is to show, in the order of the page."""
    found = report.found
    there = (
        ("best", "The best" if len(found.best) == 1 else f"The {len(found.best)} best", found.best),
        ("picture", "Time against memory", found.best),
        ("memory", "Memory of the fullest rank", found.best or found.nearest),
        ("timeline", "The step as a timeline", report.pipeline),
        ("try", "What to try, in which order", report.guide),
        ("storage", "Storage", report.storage),
        ("others", "Why others fell out", report.others),
        ("terms", "Each term of the best one", report.terms),
        ("assumptions", "What is assumed", report.assumptions),
        ("right", "How right it is", report.how_right),
    )
    return [(name, title) for name, title, shown in there if shown]


def numbered(one: Table) -> Table:
    """A table whose rows begin with 1, 2, 3, ..., as points of the picture are called."""
    rows = [(str(number), *row) for number, row in enumerate(one.rows, 1)]
    return Table(one.caption, ("", *one.headers), rows, f"<{one.align}")


def with_kinds(report: PlanReport) -> Table:
    """The best of each kind, whose rows begin with it."""
    one = report.of_kind
    rows = [(plan.kind, *row) for plan, row in zip(report.kinds, one.rows, strict=True)]
    return Table(one.caption, ("kind", *one.headers), rows, f"<{one.align}")
