"""A division of one's own, priced beside the best one."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from weft.errors import ConfigError
from weft.graph.sizes import RECOMPUTE
from weft.machines.host import Machines
from weft.plan.parallelism.explain import step_terms
from weft.plan.parallelism.job import SCHEDULES, SHARDED, Division, Job
from weft.plan.parallelism.memory import copies, memory_of
from weft.plan.parallelism.search import Plan
from weft.plan.parallelism.step import StepTimes, step_of
from weft.schedule.table import named
from weft.units import format_seconds
from weft.untrusted import shown_text, whole

NAMES = {
    "dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "experts", "mbs": "microbatch",
    "vp": "chunks", "zero": "sharded",
}  # fmt: skip
"""Short names of what a division has; the long ones are those of `Division`."""
NUMBERS = ("data", "tensor", "pipeline", "context", "experts", "microbatch", "chunks")
WORDS = {"sharded": SHARDED, "recompute": RECOMPUTE, "schedule": SCHEDULES}
INTERLEAVED, V_SHAPED = "interleaved_1f1b", "zbv"
DIVISION = '"pp 4, tp 8, microbatch 1, recompute full"'


@dataclass(frozen=True)
class Own:
    """A division that somebody asked for. ``fits``: into what a device may use."""

    plan: Plan
    fits: bool


def parse_division(text: str, job: Job, machines: Machines) -> Division:
    """The division that a text describes, as `weft plan` prints it or with short names; what it leaves out is 1, and
    all ranks that are left are replicas.

    Raises:
        ConfigError: A part means nothing, or the division cannot be on these machines.

    >>> from weft.graph.sizes import Sizes
    >>> from weft.machines.cluster import parse_cluster
    >>> job = Job(Sizes(8, 512, 8, 2048, 50000, 512), batch=64)
    >>> str(parse_division("pp 2, tp 2, zbv x2, recompute full", job, parse_cluster("2x8xH100")))
    'data 4, tensor 2, pipeline 2, zbv x2, microbatch 1, recompute full'
    """
    found: dict[str, int | str] = {}
    for part in text.split(","):
        first, *rest = part.replace("=", " ").split() or [""]
        name, schedule = NAMES.get(first.lower(), first.lower()), named(first)
        if schedule in SCHEDULES and len(rest) <= 1:
            found["schedule"] = schedule
            usual = 2 if schedule in (INTERLEAVED, V_SHAPED) else 1
            found["chunks"] = (whole(rest[0].removeprefix("x"), 1000) or _refuse(part)) if rest else usual
        elif name in NUMBERS and len(rest) == 1:
            found[name] = whole(rest[0], 1 << 20) or _refuse(part)
        elif name in WORDS and len(rest) == 1:
            word = named(rest[0]) if name == "schedule" else rest[0].lower()
            found[name] = word if word in WORDS[name] else _refuse(part)
        elif part.split() == ["whole", "sequences"]:
            found["along"] = False
        else:
            _refuse(part)
    taken = math.prod(int(found.get(name, 1)) for name in ("tensor", "context", "pipeline"))
    if "data" not in found:
        found["data"] = max(1, machines.size // taken)
    division = Division(**{each.name: found[each.name] for each in fields(Division) if each.name in found})  # type: ignore[arg-type]
    _check(division, job, machines)
    return division


def _refuse(part: str) -> int:
    names = [*NUMBERS, *WORDS, *NAMES]
    raise ConfigError(
        f'--division: "{shown_text(part.strip())}" says nothing; write {DIVISION}, parts by {", ".join(names)}'
    )


def _check(division: Division, job: Job, machines: Machines) -> None:
    sizes = job.sizes
    faults = []
    if division.ranks != machines.size:
        faults.append(f"it has {division.ranks} ranks, the machines {machines.size}")
    tensor, keys, each = division.tensor, sizes.key_heads, machines.host.accelerators
    if sizes.heads % tensor or (keys % tensor and tensor % keys):
        faults.append(f"{sizes.heads} heads ({keys} of keys) do not divide by tensor {tensor}")
    if each % (tensor * division.context):
        faults.append(
            f"tensor x context, {tensor * division.context}, does not divide a host's {each} accelerators"
        )
    if sizes.seq % division.context:
        faults.append(f"{sizes.seq} tokens do not divide by context {division.context}")
    if division.pipeline * division.chunks > sizes.layers:
        faults.append(f"{division.stages} stages are more than {sizes.layers} layers")
    if job.batch % (division.data * division.microbatch):
        faults.append(
            f"{division.data} replicas with microbatches of {division.microbatch} do not divide a batch of {job.batch}"
        )
    else:
        faults += _faults_of_chunks(division, division.microbatches(job), sizes.layers)
    if sizes.experts is not None and sizes.experts.count % division.experts:
        faults.append(f"{sizes.experts.count} experts do not divide by {division.experts}")
    if sizes.experts is None and division.experts > 1:
        faults.append("the model has no experts to share")
    if faults:
        raise ConfigError(f"--division {division}: {'; '.join(faults)}")


def _faults_of_chunks(division: Division, microbatches: int, layers: int) -> list[str]:
    """Chunks that a schedule cannot have, by the rules with which the search makes divisions."""
    schedule, ranks, chunks = division.schedule, division.pipeline, division.chunks
    if schedule == V_SHAPED:
        return [] if chunks == 2 else [f"{V_SHAPED} has 2 chunks, not {chunks}"]
    if chunks == 1:
        return []
    if schedule != INTERLEAVED:
        return [f"{chunks} chunks belong to {INTERLEAVED}, not to {schedule}"]
    if layers % (ranks * chunks) == 0 and microbatches % ranks == 0:
        return []
    return [
        f"{INTERLEAVED} needs layers that divide by pipeline x chunks, {ranks * chunks}, and microbatches that "
        f"divide by pipeline, {ranks}: there are {layers} and {microbatches}"
    ]


def price(division: Division, job: Job, machines: Machines, limit_bytes: float) -> Own:
    """The step and the memory of a division, and whether it fits."""
    times = StepTimes(job, machines)
    memory = memory_of(job, division, times.shares(division), copies(machines))
    plan = Plan(division, step_of(job, division, machines, times), memory)
    return Own(plan, memory.total <= limit_bytes)


def because(job: Job, own: Plan, best: Plan) -> str:
    """The two terms of a step in which one plan takes most more than another one; work counts by its parts."""
    theirs = {name: seconds for name, seconds, _ in step_terms(job, best)}
    more = [
        (seconds - theirs.get(name, 0.0), name, seconds)
        for name, seconds, _ in step_terms(job, own)
        if name not in ("work", "step", "replicas, hidden")
    ]
    worst = sorted((each for each in more if each[0] > 0), reverse=True)[:2]
    return " and ".join(
        f"{name.removeprefix('- ')} takes {format_seconds(seconds)} in place of "
        f"{format_seconds(theirs.get(name, 0.0))}"
        for _, name, seconds in worst
    )
