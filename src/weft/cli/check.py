"""`weft check`: a script is read, and where a function of it is named, its model is run once in this process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from weft.check import Finding, Given, Grade, as_json, as_text, check_script, read_script
from weft.cli.options import count
from weft.errors import ConfigError, UsageError
from weft.launch.local import usable_cores

_EXAMPLES = """\
examples:
  weft check train.py
  weft check train.py -n 8 --json
  weft check train.py:example --partitions 4 --microbatches 8    runs the model that example() gives, as weft trace does

the exit code is 1 if something is wrong, and 0 if there are only hints and things that are slow
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="say what in a script will hurt when it is distributed",
        description="Reads a script, without running it, and says what will hurt when it is distributed: each with its "
        "line, the reason and the line to write.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "script",
        metavar="SCRIPT[:FUNCTION]",
        help="the script, and the function that makes its model and a mini-batch",
    )
    parser.add_argument("-n", type=count, dest="ranks", metavar="RANKS", help="processes of the job")
    parser.add_argument(
        "--partitions", type=count, metavar="N", help="in place of the setting that the script has"
    )
    parser.add_argument(
        "--microbatches", type=count, metavar="M", help="in place of the setting that the script has"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=main)


def main(options: argparse.Namespace) -> int:
    for name, value in (
        ("-n", options.ranks),
        ("--partitions", options.partitions),
        ("--microbatches", options.microbatches),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}: it must be at least 1")
    path, colon, function = options.script.rpartition(":")
    if not colon or function.endswith(".py"):
        path, function = options.script, ""
    given = Given(options.ranks, usable_cores(), options.partitions, options.microbatches)
    found = check_script(Path(path), given)
    if function:
        found = sorted([*found, *_run(Path(path), function, given)], key=lambda each: (each.line, each.rule))
    print(json.dumps(as_json(path, found), indent=1) if options.json else as_text(path, found))
    return int(any(each.grade is Grade.WRONG for each in found))


def _run(path: Path, function: str, given: Given) -> list[Finding]:
    """The findings that show only when the script's model runs."""
    script = read_script(path, given)
    try:
        from weft.torch import example_check
        from weft.torch.example_graph import load_example, traced_graph
    except ImportError as error:
        raise UsageError(
            f"weft check SCRIPT:FUNCTION needs PyTorch, which cannot be imported: {error}"
        ) from None
    example = load_example(path, function)
    line = script.functions[function].lineno if function in script.functions else 1
    partitions, microbatches = script.partitions or 1, script.microbatches or 1
    found = [
        *example_check.check_batch(example, microbatches, line),
        *example_check.check_shared(example.model, partitions, line),
    ]
    if any(each.rule == "batch_not_divided" for each in found):
        microbatches = 1
    graph = traced_graph(example, microbatches)
    return [
        *found,
        *example_check.check_even(graph, partitions, line),
        *example_check.check_run(example, microbatches, line),
    ]
