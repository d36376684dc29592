"""`weft rehearse`: a script on machines that are not there, to see whether it fits and what a step takes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from weft import config
from weft.cli.options import count
from weft.cli.run import add_settings, script_and_arguments, usual_partitions
from weft.compat import launch_environ
from weft.compat.modelparallel.container import container_environ, folders
from weft.errors import ConfigError
from weft.launch.rehearsal import Asked
from weft.machines.machine_file import parse_machines

EACH = 8
"""Devices of a host, where only their kind is given."""
_EXAMPLES = """\
examples:
  weft rehearse -n 64 --device A100-80 train.py --lr 0.001
  weft rehearse -n 8 --device RTX4090 --set partitions=8 train.py
  weft rehearse --cluster 8x8xH100 --partitions 8 train.py
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "rehearse",
        help="a script on machines that are not there: does it fit, and what does a step take",
        description="Runs a PyTorch script in one process up to its second training step, as the first rank of a job "
        "whose other ranks and devices are not there. Weights take no memory and nothing is trained. Says what each "
        "rank would hold, whether that fits, and what a step takes. Exit code 3: it does not fit.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="weft rehearse [-h] [-n RANKS] [--device NAME | --cluster MACHINES] [options] [-m] script ...",
    )
    parser.add_argument(
        "-n",
        "--ranks",
        type=count,
        metavar="N",
        help="how many ranks (default: one for each device of --cluster)",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--device", metavar="NAME", help="each rank's device, in hosts of 8: A100-80, H100, RTX4090"
    )
    where.add_argument(
        "--cluster", metavar="MACHINES", help="as for weft plan: 8x8xA100-80, 2xp5.48xlarge, mine.json"
    )
    parser.add_argument("--json", metavar="FILE", default="", help="write the answer there, too")
    add_settings(parser)
    parser.add_argument(
        "--smdistributed",
        action="store_true",
        help="the script is written for smdistributed and runs unchanged",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    parser.set_defaults(handler=main)


def main(options: argparse.Namespace) -> int:
    """Runs the script; its exit code."""
    asked = _asked(options)
    local = min(asked.ranks, parse_machines(asked.cluster).host.accelerators)
    variables = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(asked.ranks), "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    given = {"WEFT_CONFIG": options.config} if options.config else {}
    if options.set:
        given["WEFT_SET"] = json.dumps(
            config.with_those_of(os.environ, config.parse_assignments(options.set))
        )
    environ = {**os.environ, **given, **variables, **asked.to_environ()}
    container = {}
    if options.smdistributed:
        settings = config.resolve(None, environ, asked.ranks)
        environ |= launch_environ(environ, options.script, usual_partitions(settings, asked.ranks), "cpu")
        container = container_environ(environ, asked.ranks, options.script[1:])
    command = [sys.executable, "-m", "weft.torch.rehearse", *script_and_arguments(options)]
    with folders(container):
        return subprocess.run(command, env={**environ, **container}, check=False).returncode


def _asked(options: argparse.Namespace) -> Asked:
    """The question of a command line."""
    cluster = options.cluster
    if cluster is None:
        ranks = options.ranks or 1
        cluster = f"{-(-ranks // EACH)}x{min(ranks, EACH)}x{options.device}"
    machines = parse_machines(cluster)
    ranks = options.ranks or machines.size
    if machines.size < ranks:
        raise ConfigError(f"{cluster} has {machines.size} devices for {ranks} ranks: give one for each rank")
    return Asked(ranks, cluster, os.path.abspath(options.json) if options.json else "")
