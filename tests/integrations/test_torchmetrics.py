"""Metrics count each sample once, whatever number of ranks has seen it."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

pytest.importorskip("torchmetrics")

JOB = """
import sys
import warnings
warnings.simplefilter("ignore")
import torch
if "early" in sys.argv:
    import torchmetrics
import weft.torch as weft
weft.init({"partitions": 2, "microbatches": 2})
import torchmetrics

rows = torch.arange(12.0)
mine = rows[weft.dp_rank() :: weft.dp_size()]
total, mean, listed = torchmetrics.SumMetric(), torchmetrics.MeanMetric(), torchmetrics.CatMetric()
matrix = torchmetrics.classification.MulticlassConfusionMatrix(3)
for batch in mine.split(2):
    total.update(batch)
    mean.update(batch)
    listed.update(batch)
    matrix.update(batch.long() % 3, batch.long() % 3)
if weft.dp_rank():
    listed.update(torch.tensor([100.0]))  # copies may have seen different numbers of samples
assert total.compute() == rows.sum(), total.compute()
assert mean.compute() == rows.mean(), mean.compute()
assert sorted(listed.compute().tolist()) == rows.tolist() + [100.0] * (weft.dp_size() - 1), listed.compute()
assert matrix.compute().tolist() == [[4, 0, 0], [0, 4, 0], [0, 0, 4]], matrix.compute()
world = torchmetrics.SumMetric(process_group=torch.distributed.group.WORLD)
world.update(1.0)
assert world.compute() == weft.size(), "a group of its own is taken as it is"
print("counted once", flush=True)
"""


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("when", ["early", "late"])
def test_each_sample_counts_once(ranks: int, when: str):
    done = run_ranks(ranks, JOB, [when], warm=True, env={"PYTHONWARNINGS": "ignore"}).check()
    assert done.stdout.count("counted once") == ranks


ALONE = """
import warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torchmetrics
import weft.torch
dist.init_process_group("gloo")
total = torchmetrics.SumMetric()
total.update(1.0)
assert total.compute() == 2.0
dist.destroy_process_group()
"""


def test_without_a_split_model_all_is_as_ever():
    run_ranks(2, ALONE, warm=True, env={"PYTHONWARNINGS": "ignore"}).check()
    run_ranks(
        2, ALONE.replace('dist.init_process_group("gloo")', "weft.torch.init()"), warm=True,
        env={"PYTHONWARNINGS": "ignore"},
    ).check()  # fmt: skip
