"""A run beside what `weft plan --json` has said of the same job, before it ran."""

from __future__ import annotations

import json
from collections.abc import Iterator

from weft.analysis.plan.comparison import BesidePlan, Seen, Term
from weft.document import Document
from weft.errors import UsageError
from weft.untrusted import parse_json

TERMS = {
    "work": "work",
    "bubble": "bubble",
    "crossings": "transfer",
    "replicas, exposed": "reduce",
    "optimizer": "optimizer",
}
"""The terms of a plan's step, and the parts of a recorded one that they become."""
USUAL = {
    "partitions": 1, "microbatches": 1, "pipeline": "1f1b", "shard_optimizer_state": False,
    "sharded_data_parallel_degree": 1,
}  # fmt: skip
"""The settings that tell divisions apart, with their defaults."""
FOLLOWS = ("auto", "list")
"""What runs by these is known to the job alone; any schedule of the plan may stand beside it."""
REST = "all else: late ranks, data, the script"


def beside_answer(analysis: Seen, text: str, name: str) -> BesidePlan:
    """A run beside the division of the plan that ran.

    Args:
        analysis: The run.
        text: What `weft plan --json` printed.
        name: Of its file.

    Raises:
        FormatError: It is no plan; the fault is named by its path.
        UsageError: No division of the plan is what ran, or nothing is known of how the run was.
    """
    if not analysis.typical:
        raise UsageError("--plan compares usual steps, and the recording has none: record more steps")
    entry = _that_ran(analysis, list(_entries(Document(parse_json(text, "this is not a plan")))), name)
    busiest = max(analysis.typical.values(), key=lambda each: each.work)
    terms: list[Term] = []
    if "step" in entry:
        planned = {term: entry["step"][term].number() for term in TERMS}
        measured = {term: float(getattr(busiest, part)) for term, part in TERMS.items()}
        terms = [Term(term, planned[term], measured[term]) for term in TERMS]
        rest = entry["step_s"].number() - sum(planned.values())
        terms.append(Term(REST, max(0.0, rest), max(0.0, busiest.total - sum(measured.values()))))
    most = max((step.memory_bytes for rank in analysis.typical for step in analysis.steps(rank)), default=0)
    memory = (Term("memory of the fullest rank", entry["memory_bytes"].number(), most),) if most else ()
    return BesidePlan(
        Term("the whole step", entry["step_s"].number(), analysis.step_s),
        tuple(terms),
        memory,
        f"the plan {name}",
    )


def _entries(document: Document) -> Iterator[Document]:
    """All divisions that a plan tells of: of sizes, or of a traced model."""
    if isinstance(document.value, list):
        yield from document
        return
    yield from document["best"]
    kinds = document["of_kind"]
    if isinstance(kinds.value, dict):
        yield from (kinds[kind] for kind in kinds.value)
    if document["runs_today"].value is not None:
        yield document["runs_today"]


def _that_ran(analysis: Seen, entries: list[Document], name: str) -> Document:
    """The division with the settings of the run."""
    ran = {setting: analysis.setting(setting, usual) for setting, usual in USUAL.items()}
    ranks = len(analysis.run.ranks)
    for entry in entries:
        division, settings = entry["division"], entry["settings"]
        if "partitions" not in settings:  # weft cannot run it
            continue
        planned = {
            setting: settings[setting].value if setting in settings else usual
            for setting, usual in USUAL.items()
        }
        if ran["partitions"] == 1 or ran["pipeline"] in FOLLOWS:
            planned["pipeline"] = ran["pipeline"]
        if planned == ran and division["data"].whole() * division["pipeline"].whole() == ranks:
            return entry
    told = ", ".join(f'"{setting}": {json.dumps(value)}' for setting, value in ran.items() if value)
    raise UsageError(
        f"{name} has no division like what ran, {ranks} ranks with {told}: run one that the plan names, with its "
        "settings, or leave --plan out for the job's own plan"
    )
