"""`weft doctor`: one line for each thing that was looked at, with the remedy."""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from weft.errors import LaunchError
from weft.foreign import shown
from weft.launch.doctor.advice import Finding, of_host, of_hosts
from weft.launch.doctor.facts import Facts
from weft.launch.doctor.remote import ask, pairs
from weft.launch.engines.described import is_host

_EXAMPLES = """\
examples:
  weft doctor
  weft doctor --hosts node1,node2
  weft doctor --hosts node1,node2 --json
"""
WARNED = 1
"""The exit code if there is a warning."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="look whether hosts are fit for a job",
        description="Looks at this host, or at others by ssh: names, networks, ports, versions, limits, clocks, speed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", metavar="NAMES", help="look at these, through ssh: node1,node2")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(handler=main)


def main(options: argparse.Namespace) -> int:
    findings = _elsewhere(options.hosts) if options.hosts is not None else _here()
    if options.json:
        print(json.dumps([{**asdict(finding), "well": finding.well} for finding in findings], indent=2))
    else:
        for finding in findings:
            print(finding)
    return 0 if all(finding.well for finding in findings) else WARNED


def _here() -> list[Finding]:
    return [*of_host("this host", Facts.here(), alone=True)]


def _elsewhere(text: str) -> list[Finding]:
    hosts = [name.strip() for name in text.split(",")]
    for name in hosts:
        if not is_host(name):
            raise LaunchError(f"--hosts: {shown(name)} is no name of a host: write node1,node2")
    if len({*hosts}) < len(hosts):
        raise LaunchError(f"--hosts names a host twice: {text}")
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = [*pool.map(ask, hosts)]
    return [*of_hosts(answers, pairs(answers))]
