"""`weft doctor`: whether hosts are fit for a job. One line for each thing that was looked at, with the remedy."""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from weft.errors import LaunchError
from weft.launch.doctor.advice import Finding, of_host, of_hosts
from weft.launch.doctor.facts import Facts
from weft.launch.doctor.remote import ask, links
from weft.launch.engines.described import is_host
from weft.launch.engines.ssh import OPTIONS, read_options
from weft.untrusted import shown

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
        description="Looks at this host, or at others by ssh: names, networks, ports, versions, limits, clocks; and "
        "what passes from each of them to each other one.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", metavar="NAMES", help="look at these, through ssh: node1,node2")
    parser.add_argument(
        "--ssh-options", metavar="OPTIONS",
        help=f'for ssh, in one piece: --ssh-options="-F config -p 2222" (default: {OPTIONS})',
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(handler=main)


def main(options: argparse.Namespace) -> int:
    if options.ssh_options is not None and options.hosts is None:
        raise LaunchError("--ssh-options is for ssh: name the hosts with --hosts, or leave it out")
    if options.hosts is not None:
        findings = _elsewhere(options.hosts, options.ssh_options)
    else:
        findings = [*of_host("this host", Facts.here(), alone=True)]
    if options.json:
        print(json.dumps([{**asdict(finding), "well": finding.well} for finding in findings], indent=2))
    else:
        for finding in findings:
            print(finding)
    return 0 if all(finding.well for finding in findings) else WARNED


def _elsewhere(text: str, ssh_options: str | None) -> list[Finding]:
    hosts = [name.strip() for name in text.split(",")]
    for name in hosts:
        if not is_host(name):
            raise LaunchError(f"--hosts: {shown(name)} is no name of a host: write node1,node2")
    if len({*hosts}) < len(hosts):
        raise LaunchError(f"--hosts names a host twice: {text}")
    options = read_options(ssh_options, os.environ)
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = [*pool.map(lambda host: ask(host, options), hosts)]
    return [*of_hosts(answers, links(answers, options))]
