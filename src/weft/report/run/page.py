"""A run as one page: a file that needs nothing else, and no network, readable without scripts.

Scripts, style and data come from `weft.report`, and the policy at the page's head names their hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.report.embedded import embed
from weft.report.page import asset, legend, policy, script
from weft.report.run import charts, comparison_tables, run_tables, step_tables
from weft.report.run.labels import LOOKS, Table, duration
from weft.report.run.lanes import MOST_SPANS, Lanes, lanes
from weft.report.run.report import Report
from weft.report.styles import TILE
from weft.report.templates import environment

if TYPE_CHECKING:
    from jinja2 import Environment


MOST_BYTES = 2_000_000
FEWEST_SPANS = 1000
"""With fewer there is nothing to be gained."""


class Section(NamedTuple):
    """Figures and pictures under one title.

    Attributes:
        name: The anchor.
        note: How to read it, a sentence or two.
    """

    name: str
    title: str
    note: str
    tables: Sequence[Table] = ()
    charts: Sequence[charts.Chart] = ()
    bars: Sequence[charts.Bars] = ()


def run_page(report: Report) -> str:
    """The text of an HTML file that shows why a run is as slow as it is; of long runs the timeline has fewer steps.

    Raises:
        UsageError: Jinja2 is not installed.
    """
    made, spans = environment("a run", "the report"), MOST_SPANS
    made.globals |= {"looks": LOOKS, "tile": TILE, "duration": duration}
    values = _values(report)
    while True:
        page = _render(made, values, lanes(report, spans))
        if len(page.encode()) <= MOST_BYTES or spans < FEWEST_SPANS:
            return page
        spans //= 2


def _render(made: Environment, values: dict[str, Any], shown: Lanes) -> str:
    from markupsafe import Markup  # comes with Jinja2

    return made.get_template("run/run.html").render(
        values, lanes=shown, data=Markup(embed(shown.data)), legend=Markup(legend(shown.kinds)),
        ideal=len(shown.data["timelines"]) > 1,
    )  # fmt: skip


def _values(report: Report) -> dict[str, Any]:
    """The values that the template shows besides the timeline."""
    from markupsafe import Markup

    style, source = asset("page.css") + asset("run/run.css"), script()
    return {
        "report": report,
        "policy": policy(style, source),
        "style": Markup(style),
        "script": Markup(source),
        "facts": run_tables.facts(report),
        "quality": run_tables.quality(report),
        "whole": charts.run_times(report),
        "whole_table": run_tables.run_times(report),
        "settings": run_tables.settings(report),
        "judged": run_tables.judged(report),
        "sections": sections(report),
    }


def sections(report: Report) -> list[Section]:
    """The sections after the timeline; one without figures is left out."""
    found = [*_beside(report), *_beside_plan(report), *_of_a_step(report), *_of_the_run(report)]
    return [each for each in found if each.charts or any(table.rows for table in each.tables)]


def _beside(report: Report) -> list[Section]:
    found = []
    if (comparison := report.comparison) is not None:
        tables, bars = comparison_tables.compared(comparison), [charts.compared(comparison)]
        found.append(Section("compared", "Beside the earlier run", comparison.text, tables, bars=bars))
    if (scaling := report.scaling) is not None:
        chart = charts.scaled(scaling)
        found.append(
            Section(
                "scaling",
                "Scaling",
                scaling.text,
                comparison_tables.scaled(scaling),
                [chart] if chart else [],
            )
        )
    return found


def _beside_plan(report: Report) -> list[Section]:
    if report.plan is None:
        return []
    note = (
        f"{report.plan.text} Waiting is the rest of a partition's step: for transfers, and with nothing to run. What "
        "precedes and follows the microbatches is in no row."
    )
    return [Section("plan", "Beside the plan", note, comparison_tables.planned(report.plan))]


def _of_a_step(report: Report) -> list[Section]:
    return [
        Section(
            "parts",
            "Where each rank's step went",
            "From the begin of a usual step to that of the next one; the parts add up to the step. A bubble is time in "
            "which the rank could run nothing: before its first backward pass, between, after its last forward pass.",
            [step_tables.parts(report), step_tables.what_if(report)],
            bars=[charts.parts(report)],
        ),
        Section(
            "balance",
            "Balance of the partitions",
            "Forward and backward work, without waits. Equal bars are best.",
            [step_tables.balance(report), step_tables.moves(report)],
            bars=[charts.balance(report)],
        ),
        Section(
            "waits",
            "Who waited for whom",
            "A row is the rank that waited, a column the one it waited for.",
            [step_tables.waits(report)],
        ),
        Section(
            "links",
            "Messages between ranks",
            "From where the sender had a message ready to where all of it had arrived. Bytes are not recorded.",
            [step_tables.links(report)],
        ),
    ]


def _of_the_run(report: Report) -> list[Section]:
    memory = charts.memory(report)
    return [
        Section(
            "steps",
            "Step times over the run",
            "Without the first step, which traces and splits the model.",
            [run_tables.steps(report)],
            charts.step_times(report),
        ),
        Section(
            "memory",
            "Memory over the run",
            "The most in use: of the process on a CPU, of the device on a GPU.",
            [run_tables.memory(report)],
            [memory] if memory else [],
        ),
        Section(
            "system",
            "The machines over the run",
            "Of all processes on the host, as they were sampled.",
            run_tables.system(report),
            charts.system(report),
        ),
        Section(
            "values",
            "What the script logged",
            "By `weft.log`, step by step.",
            [run_tables.values(report)],
            charts.values(report),
        ),
    ]
