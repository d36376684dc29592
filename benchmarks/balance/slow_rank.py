"""A rank that becomes slower: a step of the first split, after `rebalance`, and of the best split by trying.

    python -m benchmarks.balance.slow_rank --rounds 5

The README beside this file says what the rows mean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.gpt import GPT, GPTConfig

ROOT = Path(__file__).resolve().parents[2]
BATCH, MICROBATCHES, SEED = 16, 8, 20
BUSY = "while True: pass"
STEPS = 24
"""Two comparisons of the ranks, and the first steps of a split, which do not count."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.balance.slow_rank", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each split has its turn")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn that count")
    parser.add_argument(
        "--busy", type=int, default=1, help="how many busy processes share the second rank's core"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


class Step(NamedTuple):
    """The seconds that a step took, and how much of a processor other work had meanwhile."""

    took_s: float
    others: float


class Job:
    """A GPT that two ranks train, each on a core of its own."""

    def __init__(self, small: bool) -> None:
        import weft.torch as weft

        weft.init(
            {
                "partitions": 2,
                "microbatches": MICROBATCHES,
                "optimize": "speed",
                "memory_weight": 0.0,
                "rebalance": True,
            }
        )
        self.rank = weft.rank()
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[self.rank]})
        torch.manual_seed(SEED)
        blocks, width = (8, 16) if small else (8, 128)
        config = GPTConfig(
            blocks=blocks, width=width, heads=width // 16, context=16 if small else 64, vocabulary=1000
        )
        self.ids = torch.randint(config.vocabulary, (BATCH, config.context))
        self.model = weft.DistributedModel(GPT(config))
        self.optimizer = weft.DistributedOptimizer(torch.optim.AdamW(self.model.parameters()))

        @weft.step
        def train(model: nn.Module, ids: Tensor) -> None:
            logits = model(ids)
            model.backward(nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()))

        self._train = train
        self.watch(os.getpid())

    def step(self) -> Step:
        """Trains a step."""
        self.others.share()
        start_s = time.perf_counter()
        self.optimizer.zero_grad()
        self._train(self.model, self.ids)
        self.optimizer.step()
        return Step(time.perf_counter() - start_s, self.others.share())

    def split(self) -> tuple[int, ...]:
        """The partition of each unit."""
        return tuple(unit.partition for unit in self.model.plan.units if unit.partition >= 0)

    def use(self, split: tuple[int, ...]) -> None:
        """Let the units be there from the next step on."""
        from weft.torch.placed.move import move, moved
        from weft.torch.session import current

        names = [unit.name for unit in self.model.plan.units if unit.partition >= 0]
        plan = moved(self.model.plan, dict(zip(names, split, strict=True)), (0, 1), self.model.plan.planned)
        move(current.session(), self.model, plan)

    def watch(self, own: int, *more: int) -> None:
        """From now on these processes of this rank's are none of the others'; all ranks call this together."""
        from weft.torch.session import current
        from weft.torch.session.collectives import gather_texts

        texts = gather_texts(json.dumps([own, *more]), current.session().group("world"))
        self.others = Others([number for text in texts for number in json.loads(text)])

    def until_moved(self) -> int:
        """The steps until units move by themselves."""
        first, count = self.split(), 0
        while self.split() == first and count < STEPS:
            self.step()
            count += 1
        return count


def quick_ms(steps: list[Step]) -> float:
    """The median of the quarter of the steps beside which other work took the least time."""
    quiet = sorted(steps, key=lambda step: step.others)[: max(1, len(steps) // 4)]
    return 1e3 * median(step.took_s for step in quiet)


class Others:
    """The share of the machine's processors that other processes have."""

    def __init__(self, own: list[int]) -> None:
        self._own = own
        self._last = self._now()

    def _now(self) -> tuple[float, float, float]:
        own = 0.0
        for number in self._own:
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            own += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), machine.busy_s(), own

    def share(self) -> float:
        """Since the last call."""
        before, self._last = self._last, self._now()
        passed, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        return max(0.0, busy - own) / passed


def busy_beside(core: int, count: int) -> list[subprocess.Popen[bytes]]:
    """Processes that do nothing but keep a core busy."""
    pinned = f"import os; os.sched_setaffinity(0, {{{core}}})\n{BUSY}"
    return [subprocess.Popen([sys.executable, "-c", pinned]) for _ in range(count)]


def work(given: argparse.Namespace) -> None:
    from weft.torch.session import current
    from weft.torch.split.rebalance import Rebalance

    cores = sorted(os.sched_getaffinity(0))
    job = Job(given.small)
    alone = [job.step() for _ in range(14)][2:]
    first = job.split()
    current.session().rebalance = Rebalance(())  # what it has noted so far was another machine
    busy = busy_beside(cores[1], given.busy) if job.rank == 1 else []
    try:
        job.watch(os.getpid(), *(each.pid for each in busy))
        waited = job.until_moved()
        job.until_moved()  # a second time, where the times of the first were not enough
        after = job.split()
        current.session().rebalance = None
        cuts = sorted({split.index(1) for split in (first, after) if 1 in split})
        around = range(max(1, cuts[0] - 1), min(len(first), cuts[-1] + 3))
        splits = [(0,) * cut + (1,) * (len(first) - cut) for cut in around]
        took: dict[tuple[int, ...], list[Step]] = {split: [] for split in (*splits, first, after)}
        for _ in range(given.rounds):
            for split, own in took.items():
                job.use(split)
                own += [job.step() for _ in range(2 + given.steps)][2:]
    finally:
        for each in busy:
            each.kill()
    if job.rank == 0:
        steps_ms = {split: quick_ms(own) for split, own in took.items()}
        best = min(steps_ms, key=lambda split: steps_ms[split])
        rows = {
            "both ranks alike, first split": (first, quick_ms(alone)),
            "one rank slow, first split": (first, steps_ms[first]),
            "after rebalance": (after, steps_ms[after]),
            "best split by trying": (best, steps_ms[best]),
        }
        print("| | units of the two ranks | step ms | to the best |\n| --- | ---: | ---: | ---: |")
        for name, (split, step_ms) in rows.items():
            counts = f"{split.count(0)} + {split.count(1)}"
            print(f"| {name} | {counts} | {step_ms:.0f} | {step_ms / steps_ms[best]:.3f} |")
        print(f"\nunits moved after {waited} steps; tried: " + ", ".join(
            f"{split.count(0)} + {split.count(1)} {step_ms:.0f} ms" for split, step_ms in sorted(steps_ms.items())
        ))  # fmt: skip
        if given.json:
            given.json.write_text(
                json.dumps({"rows": {n: ms for n, (_, ms) in rows.items()}, "waited": waited})
            )


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    if given.worker:
        work(given)
        return 0
    print(machine.machine_name(), flush=True)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "weft", "run", "--quiet", "-n", "2", __file__, "--worker", *arguments]
    return subprocess.run(command, env=environ, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
