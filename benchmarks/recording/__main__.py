"""What recording costs: a span, a step's line, a whole recording of a step, the host's sampler; torch.profiler beside.

python -m benchmarks.recording

All figures are processor time, so that other load on the machine changes them little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks import machine
from weft.analysis.run import Facts
from weft.profiler.clock import Clock
from weft.profiler.detail import REPORT, Control, parse_detail
from weft.profiler.facts import write_facts
from weft.profiler.recorder import Recorder
from weft.profiler.steps import Book
from weft.watch.process import host_name

SPANS = 64
"""Spans of a step: 8 microbatches, forward and backward, with their messages and waits."""


def span_us(folder: Path, count: int) -> tuple[float, float]:
    """Microseconds of a span as it is recorded, and with its share of what writing it to the file takes."""
    recorder = Recorder.open(folder, 0, 1)
    recorder.book = Book.open(folder, 0, 1, Clock.here())
    added_s = written_s = 0.0
    for _ in range(count // 1000):
        before = time.thread_time()
        for number in range(1000):
            recorder.add("F", 1, number, 1.0, 2.0)
        added = time.thread_time()
        recorder.flush()
        added_s += added - before
        written_s += time.thread_time() - added
    recorder.close()
    return added_s / count * 1e6, (added_s + written_s) / count * 1e6


def record_step(recorder: Recorder, step: int) -> None:
    """All that a recording does in a step."""
    recorder.begin_step(step)
    for number in range(SPANS):
        recorder.add("F", step, number, 1.0, 2.0)
    recorder.end_step(32, 1 << 30)
    recorder.note({"loss": 0.5, "gradient_norm": 1.5})


def step_us(folder: Path, count: int) -> float:
    """Microseconds that a recording with all its parts takes of a step with `SPANS` spans."""
    recorder = Recorder.open(folder, 0, 1)
    recorder.book = Book.open(folder, 0, 1, Clock.here())
    recorder.detail, recorder.control = parse_detail(REPORT), Control(folder)
    before = time.thread_time()
    for step in range(1, count + 1):
        record_step(recorder, step)
    after = time.thread_time()
    recorder.close()
    return (after - before) / count * 1e6


def sampler_share(folder: Path, seconds: float) -> float | None:
    """The share of a core that the sampler of this host takes, without its start; nothing without psutil."""
    facts = Facts(0, 1, host_name(), os.getpid(), pp_rank=0, rdp_rank=0)
    write_facts(folder, facts, Clock.here())
    process = subprocess.Popen(
        [sys.executable, "-m", "weft.profiler.host.child", str(folder), str(os.getpid())]
    )
    try:
        until = time.monotonic() + 60
        while not any("\n[" in path.read_text() for path in folder.glob("host-*")):
            if process.poll() is not None or time.monotonic() > until:
                return None
            time.sleep(0.1)
        before_s, began = process_s(process.pid), time.monotonic()
        time.sleep(seconds)
        return (process_s(process.pid) - before_s) / (time.monotonic() - began)
    finally:
        process.kill()
        process.wait()


def process_s(pid: int) -> float:
    """Processor time of a process, to a nanosecond where the system tells."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def train(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def profiled_ratio(steps: int, rounds: int) -> tuple[float, float]:
    """Processor time of a plain step in milliseconds, and how many times that a step under torch.profiler takes."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)]
    model, x = nn.Sequential(*layers), torch.randn(64, 256)
    train(model, x)
    plain: list[float] = []
    profiled: list[float] = []
    for _ in range(rounds):
        plain.append(_taken(lambda: train(model, x), steps))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            profiled.append(_taken(lambda: train(model, x), steps))
    return statistics.median(plain) * 1e3, statistics.median(profiled) / statistics.median(plain)


def _taken(call: Callable[[], None], times: int) -> float:
    before = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - before) / times


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.recording", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--spans", type=int, default=200_000, help="spans that are recorded")
    parser.add_argument("--steps", type=int, default=2000, help="steps that are recorded")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the sampler runs")
    parser.add_argument("--rounds", type=int, default=7, help="the table has medians of so many")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler tells on stderr of each start and end
    print(f"{machine.machine_name()}, PyTorch {torch.__version__}\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        added, written = (
            statistics.median(column)
            for column in zip(*(span_us(folder, given.spans) for _ in range(given.rounds)), strict=True)
        )
        step = statistics.median(step_us(folder, given.steps) for _ in range(given.rounds))
        share = sampler_share(folder, given.seconds)
    plain_ms, profiled = profiled_ratio(20, given.rounds)
    print("| what | processor time | target |\n| --- | ---: | ---: |")
    print(f"| a span | {added:.2f} us | 1 us |")
    print(f"| a span, written to the file | {written:.2f} us | |")
    print(f"| all of a step with {SPANS} spans | {step:.0f} us | |")
    print(f"| the same, of a step of 100 ms | {step / 1e5:.3%} | 0.1 % |")
    print(
        f"| the sampler of a host, of a core | {'no psutil' if share is None else f'{share:.3%}'} | 0.1 % |"
    )
    print(f"| torch.profiler, of a step of {plain_ms:.1f} ms | {profiled - 1:.0%} | |")


if __name__ == "__main__":
    main()
