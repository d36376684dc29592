"""Reports for people: the partition's table."""

from __future__ import annotations

from typing import Any

from weft.errors import UsageError
from weft.report.placement import ModelPlacement, PartitionReport
from weft.tensorflow.session.session import session


def partition_report(model: Any = None) -> PartitionReport:
    """Where everything lies: ``print`` it for tables of units and of partitions, with warnings where they are uneven.

    ``to_dict()`` gives plain values, and a notebook shows it by itself. ``model``: which one, if there are several.

    Raises :class:`UsageError` before the first step, which makes the partition.
    """
    models = [model] if model is not None else [each for each in session().models if each.partitioned]
    found = tuple(each.placement or ModelPlacement((), 1) for each in models)
    if not found:
        raise UsageError("there is no partition yet: the first step makes it")
    return PartitionReport(found, "")
