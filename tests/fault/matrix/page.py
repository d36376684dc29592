"""The results as the table of tests/README.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.fault.matrix.table import ENGINES, FAULTS, MOMENTS, Row

PAGE = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- made by python -m tests.fault.matrix -->", "<!-- end -->"
Results = Mapping[Row, tuple[str, float | None]]
"""For each row what was wrong (empty: nothing), and after how many seconds nothing was left."""


def table(results: Results, former: str = "") -> str:
    """One line for each fault and moment, one column for each launcher; what no row found stays as in `former`.

    >>> rows = [Row("local", 2, "SIGKILL", "step"), Row("local", 3, "SIGKILL", "step", 1)]
    >>> print(table({rows[0]: ("", 0.52), rows[1]: ("", None)}))
    | fault | when | local | torchrun | mpirun | torchrun, 2 hosts | mpirun, 2 hosts |
    | --- | --- | --- | --- | --- | --- | --- |
    | SIGKILL | step | 0.5 s; same losses | | | | |
    """
    told = {
        (cells[0], cells[1], engine): cell
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in former.splitlines())
        for engine, cell in zip(ENGINES, cells[2:], strict=False)
        if cells[0] in FAULTS
    }
    kinds = sorted(
        {(row.fault, row.moment) for row in results} | {kind[:2] for kind in told},
        key=lambda kind: (kind[1] != "step", MOMENTS.index(kind[1]), [*FAULTS].index(kind[0])),
    )
    lines = [f"| fault | when | {' | '.join(ENGINES)} |", "| --- | --- |" + " --- |" * len(ENGINES)]
    for fault, moment in kinds:
        cells = []
        for engine in ENGINES:
            found = {
                row: result
                for row, result in results.items()
                if (row.fault, row.moment, row.engine) == (fault, moment, engine)
            }
            cell = _cell(found) if found else told.get((fault, moment, engine), "")
            cells.append(f" {cell} |".replace("  |", " |"))
        lines.append(f"| {fault} | {moment} |{''.join(cells)}")
    return "\n".join(lines)


def _cell(found: Results) -> str:
    bad = [f"{row.ranks} ranks: {problem}" for row, (problem, _) in found.items() if problem]
    if bad:
        return "**" + "; ".join(bad) + "**"
    seconds = [taken for _, taken in found.values() if taken is not None]
    parts = [f"{max(seconds):.1f} s"] if seconds else []
    if any(row.restarts for row in found) or any(
        row.fault in ("slow link", "flapping link") for row in found
    ):
        parts.append("same losses")
    return "; ".join(parts)


def write(results: Results) -> None:
    """Puts the table into its page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    former, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results, former)}\n\n{END}{after}")
