"""Gradients that are averaged where they are: two replicas in one process, whose sum is made when both have asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.torch.backward.autograd import Arrival
from weft.torch.backward.weight_gradients import add_grad, add_product
from weft.torch.replicas.buckets import InPlace, empty_like, fits

WEIGHT, BIAS = 0, 1


class AllReduceQueue:
    scale = 0.5

    def launch(self, number: int, flat: Tensor) -> Any:
        raise AssertionError("a flat tensor")

    def in_place(self, size_bytes: int) -> Any:
        raise AssertionError("asked again")


class Job:
    def __init__(self, both: Both) -> None:
        self.both = both

    def wait(self) -> None:
        self.both.sum()


class Both:
    """Sums what two replicas have launched, once both have."""

    def __init__(self) -> None:
        self.asked: list[list[Tensor]] = []
        self.sums = 0

    def sum_pieces(self, tensors: Sequence[Tensor], scale: float) -> Job:
        assert all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in tensors)
        self.asked.append([tensor.detach() for tensor in tensors])
        self.scale = scale
        return Job(self)

    def sum(self) -> None:
        if not self.asked:
            return
        one, other = self.asked
        for mine, theirs in zip(one, other, strict=True):
            total = (mine + theirs) * self.scale
            mine.copy_(total)
            theirs.copy_(total)
        self.asked = []
        self.sums += 1


class Replica:
    def __init__(self, sums: Both, weight: tuple[int, ...] = (2, 3)) -> None:
        self.weight = nn.Parameter(torch.zeros(weight))
        self.bias = nn.Parameter(torch.zeros(2))
        self.bucket = InPlace(0, (WEIGHT, BIAS), [self.weight, self.bias], sums)


@pytest.fixture
def sums() -> Both:
    return Both()


def average(replicas: Sequence[Replica], present: Sequence[int] = (1, 1), factor: float = 1.0) -> None:
    """As at the end of a step in which nothing came late."""
    for replica in replicas:
        replica.bucket.launch(AllReduceQueue(), [False, False])
    finish(replicas, present, factor)


def finish(replicas: Sequence[Replica], present: Sequence[int] = (1, 1), factor: float = 1.0) -> None:
    for replica in replicas:
        replica.bucket.wait()
    for replica in replicas:
        replica.bucket.give(list(present), factor)


def test_tensors_stay_and_become_the_average(sums: Both):
    one, two = Replica(sums), Replica(sums)
    for number, replica in enumerate((one, two)):
        replica.weight.grad = torch.full((2, 3), float(number))
        replica.bias.grad = torch.full((2,), 10.0 * number)
    held = [one.weight.grad, one.bias.grad]
    average((one, two))
    assert one.weight.grad is held[0] and one.bias.grad is held[1]
    for replica in (one, two):
        assert torch.equal(replica.weight.grad, torch.full((2, 3), 0.5))
        assert torch.equal(replica.bias.grad, torch.full((2,), 5.0))


def test_who_has_none_gets_the_average_if_anybody_has_one(sums: Both):
    one, two = Replica(sums), Replica(sums)
    one.weight.grad = torch.full((2, 3), 4.0)
    average((one, two), present=(1, 0))
    assert torch.equal(two.weight.grad, torch.full((2, 3), 2.0))
    assert one.bias.grad is None and two.bias.grad is None


def test_the_factor_counts_for_all(sums: Both):
    one, two = Replica(sums), Replica(sums)
    one.weight.grad = torch.full((2, 3), 4.0)
    two.bias.grad = torch.full((2,), 8.0)
    average((one, two), factor=2.0)
    assert all(torch.equal(r.weight.grad, torch.full((2, 3), 4.0)) for r in (one, two))
    assert all(torch.equal(r.bias.grad, torch.full((2,), 8.0)) for r in (one, two))


def strided() -> Tensor:
    return torch.full((3, 2), 4.0).t()


def sparse() -> Tensor:
    return torch.full((2, 3), 4.0).to_sparse(1)


def tracked() -> Tensor:
    return torch.full((2, 3), 4.0).requires_grad_() * 1.0


@pytest.mark.parametrize("make", [strided, sparse, tracked])
def test_what_cannot_be_worked_on_has_a_stand_in(make: Any, sums: Both):
    one, two = Replica(sums), Replica(sums)
    one.weight.grad, two.weight.grad = make(), torch.zeros(2, 3)
    given = one.weight.grad
    one.bias.grad, two.bias.grad = torch.ones(2), torch.ones(2)
    one.bucket.launch(AllReduceQueue(), [False, False])
    assert torch.equal(given.to_dense().detach(), torch.full((2, 3), 4.0))
    two.bucket.launch(AllReduceQueue(), [False, False])
    finish((one, two))
    assert (one.weight.grad is given) == (not given.is_sparse)
    assert torch.equal(one.weight.grad.detach(), torch.full((2, 3), 2.0))
    assert torch.equal(two.weight.grad, torch.full((2, 3), 2.0))


def test_gradients_in_the_same_memory_are_averaged_apart(sums: Both):
    """Autograd gives both the same memory here, which the rest of the backward pass reads, too."""
    one, two = Replica(sums, (2,)), Replica(sums, (2,))
    given = torch.tensor([2.0, 4.0])
    for replica, factor in ((one, 1.0), (two, 3.0)):
        total = replica.weight.view(1, 2) + replica.bias.view(1, 2)
        (total * (given * factor)).sum().backward()
    assert one.weight.grad.data_ptr() == one.bias.grad.data_ptr()
    before = one.weight.grad
    for replica in (one, two):
        replica.bucket.launch(AllReduceQueue(), [True, True])
    finish((one, two))
    assert torch.equal(before, given), "who else reads this memory finds what was there"
    for parameter in (one.weight, one.bias, two.weight, two.bias):
        assert torch.equal(parameter.grad, given * 2.0)


def test_views_that_somebody_gave_stay_what_they_are(sums: Both):
    one, two = Replica(sums), Replica(sums)
    flat = torch.arange(8.0)
    one.weight.grad, one.bias.grad = flat[:6].view(2, 3), flat[6:]
    held = one.weight.grad
    two.weight.grad, two.bias.grad = torch.zeros(2, 3), torch.zeros(2)
    average((one, two))
    assert one.weight.grad is held
    assert torch.equal(flat, torch.arange(8.0) / 2)


def test_where_somebody_looks_at_a_gradient_the_bucket_stays_to_the_end(sums: Both):
    one, two = Replica(sums), Replica(sums)
    one.weight.register_post_accumulate_grad_hook(Arrival(Both(), 0))
    two.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert one.bucket.may_leave(), "a reducer's own hook is nobody else"
    assert not two.bucket.may_leave()


def test_what_has_left_is_gone_until_it_is_given_back(sums: Both):
    one, two = Replica(sums), Replica(sums)
    one.weight.grad, two.bias.grad = torch.ones(2, 3), torch.ones(2)
    for replica in (one, two):
        assert list(replica.bucket.missing_gradients()) == []
        replica.bucket.launch(AllReduceQueue(), [True, True])
        assert replica.weight.grad is None and replica.bias.grad is None
    assert (list(one.bucket.missing_gradients()), list(two.bucket.missing_gradients())) == ([WEIGHT], [BIAS])
    finish((one, two))
    assert list(one.bucket.missing_gradients()) == list(two.bucket.missing_gradients()) == []
    assert torch.equal(two.weight.grad, torch.full((2, 3), 0.5))


def test_channels_last_gradients_are_worked_on_where_they_are(sums: Both):
    one, two = Replica(sums, (2, 3, 4, 5)), Replica(sums, (2, 3, 4, 5))
    numbers = torch.randn(2, 2, 3, 4, 5)
    for replica, values in zip((one, two), numbers, strict=True):
        replica.weight.data = replica.weight.data.to(memory_format=torch.channels_last)
        replica.weight.grad = values.clone(memory_format=torch.channels_last)
        assert fits(replica.weight.grad, replica.weight)
        assert not fits(values, replica.weight)
    held = one.weight.grad
    average((one, two), present=(1, 0))
    assert one.weight.grad is held
    assert torch.equal(two.weight.grad, (numbers[0] + numbers[1]) * 0.5)


def backward(replica: Replica, value: float) -> None:
    (replica.weight.sum() * value).backward()


def product(replica: Replica, value: float) -> None:
    with torch.no_grad():
        add_product(replica.weight, torch.full((2, 1), value), torch.ones(1, 3))


def addition(replica: Replica, value: float) -> None:
    with torch.no_grad():
        add_grad(replica.weight, torch.full((2, 3), value))


@pytest.mark.parametrize("grow", [backward, product, addition])
@pytest.mark.parametrize("first", [True, False])
def test_growth_after_the_launch_waits_for_nobody_and_is_averaged(grow: Any, first: bool, sums: Both):
    """``first``: whether the replica that grows had a gradient at the launch."""
    one, two = Replica(sums), Replica(sums)
    one.weight.grad = torch.full((2, 3), 2.0)
    if first:
        two.weight.grad = torch.full((2, 3), 4.0)
    for replica in (one, two):
        replica.bias.grad = torch.ones(2)
        replica.bucket.launch(AllReduceQueue(), [False, False])
    grow(two, 8.0)
    assert sums.sums == 0
    for replica in (one, two):
        replica.bucket.wait()
    for replica in (one, two):
        replica.bucket.launch(AllReduceQueue(), [False, False])
    finish((one, two))
    wanted = (2.0 + (4.0 if first else 0.0) + 8.0) / 2
    for replica in (one, two):
        assert torch.equal(replica.weight.grad, torch.full((2, 3), wanted))
        assert torch.equal(replica.bias.grad, torch.ones(2))


def test_growth_of_one_that_has_a_stand_in_is_averaged(sums: Both):
    one, two = Replica(sums), Replica(sums)
    one.weight.grad, two.weight.grad = strided(), torch.zeros(2, 3)
    for replica in (one, two):
        replica.bias.grad = torch.ones(2)
        replica.bucket.launch(AllReduceQueue(), [False, False])
    addition(one, 6.0)
    for replica in (one, two):
        replica.bucket.wait()
    for replica in (one, two):
        replica.bucket.launch(AllReduceQueue(), [False, False])
    finish((one, two))
    assert all(torch.equal(r.weight.grad, torch.full((2, 3), 5.0)) for r in (one, two))


def test_the_next_step_starts_afresh(sums: Both):
    one, two = Replica(sums), Replica(sums)
    one.weight.grad = torch.full((2, 3), 4.0)
    average((one, two), present=(1, 0))
    for replica in (one, two):
        replica.weight.grad = None
    two.weight.grad = torch.full((2, 3), 6.0)
    average((one, two), present=(1, 0))
    assert all(torch.equal(r.weight.grad, torch.full((2, 3), 3.0)) for r in (one, two))


def test_empty_like_has_the_parameters_layout():
    weight = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert empty_like(weight).stride() == weight.stride()
    assert empty_like(torch.zeros(3, 2).t()).is_contiguous()
