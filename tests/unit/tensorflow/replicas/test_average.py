"""What is said about averages before any other rank is asked; ``tests/parity/tensorflow`` has the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

tf = pytest.importorskip("tensorflow")

from weft.config import Settings  # noqa: E402
from weft.errors import TransportError, UsageError  # noqa: E402
from weft.launch.discovery import Place  # noqa: E402
from weft.tensorflow.replicas.average import Flat, all_reduce, average, broadcast  # noqa: E402
from weft.tensorflow.session.session import Session  # noqa: E402
from weft.tensorflow.trace.capture import capture  # noqa: E402
from weft.topology.mesh import Mesh  # noqa: E402
from weft.transport.channel import ALIGNMENT  # noqa: E402


def session(ranks):
    return Session(settings=Settings(), place=Place(0, ranks), mesh=Mesh(ranks, 1), monitor=None, groups={})


def test_a_replica_alone_has_the_average():
    alone = session(1)
    by_rows = tf.IndexedSlices(tf.ones((2, 1)), tf.constant([1, 1]), tf.constant([2, 1]))
    found = average([by_rows, tf.constant(3.0)], alone)
    assert found[0] is by_rows and float(found[1]) == 3.0
    assert float(all_reduce(4.0, "max", alone)) == 4.0
    assert [int(each) for each in broadcast([1, 2], 0, alone)] == [1, 2]
    assert not alone.kept


def test_averages_do_not_go_into_a_step():
    two = session(2)

    def step(tensor):
        return average([tensor], two)

    with pytest.raises(UsageError, match=r"inside of a weft.step function.*average what the step returns"):
        capture("step", step, [tf.TensorSpec((2,))], lambda handle: False)


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
