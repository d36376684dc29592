"""`weft trace`: the graph of a model, from a script's function that makes one."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import weft
from weft.cli.draw import write
from weft.cli.options import count
from weft.errors import ConfigError, UsageError
from weft.graph import Graph
from weft.units import format_bytes

_EXAMPLES = """\
the script's function takes nothing and returns the model and a mini-batch, and if need be a loss function:

  def example():
      return model, batch                # model(batch); a tuple: model(*batch); a dict: model(**batch)

examples:
  weft trace train.py:example --out gpt.graph.json
  weft trace train.py:example --microbatches 32 --units 200 --out gpt.graph.json
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "trace",
        help="measure a model in one process and write its graph",
        description="Runs a model on one microbatch, in this process, and writes its units with what they cost: "
        "a graph for weft partition and weft simulate.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", metavar="SCRIPT:FUNCTION", help="where the model comes from")
    parser.add_argument("--out", required=True, metavar="FILE", help="the graph to write: name.graph.json")
    parser.add_argument(
        "--microbatches",
        type=count,
        default=1,
        metavar="M",
        help="into how many the mini-batch is cut (default: 1)",
    )
    parser.add_argument(
        "--units",
        type=count,
        default=64,
        metavar="N",
        help="down to how many units modules of PyTorch are opened (default: 64)",
    )
    parser.set_defaults(handler=main)


def main(options: argparse.Namespace) -> int:
    for name in ("microbatches", "units"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} is {getattr(options, name)}: it must be at least 1")
    try:
        graph = _traced(options)
    except UsageError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__.with_traceback(_yours(error.__cause__.__traceback__)))
        raise
    write(Path(options.out), graph.to_json())
    parameters = sum(unit.parameter_bytes for unit in graph)
    forward, backward = (
        sum(getattr(unit, f"{half}_ms") for unit in graph) for half in ("forward", "backward")
    )
    print(
        f"{options.out}: {len(graph)} units, {len(graph.tensors)} tensors between them, {format_bytes(parameters)} of "
        f"parameters; a microbatch takes {forward:.3f} ms forward, {backward:.3f} ms backward"
    )
    return 0


def _traced(options: argparse.Namespace) -> Graph:
    path, colon, function = options.script.rpartition(":")
    if not colon or function.endswith(".py"):
        path, function = options.script, "example"
    try:
        from weft.torch.example_graph import checked_example, run_example, traced_graph
    except ImportError as error:
        raise UsageError(f"weft trace needs PyTorch, which cannot be imported: {error}") from None
    found = run_example(Path(path), function)
    if isinstance(found, (tuple, list)) and found and _is_keras(found[0]):
        from weft.tensorflow import example_graph

        return example_graph.traced_graph(found, options.microbatches)
    return traced_graph(checked_example(found, Path(path), function), options.microbatches, options.units)


def _is_keras(model: Any) -> bool:
    """True if this is a model of a Keras that is imported."""
    known = (sys.modules.get(name) for name in ("keras", "tf_keras"))
    return any(keras is not None and isinstance(model, keras.Model) for keras in known)


def _yours(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the first line that is not weft's or the importer's on."""
    own = (str(Path(weft.__file__).parent), "<frozen ")
    whole = trace
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(own):
        trace = trace.tb_next
    return trace or whole
