"""What real jobs record: the parts of their steps add up, and what was planted is found where it belongs."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launching import run_ranks
from weft.analysis.analysis import Analysis
from weft.analysis.plan.comparison import beside_plan
from weft.cli.main import main
from weft.machines.catalogue import cpu
from weft.machines.machine_file import host_to_json
from weft.profiler.reading import read_run

TRAIN = """
import gc, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import weft.torch as weft

folder = sys.argv[1]
weft.init({"partitions": 2, "microbatches": 2, "optimize": "speed", "log_dir": folder + "/log"})
torch.manual_seed(0)
model = weft.DistributedModel(nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)], nn.BatchNorm1d(32)))
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
other = nn.Parameter(torch.ones(4))
other.grad = torch.ones(4)
plain = torch.optim.SGD([other], lr=0.01)
"""
SLEEPS = (
    TRAIN
    + """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * 6

    def __getitem__(self, number):
        if number % 8 == 0:
            time.sleep(0.25)
        return torch.full((32,), float(number) / 50)

@weft.step
def train_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss

kept = [[] for _ in range(200_000)]
Path(folder, f"in_use.{weft.rank()}").write_text(Path("/proc/self/statm").read_text())
data = torch.ones(1 << 24)  # 64 MiB of the script's own
for step, x in enumerate(torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=int(sys.argv[2]))):
    optimizer.zero_grad()
    loss = train_step(model, x)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    weft.log({"loss": loss, "note": "text"})
    time.sleep(0.1)  # as a log on a slow disk
    if step == 2:
        plain.step()
        gc.collect()
    if step == 3:
        weft.save_checkpoint(folder + "/saved", "tag", model=model, optimizer=optimizer)
while not any("\\n[" in path.read_text() for path in Path(folder).glob("run/host-*")):
    time.sleep(0.05)  # until the host was measured
"""
)
DIES = (
    TRAIN
    + """
@weft.step
def train_step(model, x):
    loss = model(x).pow(2).mean()
    if weft.rank() == 1 and x[0, 0] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    model.backward(loss)
    return loss

for step in range(1, 8):
    train_step(model, torch.full((8, 32), float(step)))
    optimizer.step()
"""
)


def record(folder: Path, script: str, *arguments: str, **more) -> Analysis:
    """What a job of two processes has recorded."""
    options = ["--record", str(folder / "run"), *more.pop("options", ())]
    done = run_ranks(2, script, [str(folder), *arguments], options=options, warm=True)
    if more.get("ends_well", True):
        done.check()
    return Analysis(read_run(folder / "run"))


def check_identity(analysis: Analysis) -> None:
    for rank in analysis.ranks:
        for period, parts in analysis.parts[rank].items():
            assert parts.total == pytest.approx(period.duration_s, abs=1e-6)


IN_PARTS = """
import torch
from torch import nn
import weft.torch as weft

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

weft.init({"tensor_parallel_degree": 2, "microbatches": 2})
model = weft.DistributedModel(nn.Sequential(Block(16), Block(16)))
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@weft.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

for _ in range(4):
    train_step(model, torch.ones(4, 16))
    optimizer.step()
