"""Four ranks: two partitions, two copies of the pipeline with different data; started by `test_replicas.py`.

    replicas.py [--placement spread]

Every rank writes what it finds wrong and ends with an error; a job that ends well has passed.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests.counted_costs import count_costs
from tests.models import WIDTH, Chain, Reader
from tests.padded import batch_of, reading_loss
from tests.parity.compare import TOLERANCE, Comparison, copies, gradients
from tests.training import step_of

STEPS, ROWS, MICROBATCHES = 3, 8, 2

# Rank -> (pp_rank, dp_rank), and the groups of every axis, from the placements' letters: DPT and TPD.
TABLES = {
    "cluster": ([(0, 0), (1, 0), (0, 1), (1, 1)], {"pp": [[0, 1], [2, 3]], "rdp": [[0, 2], [1, 3]]}),
    "spread": ([(0, 0), (0, 1), (1, 0), (1, 1)], {"pp": [[0, 2], [1, 3]], "rdp": [[0, 1], [2, 3]]}),
}


def check_ranks(placement: str) -> None:
    """The rank, size and group functions, against the table."""
    coordinates, groups = TABLES[placement]
    me = weft.rank()
    pp, dp = coordinates[me]
    assert (weft.pp_rank(), weft.dp_rank()) == (pp, dp)
    assert (weft.mp_rank(), weft.rdp_rank(), weft.tp_rank()) == (pp, dp, 0)
    assert (weft.size(), weft.local_rank(), weft.local_size()) == (4, me, 4)
    sizes = [f() for f in (weft.pp_size, weft.dp_size, weft.mp_size, weft.rdp_size, weft.tp_size)]
    assert sizes == [2, 2, 2, 2, 1]
    assert weft.mp_size() * weft.rdp_size() == weft.pp_size() * weft.dp_size() == weft.size()
    groups = {
        **groups,
        "mp": groups["pp"],
        "dp": groups["rdp"],
        "tp": [[n] for n in range(4)],
        "world": [[*range(4)]],
    }
    for axis, table in groups.items():
        mine = next(group for group in table if me in group)
        assert getattr(weft, f"get_{axis}_group")() == mine, axis
        process_group = getattr(weft, f"get_{axis}_process_group")()
        assert dist.get_process_group_ranks(process_group) == mine, axis
        total = torch.tensor([me])
        dist.all_reduce(total, group=process_group)
        assert total.item() == sum(mine), axis


class Net(nn.Module):
    """Blocks, and a part that only the replica with `dp_rank` 0 uses, in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain(4)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = self.chain(x)
        return self.head(x) + self.sometimes(x) if use else self.head(x)


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    """For each step and replica its own batch."""
    numbers = torch.Generator().manual_seed(5)
    shape = (ROWS, WIDTH)
    return [
        [(torch.randn(shape, generator=numbers), torch.randn(shape, generator=numbers)) for _ in range(2)]
        for _ in range(STEPS)
    ]


def uses(step: int, replica: int) -> bool:
    return (step, replica) == (1, 0)


def train_alone(net: nn.Module) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One process on the whole batch: gradients of every step, and the parameters at the end."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3)
    found = []
    for step, both in enumerate(batches()):
        optimizer.zero_grad()
        for replica, (x, y) in enumerate(both):
            (F.mse_loss(net(x, uses(step, replica)), y) / 2).backward()
        found.append(gradients(net.named_parameters()))
        optimizer.step()
    return found, copies(net.named_parameters())


def check_tokens() -> None:
    """Batches cut by tokens: each replica has rows of other lengths, and replicas count alike."""
    torch.manual_seed(4)
    net = Reader()
    alone = copy.deepcopy(net)
    model = weft.DistributedModel(net)
    step = step_of(reading_loss, tokens="mask")
    comparison = Comparison(TOLERANCE)
    for number, lengths in enumerate(
        [([3, 9, 2, 5, 9, 1], [2, 4, 1, 2, 3, 4]), ([7, 7, 7, 7], [12, 1, 1, 2])]
    ):
        both = [batch_of(some, 12) for some in lengths]
        step(model, both[weft.dp_rank()])
        for batch in both:
            (reading_loss(alone, batch) / 2).backward()
        expected, mine = gradients(alone.named_parameters()), gradients(model.local_named_parameters())
        comparison.tensors(f"gradients of batch {number}", mine, expected)
        for parameter in (*alone.parameters(), *model.local_parameters()):
            parameter.grad = None
    assert comparison.ok, comparison.report()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--placement", default="cluster", choices=TABLES)
    placement = parser.parse_args().placement
    torch.set_num_threads(1)
    count_costs()
    weft.init({"partitions": 2, "microbatches": MICROBATCHES, "ddp": True, "placement_strategy": placement})
    check_ranks(placement)
    torch.manual_seed(3)
    net = Net()
    expected_gradients, expected = train_alone(copy.deepcopy(net))
    if weft.dp_rank() == 1:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1)  # a replica takes what the first one has
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3))

    @weft.step
    def train_step(model: Any, x: Tensor, y: Tensor, use: bool) -> Tensor:
        loss = F.mse_loss(model(x, use), y)
        model.backward(loss)
        return loss

    comparison = Comparison(TOLERANCE)
    for step, both in enumerate(batches()):
        optimizer.zero_grad()
        train_step(model, *both[weft.dp_rank()], uses(step, weft.dp_rank()))
        mine = gradients(model.local_named_parameters())
        comparison.tensors(f"gradients of step {step}", mine, expected_gradients[step])
        optimizer.step()
    mine = copies(model.local_named_parameters())
    comparison.tensors("parameters", mine, expected)
    assert comparison.ok, comparison.report()
    assert 0 < len(mine) < len(expected), "a part, not the whole"
    for name, value in mine.items():
        other = value.clone()
        dist.broadcast(other, weft.get_rdp_group()[0], group=weft.get_rdp_process_group())
        assert torch.equal(other, value), f"{name} differs between replicas"
    whole = copies(model.state_dict().items())
    comparison.tensors("state", whole, expected)
    assert comparison.ok and set(whole) == set(expected), comparison.report()
    del model, optimizer
    check_tokens()
    print("passed", flush=True)


if __name__ == "__main__":
    main()
