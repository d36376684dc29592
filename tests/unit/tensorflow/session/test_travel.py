"""What objects of TensorFlow become on their way to another rank, and back."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import torch  # noqa: E402

from weft.communication.messages import pack, unpack  # noqa: E402
from weft.errors import TransportError  # noqa: E402
from weft.tensorflow.session.wire import incoming, outgoing  # noqa: E402


def there_and_back(value: Any) -> Any:
    packed = pack(outgoing(value))
    return incoming(unpack(packed.text, packed.blobs, torch.device("cpu")))


def test_keys_that_have_no_order():
    value = {1: tf.constant([1.0, 2.0]), "a": 3, (1, 2): [tf.constant(True), None]}
    found = there_and_back(value)
    assert list(found) == [1, "a", (1, 2)] and found["a"] == 3
    assert tf.is_tensor(found[1]) and found[1].numpy().tolist() == [1.0, 2.0]
    assert found[1, 2][0].numpy() and found[1, 2][1] is None


def test_containers_keep_their_types():
    value = OrderedDict(b=(tf.Variable([1, 2]), {3}), a=[])
    found = there_and_back(value)
    assert type(found) is OrderedDict and list(found) == ["b", "a"]
    assert type(found["b"]) is tuple and found["b"][0].numpy().tolist() == [1, 2] and found["b"][1] == {3}


@pytest.mark.parametrize("deep", [False, True])
def test_what_contains_itself_or_lies_too_deep_is_named(deep: bool):
    value: list[Any] = []
    if deep:
        for _ in range(2000):
            value = [value]
    else:
        value += [value, value]
    with pytest.raises(TransportError, match="lies deeper than" if deep else "contains itself"):
        there_and_back(value)


def test_values_of_several_tensors_are_named():
    with pytest.raises(
        TransportError, match=r"the object\['x'\] is of type .*RaggedTensor, which cannot travel"
    ):
        there_and_back({"x": tf.ragged.constant([[1], [2, 3]])})
