"""Rows that go to experts of several replicas, without replicas; with them: `tests/parity/test_expert_parallel.py`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parity.tensor_parallel_models import WIDTH, Mixture, Routed, Shared, Stacked
from weft.errors import UsageError
from weft.torch.replicas.experts.dispatch import Rows
from weft.torch.replicas.experts.exchange import Routes, sum_by_row
from weft.torch.replicas.experts.find import find, table, warning
from weft.torch.replicas.experts.mixture import taken_back
from weft.torch.tensor_parallel.experts.sharded_experts import Own
from weft.torch.tensor_parallel.splits import MIXTURE, Splits


def owns(experts: int, ranks: int) -> list[Own]:
    return [Own.of(experts, rank, ranks) for rank in range(ranks)]


def test_a_row_goes_once_to_each_rank_that_has_one_of_its_experts():
    x, choices = torch.zeros(4, 3), torch.tensor([[0, 1], [0, 3], [3, 2], [2, 0]])
    rows = Rows([x, choices, torch.ones(4, 2)], 4)
    assert rows.places == (0, 1, 2)
    assert rows.wanted(owns(4, 2)).tolist() == [[True, True, False, True], [False, True, True, True]]


def test_scores_for_all_experts_send_rows_to_all():
    rows = Rows([torch.zeros(5, 3), torch.zeros(5, 4)], 4)
    assert rows.places == (0, 1) and rows.wanted(owns(4, 2)).all()


def test_rows_in_the_order_of_experts_go_by_blocks():
    rows = Rows([torch.zeros(8, 3)], 4)
    assert rows.by_expert
    assert rows.wanted(owns(4, 2)).long().tolist() == [[1] * 4 + [0] * 4, [0] * 4 + [1] * 4]
    assert rows.of_replica(1, 2).tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize(
    "given",
    [
        [torch.zeros(7, 3)],  # four experts have no equal blocks of 7
        [torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)],
    ],
)
def test_it_may_not_be_known_which_tensors_have_rows(given: list[torch.Tensor]):
    assert Rows(given, 4).places == ()


def test_the_sum_of_a_row_is_taken_in_single_precision():
    found = torch.full((256, 1), 1.0, dtype=torch.bfloat16)
    routes = Routes(torch.zeros(256, dtype=torch.int64), [], [], 1)
    assert sum_by_row(found, routes).tolist() == [[256.0]]
    assert sum_by_row(found + 0.0078125 * 1, routes).dtype == torch.bfloat16


def test_what_a_first_run_writes_is_taken_back():
    module = nn.BatchNorm1d(2)
    module.calls, module.kept = 3, [1]
    with taken_back([module]):
        module.calls += 1
        module.kept.append(2)
        module.new = 5
        module(torch.randn(4, 2))
        assert int(module.num_batches_tracked) == 1
    assert (module.calls, module.kept, hasattr(module, "new")) == (3, [1], False)
    assert int(module.num_batches_tracked) == 0 and module.running_mean.tolist() == [0.0, 0.0]


class Normed(nn.Module):
    """An expert that looks at all of its rows together."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def test_mixtures_are_found_by_trying():
    torch.manual_seed(0)
    net = nn.Sequential(Mixture(), Routed(Stacked()), Mixture(), Mixture(experts=3))
    net[2].experts = nn.ModuleList(Normed() for _ in range(4))
    x = torch.randn(4, 9, WIDTH)
    found = find(net, lambda: net(x), 2)
    assert [*found.linears()] == ["0", "1.experts", "3"]
    assert found.linears()["0"].kind == MIXTURE and found.linears()["1.experts"].blocks == (0, 1, 2)
    assert "depends on other tokens" in found.whole["2"]
    assert Splits.from_record(found.to_record()) == found
    text = table(found)
    assert text.startswith("experts over 2 replicas\n") and "*.experts    1  expert-parallel" in text
    assert not warning(found, "Net")


def test_more_replicas_than_experts_share_nothing():
    torch.manual_seed(0)
    net = nn.Sequential(Mixture(experts=3), Routed(Stacked(experts=3), 3))
    x = torch.randn(4, 9, WIDTH)
    found = find(net, lambda: net(x), 4)
    assert not found.linears()
    assert "its 3 experts are fewer than the 4 ranks" in warning(found, "Net")


def test_a_mixture_with_several_results_is_shared():
    torch.manual_seed(0)
    net = Shared()
    x = torch.randn(2, 9, WIDTH)
    assert find(net, lambda: net(x), 2).linears()[""].kind == MIXTURE


def test_a_script_may_want_experts_whole():
    import weft.torch as weft

    torch.manual_seed(0)
    net = nn.Sequential(Mixture(), Routed(Stacked()))
    x = torch.randn(4, 9, WIDTH)
    weft.set_tensor_parallelism(net[0], False)
    found = find(net, lambda: net(x), 2)
    assert [*found.linears()] == ["1.experts"] and found.whole["0"] == "the script wants it whole"


def test_other_tensors_than_in_the_first_microbatch_are_refused():
    from weft.torch.replicas.experts.dispatch import Dispatched
    from weft.torch.replicas.experts.find import OneReplica

    torch.manual_seed(0)
    net = Routed(Stacked())
    x = torch.randn(4, 9, WIDTH)
    linear = find(net, lambda: net(x), 2).linears()["experts"]
    stands = Dispatched(net.experts, "experts", linear, OneReplica())
    flat = x.flatten(0, 1)
    choices = torch.zeros(36, 2, dtype=torch.int64)
    torch.testing.assert_close(
        stands(flat, choices, torch.ones(36, 2)), net.experts(flat, choices, torch.ones(36, 2))
    )
    with pytest.raises(
        UsageError, match="experts, whose experts replicas share, is called with other tensors"
    ):
        stands(flat, choices, torch.ones(2))


class Counted(nn.Sequential):
    """An expert that counts its rows in a buffer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        return super().forward(x)


class CountedStack(Stacked):
    """The same for experts in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: torch.Tensor, which: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        return super().forward(x, which, weights)


def test_experts_that_write_buffers_stay_whole():
    """Each replica's buffers would tell of its own experts alone."""
    torch.manual_seed(0)
    net = nn.Sequential(Mixture(), Routed(CountedStack()))
    net[0].experts = nn.ModuleList(Counted() for _ in range(4))
    x = torch.randn(4, 9, WIDTH)
    found = find(net, lambda: net(x), 2)
    assert not found.linears()
    assert found.whole == dict.fromkeys(("0", "1.experts"), "its experts write into buffers")
