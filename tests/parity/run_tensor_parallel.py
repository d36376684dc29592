"""Worker: models split over axis `tp`, in plain PyTorch, compared with one process.

By hand, from the root of the repository:

    PYTHONPATH=. python -m weft run -n 2 tests/parity/run_tensor_parallel.py LlamaForCausalLM
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.parity.compare import TOLERANCE, Comparison, train_alone
from tests.parity.tensor_parallel_models import OWN
from tests.parity.worker import arguments, work
from tests.parity.zoo import CASES
from tests.parity.zoo.case import Case
from weft.torch.session.random_streams import Streams
from weft.torch.tensor_parallel import Splits, is_cut
from weft.torch.tensor_parallel.apply import split
from weft.torch.tensor_parallel.find import find
from weft.torch.trace.dry_run import DryRun

MICROBATCHES = 2
ALL = {**CASES, **OWN}
BY_RANK = " by rank"
ALL |= {
    f"{name}{BY_RANK}": ALL[name]
    for name in (
        "MixtralForCausalLM", "Qwen2MoeForCausalLM", "OlmoeForCausalLM", "DeepseekV3ForCausalLM", "stacked experts",

    )
}  # fmt: skip
"""Others are split as is found best; these with some of the experts on each rank."""
ROUGH = {"bf16": 0.05}
"""How far apart numbers of 16 bits may be."""


def begin(ranks: int) -> int:
    """A plain process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank()


def found(net: nn.Module, case: Case, size: int, experts: str) -> Splits:
    """What rank 0 finds, told to all."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        before = copy.deepcopy(net.state_dict())
        state = torch.get_rng_state()
        with (
            torch.no_grad()
        ):  # a first call installs the hooks of transformers, which a dry run takes away again
            case.loss_of(net, case.batch(0))
        net.load_state_dict(before)
        torch.set_rng_state(state)
        dry = DryRun([net], Streams(torch.device("cpu")))
        with dry.forward(lambda: case.loss_of(net, case.batch(0))) as run:
            told = [find(net, run, size, experts=experts).to_record()]
        assert torch.equal(state, torch.get_rng_state()), "random numbers moved on"
        assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
    dist.broadcast_object_list(told)
    return Splits.from_record(told[0])


def run_case(name: str, ranks: int) -> tuple[str, dict[str, Any]]:
    """Three steps alone, three steps split, and what differs."""
    case = ALL[name]
    net, expected = case.trained_alone(MICROBATCHES)
    splits = found(net, case, ranks, "expert_parallel" if name.endswith(BY_RANK) else "auto")
    optimizer = case.optimizer_for(net.parameters())
    names = [
        f"{name}.{own}"
        for name, how in splits.linears().items()
        for own in [part.name for part in how.parts if part.dim >= 0]
        or [
            f"{each.name}.{own}"
            for each in how.held
            if each.rank is not None
            for own, _ in net.get_submodule(f"{name}.{each.name}").named_parameters()
        ]
        or ["in_proj_weight" if how.kind == "heads" else "weight"]
    ]
    before = sum(net.get_parameter(name).numel() for name in names)
    split(net, splits, dist.group.WORLD, dist.get_rank(), ranks, torch.device("cpu"))
    held = sum(net.get_parameter(name).numel() for name in names)
    actual = train_alone(net, case.batches(), case.loss_of, optimizer, MICROBATCHES)
    comparison = Comparison(ROUGH.get(name, TOLERANCE))
    expected.state = actual.state = {}
    comparison.record(actual, expected)
    assert all(is_cut(net.get_parameter(name)) for name in names)
    more = {
        **comparison.summary(), "parts": held / before if before else None,
        "split": {name: how.kind for name, how in splits.linears().items()}, "whole": dict(splits.whole),
        "by_rank": [name for name, how in splits.linears().items() if how.by_rank()],
    }  # fmt: skip
    return comparison.report(), more


if __name__ == "__main__":
    work(arguments(list(ALL)), run_case, begin)
