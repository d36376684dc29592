"""The figures of a whole run as tables: what ran, how far it can be trusted, what was measured and logged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from weft.analysis.measured import samples_of
from weft.analysis.replay import FAITHFUL
from weft.analysis.run import Sample
from weft.analysis.series import quantile
from weft.report.run.labels import (
    MOST_RANKS,
    RUN_PARTS,
    Table,
    duration,
    milliseconds,
    number,
    of_ranks,
    percent,
)
from weft.report.run.report import Report
from weft.units import format_bytes

SETTINGS = ("partitions", "microbatches", "pipeline", "optimize", "active_microbatches", "prescaled_batch")
"""Of the job, first in the facts."""
NO_USUAL_STEP = "there is none: only first steps, which trace and split the model, are recorded as a whole"


def facts(report: Report) -> Table:
    """The facts of the run, and its speed."""
    analysis = report.analysis
    run, ranks = analysis.run, analysis.ranks
    known = [analysis.facts(rank) for rank in ranks]
    rows = [
        ("run", run.name),
        ("ranks", str(len(ranks))),
        ("hosts", ", ".join(sorted({each.host for each in known if each.host}))),
        ("devices", ", ".join(sorted({each.device for each in known}))),
        *((name, str(value)) for name, value in _settings(report).items() if name in SETTINGS),
    ]
    rows += [
        (name, ", ".join(sorted({each.versions[name] for each in known if name in each.versions})))
        for name in sorted({name for each in known for name in each.versions})
    ]
    rows += [
        ("training steps", f"{len(report.step_times)}"),
        ("median step, begin to end", duration(report.median_step_s)),
        (
            "usual step, with what lies between",
            duration(analysis.step_s) if analysis.step_s else NO_USUAL_STEP,
        ),
    ]
    samples = samples_of(analysis)
    if samples and analysis.step_s:
        rows.append(("samples a second", number(samples / analysis.step_s)))
    return Table("The run", ("fact", "value"), [row for row in rows if row[1]])


def run_times(report: Report) -> Table:
    """Into what each rank's whole run went."""
    found = report.analysis.run_times
    used = [name for name in RUN_PARTS if any(getattr(each, name) for each in found.values())]
    rows = [
        (f"rank {rank}", duration(each.total), *(percent(each.share(name)) for name in used))
        for rank, each in list(found.items())[:MOST_RANKS]
    ]
    headers = ("rank", "whole run", *(RUN_PARTS[name].name for name in used))
    return Table(of_ranks("The whole run", len(found)), headers, rows, "<".ljust(len(headers), ">"))


def settings(report: Report) -> Table:
    """All settings that the job recorded."""
    rows = [(name, str(value)) for name, value in sorted(_settings(report).items())]
    return Table("All settings", ("setting", "value"), rows)


def _settings(report: Report) -> dict[str, object]:
    known = {
        name: value for facts in report.analysis.run.facts.values() for name, value in facts.settings.items()
    }
    return {name: known[name] for name in (*SETTINGS, *sorted(known)) if name in known}


def quality(report: Report) -> Table:
    """The measures of how far the figures can be trusted."""
    analysis = report.analysis
    run = analysis.run
    typical_s = analysis.step_s
    share = run.clock_error_s / typical_s if typical_s else 0.0
    recorded = len(analysis.timeline.steps)
    steps = max([recorded, *(len(own) for own in run.steps.values())])
    fidelity = analysis.what_if.fidelity
    rows = [
        ("clocks of the ranks agree to", f"{duration(run.clock_error_s)} ({percent(share)} of a step)"
         if run.clock_error_s else "exactly, they have one clock"),
        ("steps with spans", f"{recorded} of {steps}"),
        ("of them usual", str(len(analysis.usual_steps))),
        ("spans", f"{len(analysis.timeline.spans):,}"),
        ("messages with both ends", f"{len(analysis.messages):,}"),
        ("the run has ended", "yes" if run.complete else "no, or it was ended from outside"),
        ("the unchanged step, replayed, differs by", _fidelity(fidelity)),
    ]  # fmt: skip
    if unusual := [str(rank) for rank in run.ranks if rank not in analysis.typical]:
        rows.append(("ranks without a usual step, in no figure of one", ", ".join(unusual)))
    missing = sorted({rank for facts in run.facts.values() for rank in range(facts.ranks)} - set(run.ranks))
    if missing:
        rows.append(("ranks without a recording", ", ".join(map(str, missing))))
    return Table("Quality of clock and data", ("what", "value"), rows)


def _fidelity(fidelity: float | None) -> str:
    if fidelity is None or not math.isfinite(fidelity):
        return "not known, so no gains are shown"
    return percent(fidelity) + (", so no gains are shown" if fidelity > FAITHFUL else "")


def steps(report: Report) -> Table:
    """Times of all training steps, rank by rank."""
    rows = []
    for rank in report.analysis.ranks[:MOST_RANKS]:
        own = report.analysis.steps(rank)
        times = [step.step_s for step in own]
        if not times:
            continue
        worked, processor = (sum(getattr(step, name) for step in own) for name in ("work_s", "cpu_s"))
        rows.append(
            (f"rank {rank}", str(len(own)), *(milliseconds(quantile(times, share)) for share in (0, 0.5, 0.95, 1)),
             milliseconds(sum(step.data_s for step in own) / len(own)),
             percent(processor / worked) if worked else "", str(sum(step.preempted for step in own)))
        )  # fmt: skip
    headers = (
        "rank", "steps", "least ms", "median ms", "95% below ms", "most ms", "data wait ms",
        "processor time / work", "times preempted",
    )  # fmt: skip
    return Table(
        of_ranks("Times of steps", len(report.analysis.ranks)), headers, rows, "<".ljust(len(headers), ">")
    )


