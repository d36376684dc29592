"""Fingerprints of tensors, and what comes of comparing two runs by them."""

from __future__ import annotations

import math

import pytest
import torch

from weft.torch.verify.findings import LIMITS, compare
from weft.torch.verify.fingerprint import Fingerprint, distance, fingerprint, fingerprints
from weft.torch.verify.reference import Reference

SHAPES = [(), (1,), (8,), (9,), (3, 50), (1024, 1030), (2, 0)]
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", KINDS)
def test_the_same_numbers_have_the_same_fingerprint(shape, dtype):
    values = (torch.randn(shape) * 3).to(dtype)
    one = fingerprint(values)
    assert distance(one, fingerprint(values.clone())) == 0.0
    assert Fingerprint.from_list(one.to_list()) == one
    assert one.exact == (dtype in (torch.int64, torch.bool))


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if math.prod(shape)])
def test_the_distance_is_that_of_the_tensors(shape):
    values = torch.randn(shape, dtype=torch.float64)
    other = values.clone()
    other.view(-1)[-1] += 1.0
    assert 0.49 < distance(fingerprint(values), fingerprint(other)) < 2.3
    step = torch.randn(shape, dtype=torch.float64)
    found = distance(fingerprint(values), fingerprint(values + step))
    assert found == pytest.approx(float(step.norm()), rel=0.9)


def test_swapped_rows_columns_and_halves_are_seen():
    values = torch.randn(64, 64)
    for other in (values.t(), values.flip(0), values.flip(1), values.roll(8), values.roll(1, 0)):
        assert distance(fingerprint(values), fingerprint(other)) > 1.0


def test_what_is_not_finite_is_alike():
    nan = fingerprint(torch.tensor([1.0, math.nan]))
    assert distance(nan, fingerprint(torch.tensor([2.0, math.inf]))) == 0.0
    assert distance(nan, fingerprint(torch.tensor([1.0, 2.0]))) == math.inf
    assert distance(fingerprint(torch.ones(2)), fingerprint(torch.ones(2, 1))) == math.inf


def test_differences_are_linear():
    one, other = torch.randn(20), torch.randn(20)
    less = fingerprint(one).less(fingerprint(other))
    assert distance(less, fingerprint(one - other)) < 1e-5


def test_sparse_and_nested_tensors():
    sparse = torch.eye(3).to_sparse()
    assert distance(fingerprint(sparse), fingerprint(torch.eye(3))) == 0.0
    assert fingerprints({"x": [sparse, 3], "y": torch.empty(2, device="meta")}) == [fingerprint(torch.eye(3))]


def run(loss: float, dtype: torch.dtype = torch.float32, gradient: float = 1.0, count: int = 3) -> Reference:
    return Reference(
        [[fingerprint(torch.tensor(loss, dtype=dtype)), fingerprint(torch.tensor(count))]],
        [[]],
        [{}],
        {"a.weight": fingerprint(torch.full((9,), gradient)), "b.weight": None},
        {},
        whole=True,
    )


@pytest.mark.parametrize("dtype", LIMITS)
def test_rounding_is_no_difference(dtype):
    limit = LIMITS[dtype]
    assert not compare(run(1.0, torch.float64), run(1.0 + limit / 2, torch.float64), dtype, {}).fault
    assert (
        "microbatch 0 returns another tensor"
        in compare(run(1.0, torch.float64), run(1.0 + limit * 2, torch.float64), dtype, {}).fault
    )


def test_whole_numbers_are_equal_unless_rounding_decides_them():
    assert "number 1, 4 instead of 3" in compare(run(1.0), run(1.0, count=4), torch.float32, {}).fault
    assert not compare(run(1.0), run(1.0, count=4), torch.bfloat16, {}).fault


def test_gradients_differ_by_name():
    found = compare(run(1.0), run(1.0, gradient=1.1), torch.float32, {})
    assert found.fault.startswith("the gradient of a.weight (over all microbatches)")
    assert found.gradients == pytest.approx(0.09, rel=0.5)
    equal = compare(run(1.0), run(1.0, gradient=1.0001), torch.float32, {})
    assert not equal.fault and "its gradients (2 parameters, " in equal.proved


def test_nothing_to_compare_is_told():
    nothing = Reference([[]], [[]], [{}], buffers={})
    assert compare(nothing, nothing, torch.float32, {}).proved.startswith("nothing to compare")
