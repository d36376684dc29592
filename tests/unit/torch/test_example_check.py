"""What shows when a model runs once: each finding has a model with the fault and one without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft.torch as weft
from weft.check import Grade
from weft.graph import Graph
from weft.graph.model import Unit
from weft.torch.example_check import check_batch, check_even, check_run, check_shared
from weft.torch.example_graph import Example


class Tied(nn.Module):
    """An embedding whose weight is the head's, with a part that nobody uses and one that never runs."""

    def __init__(self, tied: bool = True, spare: bool = False):
        super().__init__()
        self.embed, self.body = nn.Embedding(20, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.aux = nn.Sequential(nn.Linear(8, 4), nn.Tanh()) if spare else None
        self.idle = nn.Linear(8, 2) if spare else None

    def forward(self, x):
        h = self.body(self.embed(x))
        return (self.head(h), self.aux(h)) if self.aux is not None else self.head(h)


def ids() -> torch.Tensor:
    return torch.randint(20, (8,))


def rules(findings) -> list[tuple[str, Grade]]:
    return [(each.rule, each.grade) for each in findings]


def test_a_batch_that_microbatches_do_not_divide():
    example = Example(nn.Linear(4, 4), {"x": torch.randn(30, 4), "scale": torch.tensor(2.0)})
    (finding,) = check_batch(example, 8, 7)
    assert (finding.rule, finding.grade, finding.line) == ("batch_not_divided", Grade.WRONG, 7)
    assert finding.write == "24 samples; or @weft.step(allow_uneven=True)"
    assert [*check_batch(example, 6, 7)] == []


def test_few_samples_for_batch_normalisation():
    example = Example(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(64, 4))
    (finding,) = check_batch(example, 8, 1)
    assert "(1) takes its means over 8 samples" in finding.reason
    assert [*check_batch(example, 4, 1)] == []


def test_shared_parameters_are_named():
    (finding,) = check_shared(Tied(), 2, 1)
    assert finding.rule == "shared_together"
    assert "embed.weight, head.weight are one parameter" in finding.reason
    assert [*check_shared(Tied(), 1, 1)] == [*check_shared(Tied(tied=False), 2, 1)] == []


def test_a_module_under_two_names_shares_nothing():
    layer = nn.Linear(2, 2)
    assert [*check_shared(nn.Sequential(layer, layer), 2, 1)] == []


def test_shared_parameters_that_are_put_apart_by_hand():
    model = Tied()
    weft.set_partition(model.head, 1)
    (finding,) = check_shared(model, 2, 1)
    assert (finding.rule, finding.grade) == ("shared_apart", Grade.WRONG)
    assert "are put on the partitions 0, 1" in finding.reason
    assert finding.write == "weft.set_partition(model.get_submodule('head'), 0)"
    weft.set_partition(model.head, 0)
    assert rules(check_shared(model, 2, 1)) == [("shared_together", Grade.HINT)]
    weft.set_partition(model.head, 5)
    assert rules(check_shared(model, 2, 1)) == [("placed_nowhere", Grade.WRONG)]


def graph(*times: float, group: str | None = None) -> Graph:
    return Graph(
        tuple(
            Unit(f"u{n}", time, 0.0, 0, 0, group=group if n in (0, 2) else None)
            for n, time in enumerate(times)
        )
    )


def test_a_unit_larger_than_an_even_share():
    (finding,) = check_even(graph(6.0, 2.0, 2.0), 4, 1)
    assert (finding.rule, finding.grade) == ("unit_too_large", Grade.SLOW)
    assert finding.reason.startswith("u0 takes 60% of the time")
    assert finding.write.startswith('"partitions": 1')
    assert [*check_even(graph(2.0, 2.0, 2.0, 2.0), 4, 1)] == [*check_even(graph(6.0, 1.0), 1, 1)] == []


def test_units_that_must_lie_together_count_as_one():
    (finding,) = check_even(graph(3.0, 4.0, 3.0, group="tied0"), 2, 1)
    assert finding.reason.startswith("u0, u2 together take 60% of the time")
    assert [*check_even(graph(3.0, 4.0, 3.0), 2, 1)] == []


def test_what_nobody_uses():
    found = [*check_run(Example(Tied(spare=True), ids(), lambda result: result[0].square().mean()), 1, 3)]
    assert {each.rule: each.line for each in found} == {
        "result_unused": 3,
        "parameter_unused": 3,
        "return_unused": 3,
    }
    reasons = {each.rule: each.reason for each in found}
    assert "what aux computes" in reasons["result_unused"]
    assert "aux.0.weight, aux.0.bias, idle.weight, idle.bias, 4 of" in reasons["parameter_unused"]
    assert "1 of 2 tensors" in reasons["return_unused"]
    assert [*check_run(Example(Tied(), ids(), lambda result: result.square().mean()), 1, 3)] == []


def test_a_run_leaves_no_gradients_and_no_hooks():
    model = Tied(spare=True)
    [*check_run(Example(model, ids()), 1, 1)]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_random_numbers_are_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    (finding,) = check_run(Example(model, torch.randn(4, 4)), 1, 1)
    assert finding.rule == "random_numbers"
    assert "(1)" in finding.reason
    assert [*check_run(Example(model.eval(), torch.randn(4, 4)), 1, 1)] == []


def test_a_model_without_data_is_not_run():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    assert [*check_run(Example(model, torch.randn(2, 4)), 1, 1)] == []


def test_gradients_that_cannot_be_followed_are_a_hint():
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no way back")

    class Model(nn.Linear):
        def forward(self, x):
            return Cut.apply(super().forward(x))

    (finding,) = check_run(Example(Model(4, 4), torch.randn(2, 4)), 1, 1)
    assert finding.rule == "not_followed"
    assert "no way back" in finding.reason


@pytest.mark.parametrize("batch", [(ids(), ids()), [torch.randn(4)], {"n": torch.tensor(3)}])
def test_batches_of_any_form_are_looked_at(batch):
    assert isinstance([*check_batch(Example(Tied(), batch), 2, 1)], list)