def memory(report: Report) -> Table:
    """The most memory that each rank had in use."""
    rows = []
    for rank in report.analysis.ranks[:MOST_RANKS]:
        own = [step.memory_bytes for step in report.analysis.steps(rank) if step.memory_bytes]
        if not own:
            continue
        limit = report.analysis.facts(rank).limit_bytes
        most = max(own)
        rows.append(
            (f"rank {rank}", format_bytes(own[0]), format_bytes(own[-1]), format_bytes(most),
             format_bytes(limit) if limit else "", percent(most / limit) if limit else "")
        )  # fmt: skip
    headers = ("rank", "first step", "last step", "most", "limit", "of the limit")
    return Table(of_ranks("Memory", len(report.analysis.ranks)), headers, rows, "<>>>>>")


def _text_of_rate(value: float) -> str:
    return f"{format_bytes(value)}/s"


MEASURES: Sequence[tuple[str, Callable[[Sample], float], Callable[[float], str]]] = (
    ("processor", lambda sample: statistics.fmean(sample.cores) if sample.cores else math.nan, percent),
    ("busiest core", lambda sample: max(sample.cores, default=math.nan), percent),
    ("processor, the job's ranks", lambda sample: sample.ours, percent),
    ("processor, their loaders", lambda sample: sample.loaders_share, percent),
    ("processor, others", lambda sample: sample.others, percent),
    ("waiting for a disk", lambda sample: sample.io_wait, percent),
    ("threads that run or wait to", lambda sample: float(sample.running), number),
    ("memory", lambda sample: float(sample.memory_bytes), format_bytes),
    ("read from disks", lambda sample: sample.read_rate, _text_of_rate),
    ("written to disks", lambda sample: sample.write_rate, _text_of_rate),
    ("sent to hosts", lambda sample: sample.sent_rate, _text_of_rate),
    ("received from hosts", lambda sample: sample.received_rate, _text_of_rate),
)
"""Of a host at one moment: what, its figure, how that reads."""


def system(report: Report) -> list[Table]:
    """For each host what its machine did over the run."""
    tables = []
    for host, samples in sorted(report.analysis.run.samples.items()):
        rows = [(name, *_spread(map(measure, samples), text)) for name, measure, text in MEASURES]
        devices = max((len(sample.devices) for sample in samples), default=0)
        for device in range(devices):
            own = [sample.devices[device] for sample in samples if len(sample.devices) > device]
            rows.append((f"GPU {device}, busy", *_spread((each.busy for each in own), percent)))
            rows.append(
                (f"GPU {device}, memory", *_spread((float(each.memory_bytes) for each in own), format_bytes))
            )
            throttled = sum(each.throttled for each in own) / len(own)
            rows.append((f"GPU {device}, throttled", "", percent(throttled), "", ""))
        headers = ("measure", "least", "median", "95% below", "most")
        tables.append(Table(f"Host {host}, {len(samples)} measures", headers, rows, "<>>>>"))
    return tables


def _spread(values: Iterable[float], text: Callable[[float], str]) -> tuple[str, ...]:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ("",) * 4
    return tuple(text(quantile(known, share)) for share in (0.0, 0.5, 0.95, 1.0))


def values(report: Report) -> Table:
    """The values that the script logged."""
    rows = []
    for name, series in logged(report).items():
        figures = [value for _, value in series]
        finite = [value for value in figures if math.isfinite(value)]
        strange = len(figures) - len(finite)
        rows.append(
            (name, str(len(figures)), number(figures[0]), number(figures[-1]),
             number(min(finite)) if finite else "", number(max(finite)) if finite else "", str(strange or ""))
        )  # fmt: skip
    headers = ("value", "steps", "first", "last", "least", "most", "not finite")
    return Table("What the script logged", headers, rows, "<>>>>>>")


def logged(report: Report) -> dict[str, list[tuple[float, float]]]:
    """For each logged name its (step, value), the loss first; of the first rank that logged it in a step."""
    found: dict[str, dict[int, float]] = {}
    for rank in report.analysis.ranks:
        for step in report.analysis.run.steps.get(rank, ()):
            for name, value in step.values.items():
                found.setdefault(name, {}).setdefault(step.step, value)
    order = sorted(found, key=lambda name: (name != "loss", "loss" not in name, name))
    return {name: [(float(step), found[name][step]) for step in sorted(found[name])] for name in order}


def judged(report: Report) -> Table:
    """Every rule, what it asks, its parameters, and how it ended."""
    rules = {rule.name: rule for rule in report.rules}
    rows = []
    for finding in report.findings:
        rule = rules.get(finding.rule)
        parameters = ", ".join(f"{name}={value}" for name, value in rule.parameters.items()) if rule else ""
        question = rule.question if rule else ""
        rows.append((finding.rule, finding.status.value, question, finding.text, parameters))
    return Table("All rules", ("rule", "result", "it looks for", "it says", "parameters"), rows, "<<<<<")
