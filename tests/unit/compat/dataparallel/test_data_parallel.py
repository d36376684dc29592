"""Sums over processes by the names of smdistributed.dataparallel, on two ranks."""

from __future__ import annotations

from tests.launching import run_ranks

SCRIPT = """
import torch
from weft.compat.dataparallel import data_parallel as dist

dist.init_process_group()
for op, expected in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.AVERAGE, 1.5), (dist.ReduceOp.MAX, 2.0)):
    for asynchronous in (False, True):
        tensor = torch.full((4,), dist.get_rank() + 1.0)
        handle = dist.all_reduce(tensor, op, async_op=asynchronous)
        assert (handle is not None) == asynchronous
        if asynchronous:
            handle.wait()
        assert tensor.tolist() == [expected] * 4, (op, asynchronous, tensor)
print("passed", flush=True)
"""


def test_sums_and_averages_at_once_and_later():
    assert run_ranks(2, SCRIPT, warm=True).check().stdout.count("passed") == 2
