"""weft's own launcher: all ranks on this machine."""

from __future__ import annotations

from collections.abc import Mapping

from weft.launch.engines.described import Described
from weft.launch.engines.plan import Command, Plan
from weft.launch.rank import FILE, MODULE


def plan(job: Described, environ: Mapping[str, str]) -> Plan:
    """One process for each rank; see :mod:`weft.launch.local`, which also says who is who (``RANK`` and its like)."""
    notes = [f"started again after a failure, up to {job.max_restarts} times"] if job.max_restarts else []
    return Plan(job.engine, [Command(rank_program(job), times=job.ranks)], environ=environ, notes=notes)


def rank_program(job: Described) -> list[str]:
    """The command of a rank that reports its first error to its launcher."""
    marks = (MODULE,) if job.module else ()
    return [job.python, FILE, *marks, job.script, *job.arguments]