"""


def test_what_ranks_with_parts_of_weights_exchange_has_spans(tmp_path: Path):
    analysis = record(tmp_path, IN_PARTS)
    check_identity(analysis)
    for rank in (0, 1):
        spans = [span for span in analysis.run.timeline.of_rank(rank) if span.step > 1]
        work = [span for span in spans if span.kind in "FB"]
        exchanged = [span for span in spans if span.kind == "tensor"]
        # In each microbatch: a sum for each of the two blocks, and one for the gradient between them.
        assert [sum(span.step == step for span in exchanged) for step in (2, 3, 4)] == [6, 6, 6]
        assert all(
            any(each.start_s <= span.start_s and span.end_s <= each.end_s for each in work)
            for span in exchanged
        )
        assert analysis.typical[rank].tensor > 0.0


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_planted_is_seen(tmp_path: Path, workers: int):
    analysis = record(tmp_path, SLEEPS, str(workers))
    run = analysis.run
    assert run.warnings == () and run.complete and run.ranks == (0, 1)
    assert run.timeline.steps == (1, 2, 3, 4, 5, 6), "what lies before the first step has none"
    check_identity(analysis)
    beside = beside_plan(analysis)
    assert beside is not None and len(beside.terms) == 6 and beside.step.planned > 0
    assert all(term.planned > 0 and term.measured > 0 for term in (*beside.terms, *beside.memory))
    assert len({facts.planned for facts in run.facts.values()}) == 1
    for rank in run.ranks:
        steps = run.steps[rank]
        assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
        assert all(step.samples == 8 and step.memory_bytes > 1 << 20 and step.work_s > 0 for step in steps)
        assert all({"loss", "gradient_norm"} == set(step.values) for step in steps)
        assert all(step.optimizer_s > 0 and step.cpu_s > 0 for step in steps)
        waited = {period.step: parts.data for period, parts in analysis.parts[rank].items()}
        if workers == 0:
            assert all(waited[step] > 0.2 for step in range(1, 6))
            assert all(step.data_s > 0.2 for step in steps[1:])
        kinds = {span.kind: span.step for span in run.timeline.of_rank(rank) if span.kind != "send"}
        assert {"data", "optimizer", "checkpoint", "collector", "prepare", "wait", "step"} <= set(kinds)
        assert kinds["checkpoint"] == 4
        assert sum(span.kind == "optimizer" for span in run.timeline.of_rank(rank)) == 7, (
            "one of the plain one"
        )
        assert min(span.step for span in run.timeline.of_rank(rank) if span.kind == "prepare") == 1
        facts = run.facts[rank]
        assert facts.ranks == 2 and facts.pp_rank == rank and facts.limit_bytes > 0 and facts.pid > 0
        assert {unit.partition for unit in facts.units} == {0, 1} and facts.settings["microbatches"] == 2
        assert facts.settings["measured_costs"] is True
        assert facts.settings["batch_norm_samples"] == 4, "8 samples in 2 microbatches"
        before_bytes = int((tmp_path / f"in_use.{rank}").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert facts.base_bytes - before_bytes > 60 << 20, "what the script holds is not the model's"
        assert facts.start_s < facts.joined_s <= run.steps[rank][0].start_s and "torch" in facts.versions
        (line,) = [line for line in run.script[rank] if line.text.startswith("time.sleep(0.1)")]
        assert line.asleep_s > line.computing_s
    assert run.facts[0].units == run.facts[1].units
    (samples,) = run.samples.values()
    assert samples[0].memory_limit_bytes > 0 and all(0 <= share <= 1 for share in samples[0].cores)


def test_a_rank_that_is_killed_within_a_step_leaves_a_run(tmp_path: Path, capsys):
    analysis = record(tmp_path, DIES, ends_well=False)
    run = analysis.run
    check_identity(analysis)
    assert not run.complete and run.ranks == (0, 1)
    assert [step.step for step in run.steps[1]] == [1, 2, 3]
    assert {1, 2, 3} <= {span.step for span in run.timeline.of_rank(1) if span.kind == "step"}
    assert run.failed is not None and (run.failed.rank, run.failed.step) == (1, 4)
    assert re.fullmatch(r"rank 1 on \S+ \(pid \d+\) was killed by SIGKILL.*", run.failed.headline)
    assert main(["report", str(tmp_path / "run")]) == 3
    assert f"CRITICAL: JobFailed: the job failed: {run.failed.headline}"[:60] in capsys.readouterr().out


def test_only_some_steps_are_kept(tmp_path: Path):
    analysis = record(tmp_path, SLEEPS, "0", options=["--set", "record_steps=first 2, 5-5"])
    check_identity(analysis)
    for rank in (0, 1):
        own = analysis.run.timeline.of_rank(rank)
        assert {span.step for span in own if span.kind in ("step", "F", "optimizer")} == {1, 2, 5}
        assert [step.step for step in analysis.run.steps[rank]] == [1, 2, 3, 4, 5, 6]
        assert all(
            parts.data > 0.2 for period, parts in analysis.parts[rank].items() if period.step in (1, 2, 5)
        )


TRANSFORMER = """
import sys
import torch
from torch import nn
import weft.torch as weft

weft.init({"partitions": 2, "microbatches": 2, "log_dir": sys.argv[1] + "/log"})
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)]
model = weft.DistributedModel(nn.Sequential(nn.Embedding(128, 64), *layers, nn.Linear(64, 128)))
optimizer = weft.DistributedOptimizer(torch.optim.Adam(model.parameters()))

@weft.step
def train_step(model, ids):
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    model.backward(loss)

for step in range(8):
    train_step(model, torch.randint(128, (8, 32)))
    optimizer.step()
"""
SIZES = "--layers 4 --hidden 64 --heads 4 --ffn 256 --vocab 128 --seq 32 --untied --precision fp32 --eager"


def test_a_machine_that_a_run_has_calibrated_predicts_that_run(tmp_path: Path, capsys):
    record(tmp_path, TRANSFORMER)
    usual = cpu(2)
    quick = {dtype: 1e4 * rate for dtype, rate in usual.accelerator.peak.items()}
    device = replace(usual.accelerator, peak=quick, bytes_per_s=1e4 * usual.accelerator.bytes_per_s)
    file = tmp_path / "machine.json"
    file.write_text(host_to_json(replace(usual, accelerator=device)))
    command = ["plan", "--calibrate", str(tmp_path / "run"), "--machine", str(file), *SIZES.split()]
    off = []
    for _ in range(2):
        assert main(command) == 0
        found = re.search(
            r"was off by ([-+\d.]+)%, it is off by ([-+\d.]+)% now", " ".join(capsys.readouterr().out.split())
        )
        assert found is not None
        off.append([abs(float(share)) for share in found.groups()])
    assert off[0][1] < off[0][0], "it predicted next to nothing, and now all work at least"
    assert off[1][0] == off[0][1], "the file has what was found"
