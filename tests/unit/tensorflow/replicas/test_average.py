"""What is said about averages before any other rank is asked; ``tests/parity/tensorflow`` has the rest."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")

from weft.config import Settings  # noqa: E402
from weft.errors import UsageError  # noqa: E402
from weft.launch.discovery import Place  # noqa: E402
from weft.tensorflow.replicas.average import all_reduce, average, broadcast  # noqa: E402
from weft.tensorflow.session.session import Session  # noqa: E402
from weft.tensorflow.trace.capture import capture  # noqa: E402
from weft.topology.mesh import Mesh  # noqa: E402


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
