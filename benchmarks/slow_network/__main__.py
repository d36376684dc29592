"""What a slow link between two hosts costs data parallelism: DDP, weft's algorithms, compression.

    python -m benchmarks.slow_network --rates 1gbit,200mbit

Two hosts are two network namespaces with a veth pair between them, limited with tc: Linux, as root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import machine
from benchmarks.slow_network.rank import CONTENDERS

RANKS, PORT = 4, 29417


def ip(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[list[str]]:
    """Two namespaces whose only link carries `rate` each way; the names of both, gone at the end."""
    names = [f"weft{os.getpid()}{end}" for end in "ab"]
    links = [f"wv{os.getpid()}{end}" for end in "ab"]
    made = []
    try:
        for name in names:
            ip("ip", "netns", "add", name)
            made.append(name)
        ends = [["name", link, "netns", name] for link, name in zip(links, names, strict=True)]
        ip("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for index, (name, link) in enumerate(zip(names, links, strict=True)):
            ip("ip", "-n", name, "link", "set", link, "name", "slow")
            ip("ip", "-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", "slow")
            ip("ip", "-n", name, "link", "set", "slow", "up")
            ip("ip", "-n", name, "link", "set", "lo", "up")
            limit = ["rate", rate, "burst", "256kb", "latency", "50ms"]
            ip("tc", "-n", name, "qdisc", "add", "dev", "slow", "root", "tbf", *limit)
        yield names
    finally:
        for name in made:
            ip("ip", "netns", "del", name)


def run(rate: str, batch: int, given: argparse.Namespace) -> list[dict[str, object]]:
    """All contenders in turns over one link: a line of each rank for each step."""
    told = [f"tcp://10.77.0.1:{PORT}", str(given.steps), given.contenders, str(given.width), str(batch)]
    with two_hosts(rate) as names:
        ranks = []
        for rank in range(RANKS):
            program = [sys.executable, "-m", "benchmarks.slow_network.rank", str(rank), *told]
            command = ["ip", "netns", "exec", names[rank // 2], *program]
            environ = {
                **os.environ,
                **machine.MALLOC_SETTINGS,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "slow",
            }
            ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
        try:
            texts = [each.communicate(timeout=given.limit)[0] for each in ranks]
        finally:
            for each in ranks:
                each.kill()
                each.wait()
    if any(each.returncode for each in ranks):
        sys.exit(f"a rank failed: {[each.returncode for each in ranks]}")
    return [
        {"rate": rate, "batch": batch, **json.loads(line)} for text in texts for line in text.splitlines()
    ]


def table(lines: list[dict[str, object]]) -> None:
    for rate, batch in dict.fromkeys((line["rate"], line["batch"]) for line in lines):
        print(
            f"\n| {rate}, batch {batch} | step (s) | communication (s) | of DDP's | MB sent by a host | theory "
            "| measured/theory |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- |")
        here = [line for line in lines if (line["rate"], line["batch"]) == (rate, batch)]
        rows = {name: [line for line in here if line["contender"] == name] for name in CONTENDERS}
        rows = {name: found for name, found in rows.items() if found}
        steps = {name: statistics.median(x["step_s"] for x in found) for name, found in rows.items()}
        compute = steps["no sum"]
        for name, found in rows.items():
            sent = statistics.median(x["sent_bytes"] for x in found) / 1e6
            theory = CONTENDERS[name] * found[0]["parameters"] * 4 / 1e6
            waited = steps[name] - compute
            share = f"{waited / (steps['ddp'] - compute):.2f}" if "ddp" in steps and name != "no sum" else ""
            ratio = f"{sent / theory:.3f}" if theory else ""
            print(
                f"| {name} | {steps[name]:.2f} | {waited:.2f} | {share} | {sent:.1f} | {theory:.1f} | {ratio} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.slow_network", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rates", default="1gbit,200mbit", help="of the link, as tc writes them")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[4, 256], help="samples of a rank: a table for each"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="of each contender, after one that is not counted"
    )
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument(
        "--width", type=int, default=2048, help="12 layers of width x width: 2048 makes 50 M values"
    )
    parser.add_argument("--limit", type=float, default=1200, help="seconds for one table")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    unknown = set(given.contenders.split(",")) - set(CONTENDERS)
    if unknown or "no sum" not in given.contenders:
        parser.error(
            f"--contenders has to be of {', '.join(CONTENDERS)}, with 'no sum', not {given.contenders}"
        )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the hosts go too
    try:
        with two_hosts("1gbit"):
            pass
    except OSError as error:
        print(
            f"skipped: two network namespaces cannot be made here ({error}); run this as root on Linux, with ip and tc"
        )
        return
    lines = []
    for rate in given.rates.split(","):
        for batch in given.batches:
            lines += run(rate, batch, given)
    if given.json:
        given.json.write_text(json.dumps(lines), encoding="utf-8")
    print(
        f"{machine.machine_name()}, {RANKS} ranks on two hosts, medians of {given.steps} steps and all ranks"
    )
    table(lines)


if __name__ == "__main__":
    main()
