"""Replicas that are killed at random moments while a job trains, and what that costs.

python -m tests.fault.rejoin [KILLS] [--layout 2x2] [--seed SEED] [--sleep SECONDS]

A layout is partitions x replicas. After so many kills the job is asked to end. Then losses, weights and buffers of all
ranks after each step are compared with one process that leaves out the samples which the ranks say were left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.fault.workers import rejoining
from tests.launching import SOURCE
from weft.launch.discovery import REPLICA

JOB = Path(rejoining.__file__)
LAYOUTS = {"1x2": (1, 2), "2x2": (2, 2), "1x4": (1, 4)}
RELATIVE = 1e-9


def options(layout: str, least: int = 1, restarts: int = 1000) -> list[str]:
    """Those of `weft run`, but for the number of ranks."""
    partitions, _ = LAYOUTS[layout]
    return [
        "--min-replicas", str(least), "--partitions", str(partitions), "--max-restarts", str(restarts), "--quiet",
    ]  # fmt: skip


def ranks(layout: str) -> int:
    partitions, replicas = LAYOUTS[layout]
    return partitions * replicas


def rows(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The notes of ranks about each step, the last time; the last line of one that was killed may be cut off."""
    found: dict[int, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("log-*.jsonl")):
        mine: dict[int, dict[str, Any]] = {}
        for line in file.read_text().splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                mine[row["step"]] = row
        found[int(file.stem.partition("-")[2])] = [*mine.values()]
    return found


def check(folder: Path, layout: str) -> tuple[float, int]:
    """The largest relative difference from one process, and how many replicas were away, over all steps.

    Raises:
        AssertionError: Ranks differ in whose samples count, or a loss, a weight or a batch is another one.
    """
    partitions, replicas = LAYOUTS[layout]
    counted: dict[int, Sequence[int]] = {}
    written = rows(folder)
    for rank, mine in written.items():
        for row in mine:
            first = counted.setdefault(row["step"], row["counted"])
            assert first == row["counted"], (
                f"rank {rank} in step {row['step']}: {row['counted']}, not {first}"
            )
    assert sorted(counted) == list(range(1, len(counted) + 1)), "a step is missing"
    expected = _one_process(counted, replicas)
    worst = 0.0
    for rank, mine in written.items():
        for row in mine:
            losses, sums, prints = expected[row["step"]]
            replica = rank // partitions
            where = f"rank {rank}, step {row['step']}"
            if row["began"] == row["step"]:
                assert abs(row["x"] - sums[replica]) < 1e-9, f"{where}: another batch"
                worst = max(worst, _apart(row["loss"], losses[replica], where))
            for name, value in row["prints"].items():
                worst = max(worst, _apart(value, prints[name], f"{where}, {name}"))
    return worst, sum(replicas - len(each) for each in counted.values())


def _apart(one: float, other: float, where: str) -> float:
    found = abs(one - other) / max(abs(other), 1e-3)
    assert found < RELATIVE, f"{where}: {one} and not {other}"
    return found


_Expected = tuple[Mapping[int, float], Mapping[int, float], Mapping[str, float]]


