"""What a step gives back: one entry for each microbatch, and means that know who was larger."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from weft.torch.output import StepOutput, collect


class Pair(NamedTuple):
    loss: Any
    note: Any


@dataclass
class Result:
    loss: Any
    rest: Any = None


@dataclass(slots=True)
class Slotted:
    loss: Any


THREE = [torch.tensor(float(n)) for n in (1, 2, 6)]
EQUAL = [1 / 3] * 3


def test_reductions_of_scalars():
    output = StepOutput(THREE)
    assert output.reduce_mean().item() == 3
    assert output.reduce_sum().item() == 9
    assert output.stack().tolist() == output.concat().tolist() == [1, 2, 6]
    assert output.outputs == THREE
    assert "StepOutput([tensor(1.)" in repr(output)


def test_reductions_of_batches():
    output = StepOutput([torch.ones(2, 3), torch.zeros(2, 3)])
    assert output.reduce_mean().shape == output.reduce_sum().shape == (2, 3)
    assert output.reduce_mean()[0, 0] == 0.5
    assert output.concat().shape == (4, 3) and output.stack().shape == (2, 2, 3)


def test_uneven_weights_give_the_mean_over_samples():
    per_sample = torch.arange(7.0)
    parts = [per_sample[:3], per_sample[3:5], per_sample[5:]]
    output = StepOutput([part.mean() for part in parts], [3 / 7, 2 / 7, 2 / 7])
    assert output.reduce_mean().item() == pytest.approx(per_sample.mean().item())
    ragged = StepOutput(parts, [3 / 7, 2 / 7, 2 / 7])
    assert ragged.concat().tolist() == per_sample.tolist()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("weights", [None, [0.25, 0.75]])
def test_the_mean_of_counts_is_a_float(dtype: torch.dtype, weights: list[float] | None):
    output = StepOutput([torch.tensor(1, dtype=dtype), torch.tensor(0, dtype=dtype)], weights)
    assert output.reduce_mean().item() == (0.25 if weights else 0.5)
    assert output.reduce_mean().is_floating_point()


def test_the_structure_of_the_result_stays():
    results = [{"a": t, "b": (t, "x"), "n": None, "k": 3} for t in THREE]
    collected = collect(results, EQUAL)
    assert collected["a"].outputs == THREE and collected["b"][0].weights == EQUAL
    assert collected["b"][1] == ["x"] * 3 and collected["n"] is None and collected["k"] == [3] * 3


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (lambda t: [t, 1], lambda r: r[0]),
        (lambda t: Pair(t, "n"), lambda r: r.loss),
        (lambda t: OrderedDict(loss=t), lambda r: r["loss"]),
        (lambda t: Result(t, {"x": t}), lambda r: r.rest["x"]),
        (lambda t: Slotted(t), lambda r: r.loss),
    ],
)
def test_containers_keep_their_type(make: Any, get: Any):
    results = [make(tensor) for tensor in THREE]
    collected = collect(results, EQUAL)
    assert type(collected) is type(results[0])
    assert get(collected).reduce_sum().item() == 9


@pytest.mark.parametrize(
    "results",
    [
        [None, THREE[0]], [THREE[0], None], [THREE[0], 0.0], [[THREE[0]], [THREE[0]] * 2],
        [{"a": THREE[0]}, {"b": THREE[0]}], [1, 2], ["a", "b"], [(1,), [1]], [torch.Size([2, 3]), torch.Size([2, 1])],
    ],
    ids=repr,
)  # fmt: skip
def test_whatever_differs_between_microbatches_is_a_list(results: list[Any]):
    assert collect(results, [0.5, 0.5]) == results


def test_nothing_is_nothing():
    assert collect([None, None], [0.5, 0.5]) is None
