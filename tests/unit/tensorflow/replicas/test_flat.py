"""Tensors become flat ones, and come back."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
import torch  # noqa: E402

from weft.errors import TransportError  # noqa: E402
from weft.tensorflow.replicas.flat import Flat  # noqa: E402
from weft.transport.channel import ALIGNMENT  # noqa: E402

TENSORS = [
    tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant(5.0), tf.zeros((0, 3)), tf.constant([True, False]),
    tf.constant([6, 7, 8], tf.int64), tf.constant([9.0], tf.bfloat16), tf.range(33.0),
]  # fmt: skip


def test_tensors_come_back_as_they_were():
    flat = Flat(TENSORS)
    assert [part.dtype for part in flat.parts] == [torch.float32, torch.bool, torch.int64, torch.bfloat16]
    for before, after in zip(TENSORS, flat.tensors(), strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert np.array_equal(before.numpy(), after.numpy())


def test_results_are_where_the_flat_tensor_is():
    flat = Flat([TENSORS[0], TENSORS[1]])
    (whole,) = flat.parts
    assert whole.nbytes == 2 * ALIGNMENT and whole.sum() == 15.0  # zeros in between
    first, second = flat.tensors()
    whole.add_(1.0)
    assert first.numpy().tolist() == [[2, 3], [4, 5]] and float(second) == 6.0


def test_a_scale_leaves_what_was_given_alone():
    given = tf.constant([2.0, 4.0])
    assert Flat([given], 0.5).tensors()[0].numpy().tolist() == [1.0, 2.0]
    assert given.numpy().tolist() == [2.0, 4.0]


def test_texts_do_not_travel():
    with pytest.raises(TransportError, match=r"a tensor of string cannot be sent"):
        Flat([tf.constant("text")])
