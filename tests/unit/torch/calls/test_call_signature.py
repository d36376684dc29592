"""Signatures: what tells two calls apart, and that every rank computes the same number for one."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.launching import SOURCE
from tests.long import long
from weft.torch.calls.call_signature import Spec, Watch, digest, function_name, hidden_in, scan


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Batch:
    ids: Any
    length: int = 0


@dataclass(slots=True)
class Slotted:
    ids: Any


def signature(*args: Any, values: bool = True, **kwargs: Any) -> tuple[Any, ...]:
    parts: list[Any] = []
    scan((args, kwargs), parts, [], values)
    return tuple(parts)


X, LONGER = torch.ones(2, 3), torch.ones(2, 4)
DIFFERENT = [
    ((X,), (LONGER,)),
    ((X,), (X.double(),)),
    ((X, 1), (X, 2)),
    ((X, "a"), (X, "b")),
    ((X, True), (X, None)),
    ((X, Color.RED), (X, Color.BLUE)),
    ((X, torch.float32), (X, torch.float16)),
    ((X, slice(0, 2)), (X, slice(0, 3))),
    ((X, [0, 1]), (X, (0, 1))),
    ((X, slice(0, 1)), (X, (0, 1, None))),
    (([1], 5), (1, [5])),
    (([X], LONGER), ([X, LONGER],)),
    (({"a": X},), ({"b": X},)),
    (({"a": 1}, 2), ({"a": 1, "b": 2},)),
    ((Batch(X),), (Batch(LONGER),)),
    ((Batch(X, 1),), (Batch(X, 2),)),
    ((Slotted(X),), (Slotted(LONGER),)),
    ((X, numpy.int64(3)), (X, numpy.int64(4))),
    ((X, 0.5), (X, 1)),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_calls_that_may_return_other_shapes_differ(one: Any, other: Any):
    assert signature(*one) != signature(*other)
    assert digest("f", signature(*one)) != digest("f", signature(*other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X,), (torch.zeros(2, 3),)),
        ((X, 0.5), (X, 0.25)),
        (({"a": X, "b": 1},), ({"a": X * 2, "b": 1},)),
        ((X, object()), (X, object())),
        ((X, torch.device("cpu")), (X, torch.device("cpu", 0))),
        ((X, nn.Linear(1, 1)), (X, nn.Linear(2, 2))),
    ],
)
def test_calls_that_differ_in_numbers_only_are_the_same(one: Any, other: Any):
    assert signature(*one) == signature(*other)
    assert digest("f", signature(*one)) == digest("f", signature(*other))


def test_without_values_whole_numbers_do_not_count():
    assert signature(X, 1, values=False) == signature(X, 2, values=False)
    assert signature(X, 1, values=False) != signature(X, None, values=False)


def test_tensors_are_found_in_order_and_hidden_ones_apart():
    a, b, c, d = (torch.ones(n) for n in range(1, 5))
    tensors: list[Tensor] = []
    cache = SimpleNamespace(layers=[c], more={"x": SimpleNamespace(deep=d)})
    tree = ([a, {"k": b}], cache, slice(c, None))
    scan(tree, [], tensors)
    assert [t.numel() for t in tensors] == [1, 2, 3]
    assert [t.numel() for t in hidden_in(tree)] == [3, 4]


def test_a_spec_survives_the_way_to_another_rank():
    spec = Spec(
        ["sequence", "builtins:tuple", [["tensor", ["float32", [2], [1], True]]]], True, 3, (0, 2), (-1, 1)
    )
    assert Spec.from_text(spec.to_text()) == spec
    assert isinstance(Spec.from_text(spec.to_text()).mutated, tuple)


PROGRAM = """
import torch, enum
from weft.torch.calls.call_signature import digest, function_name, scan

class Color(enum.Enum):
    RED = 1

parts = [True, None]
tree = ([torch.ones(2, 3), {"b": 1, "a": "text"}], torch.float16, Color.RED, slice(1, None), object(), 0.5)
scan(tree, parts, [])
names = [torch.add, torch.Tensor.__getitem__, torch.nn.functional.relu, torch.Tensor.T.__get__]
print(digest("layers.1", tuple(parts)), [function_name(name) for name in names])
"""


@long
def test_every_process_computes_the_same_number():
    outputs = set()
    for seed in ("0", "1", "4242"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SOURCE)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    number = int(outputs.pop().split()[0])
    assert 0 <= number < 2**63


def test_functions_have_full_names():
    assert function_name(torch.add) == "torch.add"
    assert function_name(F.relu).endswith("functional.relu")
    assert function_name(Tensor.__getitem__) == "torch.Tensor.__getitem__"
    assert len({function_name(f) for f in (torch.add, Tensor.add, Tensor.add_, Tensor.T.__get__)}) == 4


@pytest.mark.parametrize(
    ("function", "dynamic"),
    [
        (lambda x: x + 1, False),
        (lambda x: F.linear(x, x), False),
        (lambda x: x[torch.tensor([0, 1])], False),
        (lambda x: x[:, 1:], False),
        (lambda x: torch.where(x > 0, x, 0), False),
        (lambda x: x[x > 0], True),
        (lambda x: x.nonzero(), True),
        (lambda x: x.unique(), True),
        (lambda x: x.sum().item(), True),
        (lambda x: bool(x.any()), True),
        (lambda x: torch.masked_select(x, x > 0), True),
        (lambda x: x.repeat_interleave(torch.tensor([1, 2]), 0), True),
        (lambda x: x[:, : int(x.max().tolist())], True),
        (lambda x: x[: x.numpy().argmax()], True),
        (lambda x: x[: max(x.sum(1).long().tolist())], True),
        (lambda x: torch.tensor_split(x, torch.tensor([1]), 0), True),
        (lambda x: torch.tensor_split(x, tensor_indices_or_sections=torch.tensor(2)), True),
        (lambda x: torch.tensor_split(x, 2), False),
        (lambda x: numpy.asarray(x).shape, True),
        (lambda x: [row for row in x.split([1, 1])], False),
        (lambda x: pack_padded_sequence(x[..., None], torch.tensor([2, 1]), batch_first=True), True),
        (lambda x: x.repeat_interleave(2, 0), False),
    ],
)
def test_results_whose_shape_depends_on_data_are_noticed(function: Any, dynamic: bool):
    with Watch() as watch:
        function(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    assert watch.dynamic == dynamic
