"""What training jobs record: a pipeline, replicas, one process, and a job that fails."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.launching import run_ranks
from weft.profiler.reading import read_recording
from weft.timeline import WORK

TRAIN = """
import gc, sys, torch
from torch import nn
import weft.torch as weft

gc.disable()  # collections have spans, too
weft.init({"microbatches": 4})
torch.manual_seed(0)
torch.set_num_threads(1)
model = weft.DistributedModel(nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())]))
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@weft.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    if len(sys.argv) > 1 and weft.rank() == 1 and train_step.calls == 3:
        raise ValueError("a fault")
    return loss

train_step.calls = 0
for _ in range(3):
    train_step.calls += 1
    optimizer.zero_grad()
    train_step(model, torch.randn(64, 64))
    optimizer.step()
"""


def test_a_pipeline(tmp_path: Path):
    run_ranks(2, TRAIN, config={"partitions": 2, "record": str(tmp_path)}, warm=True).check()
    recording = read_recording(tmp_path)
    timeline = recording.timeline
    assert recording.warnings == () and timeline.ranks == (0, 1) and timeline.steps == (1, 2, 3)
    for step in timeline.steps:
        one = timeline.of_step(step)
        for rank in one.ranks:
            spans = one.of_rank(rank)
            (whole,) = (span for span in spans if span.kind == "step")
            inside = [span for span in spans if span.kind in (*WORK, "wait")]
            assert {(span.kind, span.microbatch) for span in inside if span.kind in WORK} == {
                (kind, microbatch) for kind in "FB" for microbatch in range(4)
            }
            assert all(whole.start_s <= span.start_s <= span.end_s <= whole.end_s for span in inside)
            for span, later in zip(inside, inside[1:], strict=False):
                assert span.end_s <= later.start_s + 1e-9, "a rank does one thing at a time"
            assert Counter(span.kind for span in spans)["optimizer"] == 1
            assert {span.label for span in spans if span.kind == "wait"} <= {f"for rank {1 - rank}"}
        # Ranks of one host have one clock: a value cannot come before it was sent.
        for sender, receiver, what in ((0, 1, "value"), (1, 0, "gradient")):
            sent, got = (
                {s.microbatch: s for s in one.of_rank(rank) if (s.kind, s.label) == (kind, f"{what} {where}")}
                for rank, kind, where in (
                    (sender, "send", f"to rank {receiver}"),
                    (receiver, "recv", f"from rank {sender}"),
                )
            )
            assert sent.keys() == got.keys() == set(range(4))
            assert all(sent[index].start_s < got[index].end_s for index in sent)


def test_replicas_keep_their_ranks_and_show_the_averaging(tmp_path: Path):
    run_ranks(2, TRAIN, config={"partitions": 1, "record": str(tmp_path)}, warm=True).check()
    timeline = read_recording(tmp_path).timeline
    assert timeline.ranks == (0, 1)
    for rank in timeline.ranks:
        spans = timeline.of_step(2).of_rank(rank)
        kinds = [span.kind for span in spans if span.kind not in ("step", "prepare")]
        pieces = "".join(kind[0] for kind in kinds)
        assert pieces == "FBF" * 4 + "ro", "forward, backward and the end of the step function, four times"
        assert [span.microbatch for span in spans if span.kind == "B"] == [0, 1, 2, 3]


def test_a_job_that_fails_leaves_its_steps(tmp_path: Path):
    done = run_ranks(2, TRAIN, args=["fail"], config={"partitions": 2, "record": str(tmp_path)}, warm=True)
    assert done.returncode == 1 and "a fault" in done.stderr
    timeline = read_recording(tmp_path).timeline
    for rank in (0, 1):
        assert {span.step for span in timeline.of_rank(rank) if span.kind == "step"} >= {1, 2}
    assert any(span.kind == "F" and span.step == 3 for span in timeline.of_rank(1))


CHANGE = """
import gc
import sys
from pathlib import Path
import torch
from torch import nn
import weft.torch as weft
from weft.errors import UsageError

def step(model, x):
    loss = model(x).mean()
    model.backward(loss)
    return loss

def sizes():
    return [path.stat().st_size for path in sorted(Path(sys.argv[1]).rglob("*.spans"))]

gc.disable()  # collections have spans, too
first, second = (str(Path(sys.argv[1]) / name) for name in "ab")
weft.init({"record": first})
model = weft.DistributedModel(nn.Linear(2, 2))
run = weft.step(step)
run(model, torch.ones(2, 2))
assert len(sizes()) == 1 and sizes()[0] > 64, sizes()
weft.init({"record": first})
before = sizes()
weft.init({"record": second})
run(model, torch.ones(2, 2))
assert sizes()[0] == before[0] and sizes()[1] > 64, sizes()  # a busy machine has a span more here or there
before = sizes()
weft.init({})
run(model, torch.ones(2, 2))
weft.shutdown()
assert sizes() == before
try:
    weft.init({"record": sys.argv[0]})
except UsageError as error:
    assert "where nothing can be written" in str(error)
    print("passed")
"""


def test_the_folder_may_change(tmp_path: Path):
    assert "passed" in run_ranks(1, CHANGE, args=[str(tmp_path)], warm=True).check().stdout
