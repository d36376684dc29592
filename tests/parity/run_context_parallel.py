"""Worker: models whose sequences are cut over ranks, in plain PyTorch, compared with one process.

By hand, from the root of the repository:

    PYTHONPATH=. python -m weft run -n 2 tests/parity/run_context_parallel.py LlamaForCausalLM
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.parity.compare import TOLERANCE, Comparison, train_alone
from tests.parity.context_parallel_models import ALL
from tests.parity.run_tensor_parallel import MICROBATCHES, ROUGH, begin
from tests.parity.run_tensor_parallel import found as found_splits
from tests.parity.worker import arguments, work
from tests.parity.zoo.case import Case
from weft.torch.context_parallel import Sequences
from weft.torch.context_parallel.apply import cut_sequences
from weft.torch.context_parallel.find import find
from weft.torch.context_parallel.mesh_2d import HeadsAndPositions
from weft.torch.execution import glue
from weft.torch.session.random_streams import Streams
from weft.torch.tensor_parallel.apply import split
from weft.torch.tensors.cut_weights import ask
from weft.torch.trace.dry_run import DryRun


def found(net: nn.Module, case: Case, size: int, apart: Mapping[str, str]) -> Sequences:
    """What rank 0 finds, told to all."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
        dry = DryRun([net], Streams(torch.device("cpu")))
        with dry.forward(lambda: case.loss_of(net, case.batch(0))) as run:
            told = [find(net, run, size, apart).to_record()]
        assert torch.equal(state, torch.get_rng_state()), "random numbers moved on"
        assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
        assert not any("forward" in vars(module) for module in net.modules())
    dist.broadcast_object_list(told)
    return Sequences.from_record(told[0])


@contextmanager
def in_a_step() -> Iterator[None]:
    """Inside, all ranks run the same."""
    ask(lambda: True, lambda: False)
    try:
        yield
    finally:
        ask(glue._inside_unit, glue._between_units)


@contextmanager
def counted(calls: list[str]) -> Iterator[None]:
    """Inside, functions are noted that need the heads of other ranks."""
    before = HeadsAndPositions.on_full_tensors

    def gather(answers: Any, func: Any, args: Any, kwargs: Any, reason: BaseException) -> Any:
        calls.append(f"{func.__name__}: {reason}")
        return before(answers, func, args, kwargs, reason)

    HeadsAndPositions.on_full_tensors = gather  # type: ignore[method-assign]
    try:
        yield
    finally:
        HeadsAndPositions.on_full_tensors = before  # type: ignore[method-assign]


def run_case(name: str, ranks: int) -> tuple[str, dict[str, Any]]:
    """Three steps alone, three steps on parts of sequences, and what differs."""
    case = ALL[name]
    net, expected = case.trained_alone(MICROBATCHES)
    ranks = dist.get_world_size()
    splits = found_splits(net, case, 2, "auto") if ranks == 4 else None  # two for weights, two for sequences
    apart = {} if splits is None else splits.apart()
    sequences = found(net, case, 2 if ranks == 4 else ranks, apart)
    optimizer = case.optimizer_for(net.parameters())
    rank, device = dist.get_rank(), torch.device("cpu")
    if splits is None:
        cut_sequences(net, sequences, dist.group.WORLD, rank, device, lambda: True)
    else:
        grid = torch.arange(4).view(2, 2)
        rows = [dist.new_group(row.tolist()) for row in grid]
        columns = [dist.new_group(column.tolist()) for column in grid.T]
        split(net, splits, rows[rank // 2], rank % 2, 2, device)
        cut_sequences(net, sequences, columns[rank % 2], rank // 2, device, lambda: True, grid)

    def loss_in_a_step(model: Any, batch: dict[str, Any]) -> Any:
        with in_a_step():  # where parts may stay between layers
            return case.loss_of(model, batch)

    heads: list[str] = []
    with counted(heads):
        actual = train_alone(net, case.batches(), loss_in_a_step, optimizer, MICROBATCHES)
    if splits is not None:
        expected.state = actual.state = {}
    comparison = Comparison(ROUGH.get(name, TOLERANCE))
    comparison.record(actual, expected)
    more = {
        **comparison.summary(), "cut": dict(sequences.regions),
        "whole": dict(sequences.whole), "order": sequences.order, "notes": dict(sequences.notes),
        "heads": heads,
    }  # fmt: skip
    return comparison.report(), more


if __name__ == "__main__":
    work(arguments(list(ALL)), run_case, begin)
