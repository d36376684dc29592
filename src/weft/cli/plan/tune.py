"""`weft tune`: short trials of a real script, and the settings that made it fastest."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.cli.options import count
from weft.config import describe, parse_assignments
from weft.errors import ConfigError, LaunchError, UsageError
from weft.report.text import table
from weft.terminal_text import visible
from weft.tune.search import GAIN, Changes, Outcome, Trial, Tuning, tune
from weft.tune.trial import Trials, weft_run
from weft.units import format_bytes
from weft.untrusted import shown_path, shown_text

_EXAMPLES = """\
examples:
  weft tune -n 4 train.py
  weft tune -n 2 --vary pipeline=auto,zbv --vary compression=int8 train.py --data /data
  weft tune -n 2 --vary=--batch-size=32,64,128 train.py --batch-size 32
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="short trials of a script: which settings make it fastest",
        description="Runs the script some steps at a time, each time in processes of its own: as it is, then with "
        "other numbers of microbatches, other schedules, layers cut over ranks, and what --vary names. Prints what "
        "each gave, the best, and the lines to write. WEFT_TRIAL is set meanwhile, for scripts that want to leave "
        "something out.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="weft tune [-h] [-n RANKS] [options] [-m] script ...",
    )
    parser.add_argument(
        "-n", "--ranks", type=count, default=1, metavar="N", help="how many processes (default: 1)"
    )
    parser.add_argument("--config", metavar="JSON", help="settings of all trials, as for weft run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting of all trials"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="as for weft run")
    parser.add_argument("--smdistributed", action="store_true", help="as for weft run")
    parser.add_argument(
        "--vary", action="append", default=[], metavar="NAME=A,B,...",
        help="values to try of a setting, or of an argument of the script if NAME begins with a dash",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=count, default=10, metavar="N", help="usual steps of a trial (default: 10)"
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, metavar="S", help="how long a trial may take (default: 120)"
    )
    parser.add_argument(
        "--turns", type=count, default=2, metavar="N",
        help="how often the best and the script's own run in turn at the end (default: 2)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FOLDER", help="keeps each trial's recording and output there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    parser.set_defaults(handler=main)


def main(options: argparse.Namespace) -> int:
    choices = varied(options.vary)
    if not options.script:
        raise LaunchError("weft tune needs a script: weft tune -n 2 train.py")
    if options.steps < 1 or not 0 < options.seconds <= 86400:
        raise UsageError("--steps must be at least 1, --seconds above 0 and at most a day")
    found = Tuning()
    with _folder(options.out) as folder:
        command = weft_run(_options(options))
        trials = Trials(command, options.script, os.environ, folder, options.steps, options.seconds)
        try:
            shown = 0
            for known in tune(trials.run, choices, options.turns, found):
                if len(known.trials) + len(known.repeats) > shown:
                    _show(known)
                shown = len(known.trials) + len(known.repeats)
        except KeyboardInterrupt:
            if not found.trials:
                raise
            print("weft tune: ended early; this is what is known so far", file=sys.stderr)
    print(json.dumps(as_json(found), indent=2) if options.json else as_text(found))
    return 0 if found.best.rate else 1


def varied(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each setting that `--vary` asks for.

    >>> varied(["microbatches=4,8", "--batch-size=16"])
    {'microbatches': [4, 8], '--batch-size': [16]}
    """
    found: dict[str, list[Any]] = {}
    known = {row.name for row in describe()} - {"partitions", "record", "record_steps", "log_dir"}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError(f"--vary {shown_text(text)} has no values: write it as microbatches=4,8,16")
        if not name.startswith("-") and name not in known:
            raise ConfigError(
                f"--vary {shown_text(name)}: there is no such setting to try; an argument of the script begins with "
                "a dash: --vary=--batch-size=16,32"
            )
        found[name] = [parse_assignments([f"value={value}"])["value"] for value in values.split(",")]
    return found


def _options(options: argparse.Namespace) -> list[str]:
    """Those of `weft run` that are the same for all trials."""
    found = ["-n", str(options.ranks)]
    for name in ("config", "device"):
        if getattr(options, name) is not None:
            found += [f"--{name}", getattr(options, name)]
    found += [f"--set={text}" for text in options.set]
    found += ["--smdistributed"] if options.smdistributed else []
    return found + (["-m"] if options.module else [])


@contextmanager
def _folder(out: str | None) -> Iterator[Path]:
    if out is None:
        with tempfile.TemporaryDirectory(prefix="weft-tune-") as name:
            yield Path(name)
        return
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{shown_path(folder)} is there already: name a new folder")
    yield folder


def _show(found: Tuning) -> None:
    """A line on what came last, for whoever waits."""
    if found.repeats:
        best, own = found.repeats[-1]
        text = f"in turn: {best:,.1f} samples/s, the script's own {own:,.1f}"
    else:
        last = found.trials[-1]
        ended = ", ended early" if last.outcome.stopped else ""
        result = f"{last.rate:,.1f} samples/s{ended}" if last.rate else last.outcome.failure
        text = f"{words(last.changes)}: {result}"
    print(f"weft tune: {visible(text)}", file=sys.stderr, flush=True)


def words(changes: Changes) -> str:
    """Changes as people write them."""
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "the script's own"


def lines_to_write(changes: Changes) -> list[str]:
    """The lines that ask for the best settings, in the script and at the command."""
    settings = {name: value for name, value in changes.items() if not name.startswith("-")}
    arguments = [f"{name}={value}" for name, value in changes.items() if name.startswith("-")]
    found = []
    if settings:
        inside = (
            json.dumps(settings)[1:-1]
            .replace("true", "True")
            .replace("false", "False")
            .replace("null", "None")
        )
        found.append(f"weft.init({{..., {inside}}})")
        found.append(
            "weft run "
            + shlex.join(f"--set={name}={json.dumps(value)}" for name, value in settings.items())
            + " ..."
        )
    return found + ([f"arguments of the script: {shlex.join(arguments)}"] if arguments else [])


def as_text(found: Tuning) -> str:
    """The trials, the best, and what to write."""
    own = found.own
    rows = [
        [
            words(trial.changes),
            f"{trial.rate:,.1f}" if trial.rate else "",
            f"{trial.rate / own.rate - 1:+.1%}" if trial.rate and own.rate and trial is not own else "",
            f"{trial.outcome.step_s * 1e3:,.1f}" if trial.rate else "",
            format_bytes(trial.outcome.memory_bytes) if trial.outcome.memory_bytes else "",
            _said(trial.outcome),
        ]
        for trial in found.trials
    ]
    parts = [table(["tried", "samples/s", "gain", "step ms", "a rank's memory", ""], rows, "<>>>>")]
    return "\n\n".join([*parts, *_best(found)])


def _said(outcome: Outcome) -> str:
    """The remark on a trial beside its figures."""
    ended = "ended early" if outcome.stopped else outcome.failure
    return "; ".join(filter(None, (ended, outcome.remark)))


def _best(found: Tuning) -> list[str]:
    best = found.best
    if not best.rate:
        return ["Nothing ran: mend the script first, it fails with its own settings too."]
    if best is found.own:
        others = [each for each in found.trials if each is not found.own]
        if others and not any(each.rate for each in others):
            return [
                f"Nothing was compared: the script's own settings ran, and none of {len(others)} others. The table "
                "says why each failed."
            ]
        if found.fastest is found.own or not found.repeats:
            return [f"The script's own settings are the best: nothing that was tried is {GAIN:.0%} faster."]
        return [
            f"The script's own settings are as good as any: {words(found.fastest.changes)} looked faster, but run in "
            f"turn it was {found.gain:+.1%}."
        ]
    text = f"Best: {words(best.changes)}."
    if found.repeats:
        text = f"Best: {words(best.changes)}, {found.gain:+.1%} samples a second (run in turn with the script's own)."
    elif not found.own.rate:
        text += f" The script's own settings failed: {found.own.outcome.failure}"
    return [text, "\n".join(lines_to_write(best.changes))]


def as_json(found: Tuning) -> dict[str, Any]:
    """The answer for programs."""

    def trial(one: Trial) -> Mapping[str, Any]:
        known = {
            name: value for name, value in vars(one.outcome).items() if name not in ("settings", "degrees")
        }
        return {"changes": dict(one.changes), **known}

    return {
        "weft": "tuning",
        "version": 1,
        "settings": dict(found.own.outcome.settings),
        "trials": [trial(one) for one in found.trials],
        "turns": [{"best": best, "own": own} for best, own in found.repeats],
        "gain": found.gain,
        "best": dict(found.best.changes),
        "lines": lines_to_write(found.best.changes),
    }
