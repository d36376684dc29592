"""What a checkpoint holds beside the model: values of known kinds, by tags that keep their meaning."""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from weft.communication.serialise import MAX_DEPTH
from weft.errors import CheckpointError, UsageError
from weft.torch.tensors import saved_values


class Options(argparse.Namespace):
    pass


@dataclass
class Point:
    x: int = 1


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("no copy of me")


def encode(value: Any, allow_pickle: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    content = saved_values.encoder(tensors, "user", allow_pickle).encode(value, "value")
    return json.loads(json.dumps(content)), tensors


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ([1, None, {"a": True}], [1, None, {"a": True}]),
        (2**63, {"$int": "0x8000000000000000"}),
        (float("-inf"), {"$float": "-inf"}),
        ((1, (2,)), {"$tuple": [1, {"$tuple": [2]}]}),
        (torch.Size([2]), {"$tuple": [2]}),
        (frozenset({3}), {"$set": [3]}),
        ({1: 2}, {"$dict": [[1, 2]]}),
        ({"$tensor": "x"}, {"$dict": [["$tensor", "x"]]}),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(int, {"a": 1}), {"a": 1}),
        (bytearray(b"\xff"), {"$bytes": "/w=="}),
        (Options(lr=0.5), {"$namespace": {"lr": 0.5}}),
        (torch.bfloat16, {"$dtype": "bfloat16"}),
        (torch.device("cuda", 1), {"$device": "cuda:1"}),
        (torch.ones(2, requires_grad=True), {"$tensor": "user/0"}),
        (numpy.float32(2), {"$scalar": ["user/0", "<f4", []]}),
        (numpy.ones((1, 2), ">i2").view(numpy.matrix), {"$numpy": ["user/0", ">i2", [1, 2]]}),
    ],
    ids=str,
)
def test_each_kind_of_value_has_its_tag(value, content):
    found, tensors = encode([value])
    assert found == [content]
    assert not any(tensor.requires_grad for tensor in tensors.values())


@pytest.mark.parametrize("numel", [3, 5])
def test_bytes_that_are_not_those_of_an_array_are_refused(numel: int):
    """More of them would be cut off, and fewer made up, in silence."""
    read = saved_values.decoder(lambda path: torch.zeros(numel))
    with pytest.raises(CheckpointError, match=rf"it has {4 * numel} bytes in the place of 16"):
        read.decode({"$numpy": ["user/0", "<f4", [4]]})


@pytest.mark.parametrize("value", [1j, Point(), numpy.array(["a"]), numpy.array([{}]), range(2)], ids=str)
def test_values_of_other_kinds_are_refused_or_pickled(value):
    with pytest.raises(UsageError, match=r"^value\[0\] is a .*: a checkpoint holds numbers"):
        encode([value])
    content, tensors = encode([value], allow_pickle=True)
    with pytest.raises(
        CheckpointError, match="this checkpoint holds a pickled object, .* pass allow_pickle=True"
    ):
        saved_values.decoder(tensors.__getitem__).decode(content)
    back = saved_values.decoder(tensors.__getitem__, allow_pickle=True).decode(content)[0]
    assert type(back) is type(value) and str(back) == str(value)
    left = saved_values.decoder(tensors.__getitem__, allow_pickle="leave").decode(content)
    assert str(left) == "[<a pickled object that was not read>]"


def test_a_value_that_pickle_refuses_is_named():
    fault = r"value\['a'\] is of type Unpicklable, which pickle refuses \(no copy of me\)"
    with pytest.raises(UsageError, match=fault):
        encode({"a": Unpicklable()}, allow_pickle=True)


def test_circles_and_deep_values_are_refused():
    circle: list[Any] = [1]
    circle.append({"again": circle})
    with pytest.raises(UsageError, match=r"value\[1\]\['again'\] contains itself"):
        encode(circle)
    deep: Any = ()
    for _ in range(MAX_DEPTH + 1):
        deep = (deep,)
    with pytest.raises(UsageError, match=f"lies deeper than {MAX_DEPTH} levels"):
        encode(deep)
    twice = [1]
    assert encode([twice, twice])[0] == [[1], [1]]


@pytest.mark.parametrize(
    "content",
    [{"$dataclass": [__name__, "Point", {}]}, {"$complex": "1j"}, {"$default": []}, {"$": 1}],
    ids=str,
)
def test_other_tags_are_unknown_in_files(content):
    with pytest.raises(CheckpointError, match=r"\$\w* of this checkpoint is unknown to this version of weft"):
        saved_values.decoder({}.__getitem__).decode(content)
