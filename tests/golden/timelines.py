"""Timelines whose pictures are kept as files, to be seen in a review and compared by a test.

python -m tests.golden.timelines        # draws them anew
"""

from __future__ import annotations

from pathlib import Path

from weft.report.picture import timeline_svg
from weft.timeline import Span, Timeline

FOLDER = Path(__file__).parent
MS = 1e-3


def span(rank: int, kind: str, microbatch: int, start_ms: float, end_ms: float, label: str = "") -> Span:
    stage = rank if kind in "FBIW" else -1
    return Span(rank, kind, microbatch, start_ms * MS, end_ms * MS, stage, label, 3)


STEP = Timeline(
    [
        *(span(0, "F", 0, 0, 2), span(0, "F", 1, 2, 4)),
        *(span(0, "send", 0, 2, 2.5, "value to rank 1"), span(0, "send", 1, 4, 4.5, "value to rank 1")),
        *(span(0, "wait", 0, 4, 7.5, "for rank 1"), span(0, "recv", 0, 7, 7.5, "gradient from rank 1")),
        *(
            span(0, "B", 0, 7.5, 11),
            span(0, "tensor", -1, 9, 10),
            span(0, "recv", 1, 12, 12.5, "gradient from rank 1"),
        ),
        *(span(0, "wait", 1, 11, 12.5, "for rank 1"), span(0, "B", 1, 12.5, 16)),
        *(span(0, "reduce", -1, 16, 17), span(0, "optimizer", -1, 17, 17.5), span(0, "step", -1, 0, 16)),
        *(span(1, "wait", 0, 0, 2.5, "for rank 0"), span(1, "recv", 0, 2, 2.5, "value from rank 0")),
        *(span(1, "recv", 1, 4, 4.5, "value from rank 0"), span(1, "F", 0, 2.5, 4.5)),
        *(span(1, "I", 0, 4.5, 7), span(1, "send", 0, 7, 7.5, "gradient to rank 0"), span(1, "F", 1, 7, 9.5)),
        *(span(1, "I", 1, 9.5, 12), span(1, "send", 1, 12, 12.5, "gradient to rank 0")),
        *(span(1, "W", 0, 12, 13.5), span(1, "W", 1, 13.5, 15), span(1, "step", -1, 0, 15)),
        *(span(1, "reduce", -1, 16, 17), span(1, "optimizer", -1, 17, 17.5)),
        *(
            span(0, "checkpoint", -1, 17.5, 18.5),
            span(0, "data", -1, 18.5, 20),
            span(0, "copy", -1, 20, 20.5),
        ),
        *(span(1, "collector", -1, 18, 19), span(1, "prepare", -1, 19, 20.5)),
    ]
)
"""Every kind that there is, on two ranks, the second of which splits its backward passes."""

DRAWINGS = {"timeline.svg": lambda: timeline_svg(STEP, "Every kind of span")}
"""File to what draws its content."""

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
