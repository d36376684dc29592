"""Record a training, then read the recording: where the time of each step went, the report, a picture and a page."""

from pathlib import Path

import torch
from torch import nn

import weft.torch as weft
from weft.analysis.analysis import Analysis
from weft.profiler.reading import read_run
from weft.report.page import Entry, page
from weft.report.picture import timeline_svg
from weft.report.run.report import Report
from weft.report.run.text import run_text
from weft.rules.rule import judge
from weft.rules.table import RULES
from weft.rules.verdict import verdict

weft.init({"partitions": 2, "microbatches": 4, "record": "recording"})
torch.manual_seed(0)
model = weft.DistributedModel(nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]))


@weft.step
def train_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


train_step(model, torch.randn(8, 16))
first = weft.rank() == 0
weft.shutdown()  # every rank has written its file

if first:
    run = read_run(Path("recording"))
    analysis = Analysis(run)
    for rank in analysis.ranks:
        for period, parts in analysis.parts[rank].items():
            assert abs(parts.total - period.duration_s) < 1e-6
            print(
                f"rank {rank}, step {period.step}: {parts.work * 1e3:.1f} ms of work, {parts.data * 1e3:.1f} of data"
            )
    print(run_text(Report(analysis, verdict(judge(RULES, analysis)), RULES)))  # as `weft report` does
    last = run.timeline.of_step(run.timeline.steps[-1])
    print([f"{last.idle_share(rank):.0%}" for rank in last.ranks], f"{last.bubble:.0%}")
    Path("recording/step.svg").write_text(timeline_svg(last, "The last step"))
    Path("recording/timeline.html").write_text(page("All steps", [Entry("recorded", run.timeline)]))