def _one_process(counted: Mapping[int, Sequence[int]], replicas: int) -> dict[int, _Expected]:
    """For each step the losses and sums of samples of all replicas, and prints of the weights after it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _train(counted, replicas)
    finally:
        torch.set_default_dtype(before)


def _train(counted: Mapping[int, Sequence[int]], replicas: int) -> dict[int, _Expected]:
    model = rejoining.make_model()
    optimizer = rejoining.make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    data = rejoining.samples()

    def batches(replica: int) -> Any:
        sampler = DistributedSampler(data, replicas, replica, seed=rejoining.SEED)
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from (x for (x,) in DataLoader(data, rejoining.BATCH, sampler=sampler))
            epoch += 1

    loaders = [batches(replica) for replica in range(replicas)]
    found: dict[int, _Expected] = {}
    for step in sorted(counted):
        optimizer.zero_grad()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        kept: dict[str, torch.Tensor] = {}
        losses, sums = {}, {}
        for replica, loader in enumerate(loaders):
            x = next(loader)
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            sums[replica], losses[replica] = float(x.sum()), 0.0
            for part in x.chunk(rejoining.MICROBATCHES):
                loss = (model(part) - part).square().mean() / rejoining.MICROBATCHES
                losses[replica] += loss.item()
                if replica in counted[step]:
                    (loss / len(counted[step])).backward()
            if replica == min(counted[step]):
                kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        prints = {name: rejoining.print_of(p) for name, p in model.named_parameters()}
        prints |= {name: rejoining.print_of(b.double()) for name, b in model.named_buffers()}
        found[step] = losses, sums, prints
    return found


class Campaign:
    """One job, and who of it is there. ``steps_s``: when its ranks have ended steps."""

    def __init__(self, layout: str, folder: Path, sleep_s: float) -> None:
        import subprocess

        self.layout, self.folder = layout, folder
        self.mark = f"{os.getpid()}-{random.random()}"
        environ = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "REJOIN_MARK": self.mark}
        command = [sys.executable, "-m", "weft", "run", "-n", str(ranks(layout)), *options(layout)]
        self.process = subprocess.Popen(
            [*command, str(JOB), str(folder), "1000000", "[]", str(sleep_s)], env=environ, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.away: set[int] = set()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            words = line.split()
            if line.startswith("weft: replica") and "is lost" in line:
                self.away.add(int(words[2]))
            if line.startswith("weft: replica") and "has joined" in line:
                self.away.discard(int(words[2]))

    def processes(self) -> dict[int, int]:
        """The ranks that run: their processes, and the replica of each."""
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                text = Path(f"/proc/{name}/environ").read_text()
            except (OSError, UnicodeDecodeError):
                continue
            environ = dict(each.split("=", 1) for each in text.split("\0") if "=" in each)
            if environ.get("REJOIN_MARK") == self.mark and REPLICA in environ and "WEFT_SHARED_FD" in environ:
                found[int(name)] = int(environ[REPLICA].split(":")[2])
        return found

    def last_step(self) -> int:
        return max((mine[-1]["step"] for mine in rows(self.folder).values() if mine), default=0)


def run(kills: int, layout: str, seed: str, sleep_s: float) -> None:
    draw = random.Random(seed)
    _, replicas = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Campaign(layout, folder, sleep_s)
        began = time.monotonic()
        while not job.last_step():
            time.sleep(0.1)
            assert job.process.poll() is None, "".join(job.lines)
        print(f"{layout}: first step after {time.monotonic() - began:.1f} s", flush=True)
        killed_s: list[tuple[float, bool]] = []
        again = True
        while len(killed_s) < kills:
            time.sleep(draw.uniform(0, 3))
            running = job.processes()
            there = [pid for pid, replica in running.items() if replica not in job.away]
            starting = [pid for pid, replica in running.items() if replica in job.away]
            may = there if len(job.away) < replicas - 1 else []
            victims = may or (starting if again else [])
            if starting and may and again:
                victims = draw.choice([may, starting])
            if not victims:
                continue
            again = victims is may  # a replica that is killed in its start waits longer each time
            pid, lost = draw.choice(sorted(victims)), len([line for line in job.lines if "is lost" in line])
            killed_s.append((time.monotonic(), pid in there))
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while len([line for line in job.lines if "is lost" in line]) == lost:
                assert time.monotonic() < deadline and job.process.poll() is None, "".join(job.lines[-40:])
                time.sleep(0.01)
        step = job.last_step()
        deadline = time.monotonic() + 120
        while job.last_step() < step + 3 or job.away:
            assert time.monotonic() < deadline and job.process.poll() is None, "".join(job.lines[-40:])
            time.sleep(0.1)
        job.process.send_signal(signal.SIGTERM)
        code = job.process.wait(60)
        assert code == os.EX_TEMPFAIL, (code, "".join(job.lines[-40:]))
        assert not job.processes()
        worst, away = check(folder, layout)
        _tell(folder, killed_s)
        print(f"{layout}: {len(killed_s)} kills, {job.last_step()} steps, replicas away in {away} of them in all; "
              f"at most {worst:.1e} from one process", flush=True)  # fmt: skip


def _tell(folder: Path, killed_s: Sequence[tuple[float, bool]]) -> None:
    """The time that a kill has cost those that went on: the step in which it fell, less the usual one."""
    first: dict[int, float] = {}
    for mine in rows(folder).values():
        for row in mine:
            first[row["step"]] = max(first.get(row["step"], 0.0), row["time"])
    times = [first[step] for step in sorted(first)]
    usual = statistics.median(b - a for a, b in zip(times, times[1:], strict=False))
    lost = []
    for killed, _ in killed_s:
        gaps = [b - a for a, b in zip(times, times[1:], strict=False) if b > killed][:2]
        lost.append(max(0.0, max(gaps, default=0.0) - usual))
    members = [each for each, (_, there) in zip(lost, killed_s, strict=True) if there]
    print(
        f"a step takes {usual * 1e3:.0f} ms; a kill of a replica that was there ({len(members)}) cost the others "
        f"{statistics.median(members or [0]) * 1e3:.0f} ms in the middle, "
        f"{max(members, default=0) * 1e3:.0f} ms at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kills", nargs="?", type=int, default=10)
    parser.add_argument("--layout", choices=LAYOUTS, default="1x2")
    parser.add_argument("--seed", default=str(time.time_ns()))
    parser.add_argument("--sleep", type=float, default=0.05)
    given = parser.parse_args()
    print(f"--seed {given.seed}")
    run(given.kills, given.layout, given.seed, given.sleep)


if __name__ == "__main__":
    main()
