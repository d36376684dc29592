"""What a model knows of the partitions of its variables."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import weft.tensorflow as weft  # noqa: E402
from weft.errors import UsageError  # noqa: E402
from weft.tensorflow.private import handle_of, key_of  # noqa: E402


@pytest.fixture
def model():
    weft.init()
    try:
        yield weft.DistributedModel(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))
    finally:
        weft.shutdown()


def test_a_model_knows_the_partitions_of_its_own_variables_only(model):
    kernel, bias = (key_of(handle_of(variable)) for variable in model.all_variables())
    gone = key_of(object())  # another variable may get this number
    model.finish_partition({kernel: 0, gone: 1})
    assert model.owners == {kernel: 0}
    model.finish_partition({bias: 0})
    assert model.owners == {kernel: 0, bias: 0}
    assert [model.owner_of(variable) for variable in model.all_variables()] == [0, 0]


@pytest.mark.parametrize(
    ("backend", "more"), [("jax", "KERAS_BACKEND=tensorflow$"), ("torch", "weft.torch$")]
)
def test_keras_on_another_framework_is_refused_at_once(monkeypatch, backend, more):
    monkeypatch.setattr(keras.config, "backend", lambda: backend)
    with pytest.raises(UsageError, match=f"Keras runs on {backend} here.*{more}"):
        weft.init()
    assert not weft.is_initialized()
