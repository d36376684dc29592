"""Where the script wants operations to be: ``with weft.partition(i):``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft.errors import PlacementError
from weft.tensorflow.session.session import present
from weft.tensorflow.trace import capture


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Operations of a model inside go to partition ``index``; of nested contexts the inner one counts.

    Ignored while ``auto_partition`` is true.

    Raises:
        PlacementError: There is no such partition.
    """
    session = present()
    partitions = session.settings.partitions if session is not None else None
    if (
        isinstance(index, bool)
        or not isinstance(index, int)
        or index < 0
        or (partitions and index >= partitions)
    ):
        of = f"the partitions are 0 to {partitions - 1}" if partitions else "partitions are numbered from 0"
        raise PlacementError(f"weft.partition({index!r}): {of}")
    marks = capture.tracing()

    def add(first: int, end: int) -> None:
        assert marks is not None
        marks.by_hand.insert(0, (index, first, end))  # inner ones end first, and come last

    with capture.noted(add):
        yield
