"""Schedules as CSV, in the notation of `torch.distributed.pipelining`.

One line a rank, one cell an action; an empty cell is an idle slot:

    0F0,0F1,,0B0,0B1
    1F0,1B0,1F1,1B1

`to_csv` writes what `_PipelineScheduleRuntime._load_csv(format="compute_only")` reads. `from_csv` reads what its
`_dump_csv` writes, in both of its formats. Two things of that notation are not actions of a schedule
here: sends and receives follow from the placement, and UNSHARD, RESHARD and REDUCE_GRAD are not of the
pipeline; they are left out. OVERLAP_F_B, a forward and a backward that share a slot, is refused.
"""

from __future__ import annotations

import csv
import re

from weft.errors import FormatError
from weft.schedule.schedule import COMPUTE, Action, Schedule
from weft.schedule.transfers import with_transfers
from weft.untrusted import listed, shown_text, translated

SHOWN = 20
"""How many faults an error names."""

_LEFT_OUT = re.compile(r"[0-9]+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB])[0-9]*")


def to_csv(schedule: Schedule) -> str:
    r"""One line a rank, one cell an action.

    >>> to_csv(Schedule("mine", ((Action(0, "F", 0), Action(0, "B", 0)),), (0,)))
    '0F0,0B0\n'
    """
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def to_csv_with_transfers(schedule: Schedule, *, waits: bool = False) -> str:
    r"""The same with sends and receives between, for `_load_csv(format="compute_comms")`.

    `waits`: each send is waited for at the end of its line. PyTorch needs that since 2.15; earlier ones do not know it.

    >>> to_csv_with_transfers(from_csv("0F0,0B0\n1F0,1B0\n"))
    '0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n'
    >>> to_csv_with_transfers(from_csv("0F0,0B0\n1F0,1B0\n"), waits=True).splitlines()[0]
    '0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0'
    """
    lines = [[*map(str, actions)] for actions in with_transfers(schedule)]
    for line in lines if waits else ():
        line += [cell.replace("SEND", "WAIT_SEND") for cell in line if "SEND" in cell]
    return "".join(",".join(line) + "\n" for line in lines)


def from_csv(text: str) -> Schedule:
    r"""The schedule in `text`; the rank of a stage is the line that its actions stand in.

    Every fault is named by line and cell in one FormatError. Whether the schedule is legal, `legal.check` says.

    >>> from_csv("0F0,,0B0\n").ranks
    ((Action(stage=0, kind='F', microbatch=0), Action(stage=0, kind='B', microbatch=0)),)
    """
    faults: list[str] = []
    with translated("this is not a schedule as CSV"):
        lines = list(csv.reader(text.splitlines()))
    rows = [_read(cells, line, faults) for line, cells in enumerate(lines, start=1)]
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        if not row:
            faults.append(f"line {rank + 1}: rank {rank} does nothing, remove the line")
        for stage in sorted({action.stage for action in row}):
            if owners.setdefault(stage, rank) != rank:
                faults.append(f"line {rank + 1}: stage {stage} is on rank {owners[stage]} already")
    if owners and len(owners) <= max(owners):
        missing = listed(stage for stage in range(max(owners)) if stage not in owners)
        faults.append(f"there is no action of the stages {missing}, but of stage {max(owners)}")
    microbatches = {action.microbatch for row in rows for action in row}
    if microbatches and len(microbatches) <= max(microbatches):
        missing = listed(number for number in range(max(microbatches)) if number not in microbatches)
        faults.append(f"there is no action of the microbatches {missing}, but of {max(microbatches)}")
    if not rows:
        faults.append("there is no line; write one a rank, for example 0F0,0B0")
    if faults:
        raise FormatError("this is not a schedule as CSV: " + _joined(faults))
    return Schedule("file", tuple(map(tuple, rows)), tuple(owners[stage] for stage in range(len(owners))))


def _joined(faults: list[str]) -> str:
    more = len(faults) - SHOWN
    return "; ".join(faults[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _read(cells: list[str], line: int, faults: list[str]) -> list[Action]:
    row = []
    for number, cell in enumerate(cells, start=1):
        if not cell.strip() or _LEFT_OUT.fullmatch(cell.strip()):
            continue
        where = f"line {line}, cell {number}"
        if cell.strip().endswith("OVERLAP_F_B"):
            faults.append(
                f'{where}: "{shown_text(cell)}" overlaps a forward and a backward, which weft does not; '
                "write them as two cells"
            )
            continue
        try:
            action = Action.parse(cell)
        except FormatError as error:
            faults.append(f"{where}: {error}")
            continue
        if action.kind in COMPUTE:
            row.append(action)
    return row
