"""`weft plan --calibrate OUT`: a machine's figures corrected by a recorded run, and how far its plan was off."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from weft.analysis.analysis import Analysis
from weft.analysis.measured import samples_of
from weft.analysis.plan.calibrate import Observed, calibrate, observe, predicted, terms
from weft.cli.draw import write
from weft.errors import UsageError
from weft.machines.host import Host
from weft.machines.machine_file import host_from_json, host_to_json, parse_machines
from weft.plan.parallelism.job import Job
from weft.profiler.reading import read_run
from weft.report.text import table
from weft.units import format_bytes, format_seconds
from weft.untrusted import read_file, shown_path

OTHERS = (
    "graph",
    "measure",
    "ranks",
    "tokens",
    "price",
    "storage_price",
    "memory",
    "data",
    "epoch",
    "html",
    "json",
    "compare",
    "explain",
)
"""Options that belong to plans."""


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that a calibration does not heed, and one without a machine.

    Raises:
        UsageError: There are such.
    """
    given = [
        f"--{name.replace('_', '-')}" if name != "graph" else "a graph"
        for name in OTHERS
        if getattr(options, name)
    ]
    if given:
        raise UsageError(
            f"--calibrate corrects a machine by a recording, {', '.join(given)} can say nothing of that: leave "
            f"{'it' if len(given) == 1 else 'them'} out"
        )
    if options.cluster is None and options.machine is None:
        raise UsageError(
            "--calibrate needs a machine to correct: --machine mine.json, as weft plan --measure mine.json writes it, "
            "or --cluster 1x8xA100-80"
        )


def run_calibration(options: argparse.Namespace, job_of: Callable[[Host, int], Job]) -> None:
    """Print what the recording says of the machine, and write the machine's file, if one is named.

    Args:
        options: Those of `weft plan`.
        job_of: The job, from the machine and the sequences of a step.
    """
    if options.cluster is not None:
        host = parse_machines(options.cluster).host
    else:
        host = read_file(options.machine, host_from_json)
    seen = []
    for name in options.calibrate:
        analysis = Analysis(read_run(Path(name)))
        batch = options.global_batch or round(samples_of(analysis))
        if not batch and analysis.typical:
            raise UsageError(
                f"{shown_path(name)} does not say how many samples a step has: give --global-batch"
            )
        observed = observe(analysis, batch)
        seen.append(Recording(shown_path(name), job_of(host, batch), observed))
    corrected = calibrate(host, [(one.job, one.observed) for one in seen])
    if options.machine is not None:
        write(Path(options.machine), host_to_json(corrected) + "\n")
    print("\n".join(_lines(seen, host, corrected)))
    if options.machine is not None:
        print(f"\n{shown_path(options.machine)} has these figures now.")


class Recording(NamedTuple):
    """A run that was recorded, and what it trained."""

    name: str
    job: Job
    observed: Observed


def _lines(seen: Sequence[Recording], before: Host, after: Host) -> Iterator[str]:
    """The plan of each run by both machines beside the run, and what was changed."""
    for one in seen:
        yield from _beside(one, before, after)
        yield ""
    figures = _figures(before), _figures(after)
    changed = [
        (figure, figures[0][figure], figures[1][figure])
        for figure in figures[0]
        if figures[0][figure] != figures[1][figure]
    ]
    if changed:
        yield table((f"changed in {before.name}", "from", "to"), changed, "<>>")
    else:
        yield "Nothing was changed: no figure of the machine stands for what is still off."


def _beside(one: Recording, before: Host, after: Host) -> Iterator[str]:
    job, observed = one.job, one.observed
    plans = [terms(predicted(job, host, observed)) for host in (before, after)]
    columns = [plans[0], observed.parts, plans[1]]
    sums = [sum(column.values()) for column in columns]
    rows = [(term, *(f"{column[term] * 1e3:.2f}" for column in columns)) for term in observed.parts]
    rows.append(("step", *(f"{each * 1e3:.2f}" for each in sums)))
    yield f"{one.name}: {observed.division}, {observed.division.microbatches(job)} microbatches"
    yield (
        f"{observed.steps} usual steps of {format_seconds(observed.step_s)}, without waiting for data and without the "
        "script"
    )
    yield ""
    yield table(("term, ms", "planned before", "recorded", "planned now"), rows, "<>>>")
    yield ""
    off = [
        f"{planned / observed.step_s - 1:+.1%}" if observed.step_s else "an unknown part"
        for planned in (sums[0], sums[2])
    ]
    yield f"The plan of that run was off by {off[0]}, it is off by {off[1]} now."


def _figures(host: Host) -> Mapping[str, str]:
    """All that a calibration may change, by what it is."""
    device, conduct = host.accelerator, host.conduct
    found = {f"peak {dtype}, GFLOP/s": f"{rate / 1e9:.4g}" for dtype, rate in device.peak.items()}
    found |= {f"share of it, {dtype}": f"{device.share.get(dtype, 0.7):.3g}" for dtype in device.peak}
    for name, link in (("inside", host.inside), ("network", host.network)):
        found |= {
            f"{name}, GB/s": f"{link.bytes_per_s / 1e9:.4g}",
            f"{name}, latency": format_seconds(link.latency_s),
        }
    return {
        **found,
        "FLOPs of a product at half of that": f"{device.half_flops:.3g}",
        "share of it for attention": f"{device.attention_share:.3g}",
        "bandwidth of memory, GB/s": f"{device.bytes_per_s / 1e9:.4g}",
        "share of it between products": f"{device.memory_share:.3g}",
        "memory of a rank": format_bytes(device.memory_bytes),
        "sums of gradients hidden": f"{conduct.data:.1%}",
        "exchange of sharded parameters hidden": f"{conduct.parameters:.1%}",
        "a crossing, besides its transfer": format_seconds(conduct.crossing_s),
    }
