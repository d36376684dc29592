"""Objects become text and bytes and come back equal; what cannot is named with its path."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from weft.communication.handshake import MAX_PARTS, SMALL, Body, Header, make_body, make_header
from weft.communication.messages import decode, encode, pack, unpack
from weft.communication.serialise import MAX_DEPTH
from weft.errors import TransportError, UsageError
from weft.transport.channel import READ, Key, Message

CPU = torch.device("cpu")
KEY = Key(READ, 0, 0, 0)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn, torch.uint16,
)  # fmt: skip


@dataclasses.dataclass
class Point:
    x: int
    tags: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.x *= 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Point
    values: Tensor


@dataclasses.dataclass
class Both(dict):  # type: ignore[type-arg]
    x: int = 0


class Colour(enum.Enum):
    RED = 1


def there_and_back(value: Any, **keywords: Any) -> Any:
    packed = pack(value, **keywords)
    return unpack(packed.text, packed.blobs, CPU, **keywords)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS | st.frozensets(st.integers()) | st.sets(st.text()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_with_their_types(value):
    assert same(there_and_back(value), value)
    assert same(there_and_back({"$tuple": value}), {"$tuple": value})
    assert same(there_and_back({"$x": value, "x": [value]}), {"$x": value, "x": [value]})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_tensors_come_back_without_their_graph(dtype, shape):
    tensor = torch.arange(math.prod(shape)).to(torch.float32).to(dtype).view(shape)
    back = there_and_back({"t": [tensor]})["t"][0]
    assert back.dtype == dtype and back.shape == tensor.shape
    assert torch.equal(back.view(torch.uint8) if shape else back.view(1).view(torch.uint8),
                       tensor.view(torch.uint8) if shape else tensor.view(1).view(torch.uint8))  # fmt: skip


def test_views_parameters_and_conjugates():
    parameter = nn.Parameter(torch.randn(4, 5))
    back = there_and_back([parameter.t(), parameter[::2, 1], torch.tensor([1 + 2j]).conj()])
    assert torch.equal(back[0], parameter.t()) and torch.equal(back[1], parameter[::2, 1])
    assert back[2].tolist() == [1 - 2j]
    assert not back[0].requires_grad


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(6, dtype="<f4").reshape(2, 3)[:, ::2],
        numpy.array(["a", "long"]),
        numpy.array([], dtype="U"),
        numpy.array("2020-01-02", dtype="datetime64[D]"),
        numpy.arange(3, dtype=">i2"),
        numpy.float32(2.5),
        numpy.zeros((0, 2), bool),
    ],
    ids=str,
)
def test_arrays_come_back(array):
    back = there_and_back((array,))[0]
    assert type(back) is type(array) and back.dtype == array.dtype and back.shape == array.shape
    assert (back == array).all()


def test_dataclasses_are_filled_in_without_running_their_code():
    point = Point(3, [1, "a"])
    back = there_and_back(Frozen(point, torch.ones(2)))
    assert type(back) is Frozen and back.inner == point and back.inner.x == 6
    assert back.values.tolist() == [1, 1]


def test_torch_s_small_types():
    value = [torch.Size([2, 3]), torch.float16, torch.device("cuda", 1)]
    assert there_and_back(value) == value and type(there_and_back(value)[0]) is torch.Size


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by PyTorch 2.11, as it unpickles
def test_pickle_only_where_both_sides_allow_it():
    value = {"colour": Colour.RED, "sparse": torch.eye(2).to_sparse()}
    back = there_and_back(value, allow_pickle=True)
    assert back["colour"] is Colour.RED and torch.equal(back["sparse"].to_dense(), torch.eye(2))
    packed = pack(value, allow_pickle=True)
    assert packed.pickled == ["the object['colour']", "the object['sparse']"]
    with pytest.raises(
        TransportError, match="this message holds a pickled object, .*: pass allow_pickle=True"
    ):
        unpack(packed.text, packed.blobs, CPU)


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def cyclic() -> list[Any]:
    value: list[Any] = [1]
    value.append({"again": value})
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            {"a": [1, Colour.RED]},
            r"the object\['a'\]\[1\] is of type .*Colour, which cannot travel: JSON's values",
        ),
        (
            (Colour.RED, {"b": {1, 2, Colour}}),
            r"the object\[0\] is .*; the object\[1\]\['b'\]\[\d\] is of type",
        ),
        ([lambda: 0], r"the object\[0\] is of type builtins.function"),
        (Both(), "the object is of type .*Both, which"),
        (
            Frozen(Point(1), torch.ones(1, device="meta")),
            r"the object.values is a tensor without data on this rank",
        ),
        ([torch.eye(2).to_sparse()], r"the object\[0\] is a Tensor of .* layout torch.sparse_coo"),
        ([numpy.array([{}])], r"the object\[0\] is a NumPy array of dtype object"),
        ({"x": cyclic()}, r"the object\['x'\]\[1\]\['again'\] contains itself"),
        (nested(MAX_DEPTH + 1), f"lies deeper than {MAX_DEPTH} levels"),
    ],
    ids=lambda value: "",
)
def test_what_cannot_travel_is_named(value, text):
    with pytest.raises(TransportError, match=text):
        pack(value)


def test_parameters_of_other_ranks_have_no_data():
    with pytest.raises(TransportError, match=r"\['w'\] is a tensor without data on this rank"):
        pack({"w": torch.zeros(2)}, is_remote=lambda tensor: True)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"$dataclass": ["os", "system", {}]}, "dataclass os.system, which this rank"),
        ({"$dataclass": ["not_here", "A", {}]}, "import not_here on every rank"),
        ({"$dataclass": [__name__, "Point", {"y": 1}]}, "with the fields y, which"),
        ({"$dataclass": [__name__, "Both", {}]}, r"the dataclass .*\.Both, which this rank does not know"),
        ({"$nonsense": 1}, r"\$nonsense of this message is unknown"),
        (
            {"$tensor": [9, "float32", [1], True]},
            r"\$tensor of .* cannot be read .*it has 1 pieces, and no 9",
        ),
        ({"$tensor": [0, "system", [1], True]}, "cannot be read .*'system' is no dtype"),
        ({"$tensor": [0, "quint8", [8], True]}, "cannot be read .*tensors of dtype quint8 do not travel"),
        ({"$tensor": [0, "float32", [9], True]}, "cannot be read"),
        ({"$tensor": 0}, "cannot be read"),
        ({"$bytes": [float("inf"), "uint8", [8], True]}, "cannot be read .*it has 1 pieces, and no inf"),
        ({"$bytes": [-1, "uint8", [8], True]}, "cannot be read .*it has 1 pieces, and no -1"),
        ({"$bytes": [0, "uint8", [9], True]}, "cannot be read"),
        ({"$int": "f" * 10**6 + "g"}, "cannot be read"),
        ({"$dict": [[[1], 2]]}, "cannot be read .*unhashable"),
        ({"$numpy": [[0, "uint8", [8], True], "|O8", [1]]}, "'|O8' is no dtype"),
        ({"$numpy": [[0, "uint8", [8], True], "<f4", [-1, -2]]}, "its shape cannot be"),
        ({"$numpy": [[0, "uint8", [8], True], "<f8", [2**40]]}, "cannot be read"),
        (nested(MAX_DEPTH + 5), f"more than {MAX_DEPTH} levels deep"),
        ({"$tuple": nested(MAX_DEPTH + 1)}, f"more than {MAX_DEPTH} levels deep"),
    ],
    ids=lambda value: "",
)
def test_nothing_that_arrives_is_believed(content, text):
    with pytest.raises(TransportError, match=text):
        unpack(json.dumps(content), [torch.zeros(8, dtype=torch.uint8)], CPU)


@pytest.mark.parametrize("text", ["", "{", "[" * 10**6, "9" * 5000])
def test_a_text_that_is_no_json_is_refused(text):
    with pytest.raises(
        TransportError, match="what arrived cannot be read as an object .*; do all ranks run the same"
    ):
        unpack(text, [], CPU)


@pytest.mark.parametrize(
    "value",
    [True, 3, 2**70, 2.5, float("nan"), 1 - 2j, "text", [1, [2.5, None]], [], [[1j]], (1, 2), torch.float16],
    ids=str,
)
def test_values_that_a_step_reads_are_told_in_a_text(value):
    text, payload = encode(value, "tolist()")
    assert payload is None and same(decode(Message(KEY, None, text)), value)


@pytest.mark.parametrize("array", [numpy.arange(6.0).reshape(2, 3), numpy.zeros((0, 2), "i2")], ids=str)
def test_arrays_that_a_step_reads_are_told_as_tensors(array):
    text, payload = encode(array, "numpy()")
    assert text is None and payload is not None
    back = decode(Message(KEY, payload))
    assert type(back) is numpy.ndarray and back.dtype == array.dtype and (back == array).all()


@pytest.mark.parametrize("value", [Colour.RED, [torch.ones(1)], [numpy.ones(1)], b"ab", range(3)], ids=str)
def test_other_values_that_a_step_reads_are_refused(value):
    with pytest.raises(
        UsageError, match=f"x\\(\\) reads a {type(value).__name__} out of a tensor, which cannot"
    ):
        encode(value, "x()")


def test_a_body_holds_what_its_header_tells():
    packed = pack([torch.zeros(3), b"ab", torch.zeros(SMALL)])
    header = make_header(0, 0, packed)
    content = make_body(packed)
    assert header.body_bytes == content.numel() and header.part_bytes == 12 + 2 + 4 * SMALL
    body = Body(content, header)
    assert list(body.large()) == [2]
    body.parts[2] = packed.blobs[2]
    assert body.value(CPU, False)[1] == b"ab"
    for wrong in (header._replace(part_bytes=5), header._replace(text_bytes=header.text_bytes - 1)):
        with pytest.raises(TransportError, match="the sizes of what arrived do not add up"):
            Body(content, wrong)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (Header(0, 0, 10, 1, 100, 18), ""),
        (Header(0, 0, 10, 1, 101, 18), "101 bytes, more than max_bytes=100"),
        (Header(0, 0, 10, 1, -1, 18), "-1 bytes"),
        (Header(0, 0, 10, MAX_PARTS + 1, 0, 18), "parts: send it in pieces"),
        (Header(0, 0, 1 << 40, 0, 0, 1 << 40), "its text has"),
        (Header(0, 0, 10, 1, 100, 1 << 40), "do not add up"),
        (Header(0, 0, 10, 1, 100, 18, 1), "needs allow_pickle=True here too"),
    ],
)
def test_too_much_is_refused_by_its_header(header, text):
    assert text in header.find_excess(100, False) and bool(header.find_excess(100, False)) == bool(text)
