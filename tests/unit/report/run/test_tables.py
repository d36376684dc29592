"""Tables show the figures of the analysis."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.unit.report.run.reports import EXPECTED, MS, made, report
from weft.analysis.analysis import Analysis
from weft.analysis.compare import compare
from weft.analysis.scaling import scale
from weft.report.run import comparison_tables, run_tables, step_tables
from weft.report.run.labels import PARTS, Table, milliseconds, percent


def cells(table: Table, row: str) -> dict[str, str]:
    """One row by its headers."""
    (found,) = [each for each in table.rows if each[0] == row]
    return dict(zip(table.headers, found, strict=True))


def test_every_table_has_as_many_cells_as_headers():
    found = report(made(data_s=3 * MS, host_s=MS, replicas=2, reduce_s=MS), comparison=None)
    tables = [
        step_tables.parts(found), step_tables.what_if(found), step_tables.balance(found), step_tables.moves(found),
        step_tables.waits(found), step_tables.links(found), run_tables.facts(found), run_tables.settings(found),
        run_tables.quality(found), run_tables.steps(found), run_tables.memory(found), *run_tables.system(found),
        run_tables.values(found), run_tables.judged(found),
    ]  # fmt: skip
    for table in tables:
        assert {len(row) for row in table.rows} <= {len(table.headers)}, table.caption
        assert len(table.align) <= max(1, len(table.headers)), table.caption
    assert len([table for table in tables if table.rows]) >= len(tables) - 1


def test_parts_are_those_of_the_analysis_and_add_up():
    found = report(made(data_s=3 * MS, host_s=MS))
    table = step_tables.parts(found)
    for rank, parts in found.analysis.typical.items():
        row = cells(table, f"rank {rank}")
        assert row["step ms"] == milliseconds(parts.total)
        for name, style in PARTS.items():
            seconds = getattr(parts, name)
            expected = f"{milliseconds(seconds)} ({percent(seconds / parts.total)})" if seconds else ""
            assert row.get(style.name, "") == expected
        shown = [
            float(cell.split(" ")[0])
            for name, cell in row.items()
            if name not in ("rank", "step ms") and cell
        ]
        assert sum(shown) == pytest.approx(float(row["step ms"]), abs=0.01 * len(shown))


def test_waits_and_their_weights():
    found = report(made())
    table = step_tables.waits(found)
    for (rank, peer), seconds in found.analysis.waits.items():
        assert cells(table, f"rank {rank}")[f"for {peer}"] == milliseconds(seconds)
    assert max(table.strong.values()) == 1.0


def test_links_count_messages_of_a_step():
    table = step_tables.links(report(made()))
    assert [row[0] for row in table.rows] == ["0 to 1", "1 to 0", "1 to 2", "2 to 1", "2 to 3", "3 to 2"]
    assert {row[1:] for row in table.rows} == {("8", "0.050", "0.050", "0.400")}


def test_balance_and_the_suggested_split():
    found = report(made(slow={0: 3.0, 3: 1.0}))
    table = step_tables.balance(found)
    assert (
        cells(table, "partition 0")["work ms"] == "72.00"
        and cells(table, "partition 3")["work ms"] == "24.00"
    )
    assert cells(table, "partition 0")["units"] == "layers.0 to layers.2"
    moves = step_tables.moves(found)
    assert moves.rows and found.analysis.suggestion is not None
    assert percent(found.analysis.suggestion.gain) in moves.caption and "`" in moves.rows[0][-1]


def test_gains_are_hidden_where_the_replay_is_not_faithful():
    found = report(made())
    shown = [row[2] for row in step_tables.what_if(found).rows]
    assert shown == sorted(shown, key=lambda text: -float(text.rstrip("%"))) and shown
    what_if = found.analysis.what_if
    found.analysis.__dict__["what_if"] = replace(
        what_if, fidelity=0.2, changes=tuple(replace(each, gain=None) for each in what_if.changes)
    )
    assert step_tables.what_if(found).rows == []
    assert cells(run_tables.quality(found), "the unchanged step, replayed, differs by")["value"] == (
        "20.0%, so no gains are shown"
    )


def test_quality_tells_what_is_missing():
    run = made()
    run = replace(
        run,
        clock_error_s=0.0004,
        complete=False,
        facts={0: replace(run.facts[0], ranks=6)},
        steps={0: run.steps[0]},
    )
    table = run_tables.quality(report(run))
    assert cells(table, "clocks of the ranks agree to")["value"] == "400 us (1.0% of a step)"
    assert cells(table, "ranks without a recording")["value"] == "4, 5"
    assert cells(table, "the run has ended")["value"].startswith("no")


def test_steps_memory_and_values():
    found = report(made())
    assert found.outliers == [10]
    row = cells(run_tables.steps(found), "rank 1")
    assert (row["steps"], row["most ms"]) == ("19", "500.0")
    assert cells(run_tables.memory(found), "rank 2")["most"] == "140 MiB"
    loss = cells(run_tables.values(found), "loss")
    assert (loss["steps"], loss["first"]) == ("20", "3.805")


def test_values_that_are_not_finite_are_counted():
    def values(rank: int, step: int) -> dict[str, object]:
        return {"values": {"loss": math.nan if step > 5 else 1.0, "always": math.inf}}

    table = run_tables.values(report(made(step_values=values)))
    assert cells(table, "loss")["not finite"] == "15" and cells(table, "loss")["last"] == "nan"
    assert cells(table, "always")["least"] == ""


def test_more_ranks_than_fit():
    table = run_tables.steps(report(made(partitions=2, slow={}, replicas=40, steps=3, units=False)))
    assert len(table.rows) == 64 and table.caption == "Times of steps (the first 64 of 80 ranks)"


def test_system_has_the_spread_of_each_measure():
    (table,) = run_tables.system(report(made()))
    assert table.caption == "Host node, 20 measures"
    assert cells(table, "processor")["median"] == "60.0%"
    assert cells(table, "read from disks")["most"] == "18.6 KiB/s"
    assert cells(table, "GPU 0, busy")["95% below"] == "25.0%"


def test_a_run_beside_its_plan():
    found = report(made(planned=EXPECTED))
    terms, memory = comparison_tables.planned(found.plan)
    assert cells(terms, "backward pass of partition 3") == {
        "what": "backward pass of partition 3", "planned ms": "16.00", "measured ms": "20.80", "difference ms": "4.80",
        "of the planned step": "+14.5%",
    }  # fmt: skip
    assert cells(memory, "memory of partition 1")["planned"] == "64 MiB"
    assert report(made()).plan is None


def test_two_runs_beside_each_other():
    old, new = made(), made(data_s=10 * MS)
    tables = comparison_tables.compared(compare(Analysis(old), Analysis(new)))
    row = cells(tables[0], "waiting for data")
    assert row["before ms"] == "0" and float(row["now ms"]) == pytest.approx(2.5)
    first = cells(tables[1], "rank 0")
    assert first["parts"].startswith("waiting for data +10.00")


def test_scaling():
    runs = [made(str(n), partitions=2, slow={}, replicas=n, reduce_s=n * MS, units=False) for n in (1, 2)]
    throughput, lost = comparison_tables.scaled(scale([Analysis(run) for run in runs]))
    assert [row[1] for row in throughput.rows] == ["2", "4"] and throughput.rows[0][5] == "100.0%"
    assert (
        throughput.rows[1][6] == "averaging gradients"
        and float(cells(lost, "2")["averaging gradients"][:-1]) > 0
    )


def test_nothing_at_all_makes_empty_tables():
    run = replace(made(steps=1), steps={}, samples={})
    found = report(replace(run, timeline=type(run.timeline)(), facts={}))
    for table in (
        step_tables.parts(found),
        step_tables.waits(found),
        run_tables.steps(found),
        run_tables.values(found),
    ):
        assert not table.rows
    assert run_tables.facts(found).rows
