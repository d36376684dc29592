"""Files of weights that variables read when they are made, in one process."""

from __future__ import annotations

import zipfile

import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import h5py  # noqa: E402
import numpy as np  # noqa: E402

import weft.tensorflow as weft  # noqa: E402
from weft.errors import CheckpointError, UsageError  # noqa: E402
from weft.tensorflow import private  # noqa: E402

L = keras.layers
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # of Keras itself


@keras.saving.register_keras_serializable("tests")
class Turned(L.Layer):
    """Keeps in files the transpose of its weights, and twice its scale."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5))
        self.scale = self.add_weight(shape=(5,))

    def call(self, x):
        return tf.matmul(x, self.kernel) * self.scale

    def save_own_variables(self, store):
        store["kernel"], store["scale"] = self.kernel.numpy().T, self.scale.numpy() * 2

    def load_own_variables(self, store):
        self.kernel.assign(keras.ops.transpose(store["kernel"]))
        self.scale.assign(store["scale"] / 2)


def build(width=4, dtype=None):
    keras.utils.set_random_seed(4)
    return keras.Sequential(
        [
            keras.Input((3,)),
            L.Normalization(dtype=dtype),
            L.Dense(width, dtype=dtype),
            L.BatchNormalization(dtype=dtype),
            Turned(dtype=dtype),
            L.Dense(2, dtype=dtype),
        ]
    )


def trained(dtype=None):
    net = build(dtype=dtype)
    rng = np.random.default_rng(1)
    for number, each in enumerate(net.variables):
        if each.dtype != "int32":
            each.assign(rng.normal(size=each.shape) ** 2 + number)
    net.layers[0].finalize_state()
    return net


def same(net, other):
    for one, two in zip(net.variables, other.variables, strict=True):
        assert np.array_equal(np.asarray(one.numpy(), "float32"), np.asarray(two.numpy(), "float32")), (
            one.path
        )
    x = tf.constant([[1.0, 2.0, 3.0]])
    assert np.array_equal(net(x).numpy(), other(x).numpy())


def delayed(**options):
    with weft.delay_param_initialization():
        return build(**options)


@pytest.fixture
def source():
    return trained()


@pytest.fixture
def job():
    weft.init({"microbatches": 2})
    yield
    weft.shutdown()


@pytest.mark.parametrize("name", ["a.weights.h5", "a.weights.json", "a.keras"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_file_waits_until_its_values_are_wanted(tmp_path, source, name, inside):
    path = tmp_path / name
    if name.endswith("json"):
        source.save_weights(path, max_shard_size=150 / 2**30)
        assert len(list(tmp_path.glob("*.h5"))) > 1
    else:
        source.save(path) if name.endswith("keras") else source.save_weights(path)
    with weft.delay_param_initialization():
        net = build()
        if inside:
            net.load_weights(path)
    if not inside:
        net.load_weights(path)
    dense = net.layers[1]
    assert private.waits(dense.kernel) and private.waits(dense.bias)
    for each in tmp_path.iterdir():
        each.unlink()
    same(net, source)
    assert not any(private.waits(each) for each in net.variables)


def test_a_model_that_is_loaded_waits(tmp_path, source):
    source.save(tmp_path / "a.keras")
    with weft.delay_param_initialization():
        net = keras.models.load_model(tmp_path / "a.keras")
    assert private.waits(net.layers[1].kernel)
    same(net, source)


def test_a_compressed_archive_is_read_whole(tmp_path, source):
    source.save(tmp_path / "a.keras")
    with zipfile.ZipFile(tmp_path / "a.keras") as plain:
        with zipfile.ZipFile(tmp_path / "b.keras", "w", zipfile.ZIP_DEFLATED) as other:
            for each in plain.namelist():
                other.writestr(each, plain.read(each))
    net = delayed()
    net.load_weights(tmp_path / "b.keras")
    same(net, source)


@pytest.mark.parametrize(
    ("saved", "kept"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16",) * 2]
)
def test_numbers_are_converted_as_keras_does(tmp_path, saved, kept):
    trained(dtype=saved).save_weights(tmp_path / "a.weights.h5")
    plain, net = build(dtype=kept), delayed(dtype=kept)
    for each in (plain, net):
        each.load_weights(tmp_path / "a.weights.h5")
    assert net.layers[1].kernel.dtype == kept
    same(net, plain)


def test_the_last_one_to_give_a_value_counts(tmp_path, source):
    source.save_weights(tmp_path / "a.weights.h5")
    net = delayed()
    dense = net.layers[1]
    dense.kernel.assign(tf.ones([3, 4]))
    net.load_weights(tmp_path / "a.weights.h5")
    assert np.array_equal(dense.kernel.numpy(), source.layers[1].kernel.numpy())
    dense.bias.assign(tf.ones([4]))
    assert dense.bias.numpy().tolist() == [1.0] * 4
    build_again = trained()
    build_again.set_weights([each * 2 for each in build_again.get_weights()])
    build_again.save_weights(tmp_path / "b.weights.h5")
    net = delayed()
    net.load_weights(tmp_path / "a.weights.h5")
    net.load_weights(tmp_path / "b.weights.h5")
    assert np.array_equal(net.layers[4].kernel.numpy(), build_again.layers[4].kernel.numpy())


def test_what_does_not_fit_is_the_error_of_keras_before_anything_is_changed(tmp_path, source):
    source.save_weights(tmp_path / "a.weights.h5")
    net, first = delayed(width=7), build(width=7)
    with pytest.raises(ValueError, match="objects could not be loaded"):
        net.load_weights(tmp_path / "a.weights.h5")
    assert private.waits(net.layers[4].bias)
    same(net, first)
    with pytest.raises(OSError, match="truncated"):
        short = tmp_path / "short.weights.h5"
        short.write_bytes((tmp_path / "a.weights.h5").read_bytes()[:4000])
        net.load_weights(short)
    same(net, first)


def test_layers_that_do_not_fit_are_skipped_with_a_warning(tmp_path, source):
    source.save_weights(tmp_path / "a.weights.h5")
    plain, net = build(width=7), delayed(width=7)
    for each in (plain, net):
        with pytest.warns(UserWarning, match="objects could not be loaded") as found:
            each.load_weights(tmp_path / "a.weights.h5", skip_mismatch=True)
        assert len([each for each in found if each.category is UserWarning]) == 1
    same(net, plain)


def test_a_file_that_changes_before_its_values_are_read_is_an_error(tmp_path, source):
    path = tmp_path / "a.weights.h5"
    source.save_weights(path)
    net = delayed()
    net.load_weights(path)
    with open(path, "r+b") as file:
        file.truncate(100)
    with pytest.raises(
        OSError, match=r"read from .*a\.weights\.h5 at /layers/dense/vars/0: the file has changed"
    ):
        net.layers[1].kernel.numpy()


def compressed(path, damaged):
    """Compress the tensors of a file of weights, and damage the last one."""
    found = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, each: found.update({name: each[()]} if isinstance(each, h5py.Dataset) else {})
        )
    with h5py.File(path, "w") as file:
        for name, value in found.items():
            options = {"compression": "gzip", "chunks": value.shape} if value.ndim else {}
            last = file.create_dataset(name, data=value, **options)
        where = last.id.get_chunk_info(0)
    if damaged:
        with open(path, "r+b") as file:
            file.seek(where.byte_offset)
            file.write(b"\xff" * where.size)


def test_a_compressed_tensor_that_is_damaged_changes_nothing(tmp_path, source, job):
    path = tmp_path / "a.weights.h5"
    source.save_weights(path)
    compressed(path, damaged=False)
    model = weft.DistributedModel(build())
    model.load_weights(path)
    same(model.module, source)
    model = weft.DistributedModel(build())
    before = model.get_weights()
    source.save_weights(path)
    compressed(path, damaged=True)
    with pytest.raises(CheckpointError, match="no weights can be read from .*Nothing was changed"):
        model.load_weights(path)
    assert all(np.array_equal(one, two) for one, two in zip(model.get_weights(), before, strict=True))


def test_a_wrapped_model_reads_when_its_values_are_made(tmp_path, source, job):
    source.save_weights(tmp_path / "a.weights.h5")
    model = weft.DistributedModel(delayed())
    with pytest.raises(UsageError, match="do not fit the model, nothing was changed"):
        weft.DistributedModel(delayed(width=7)).load_weights(tmp_path / "a.weights.h5")
    model.load_weights(tmp_path / "a.weights.h5")
    assert private.waits(model.module.layers[1].kernel)
    x = tf.ones([4, 3])
    assert np.array_equal(weft.step(lambda x: model(x))(x).merge().numpy(), source(x).numpy())


def test_models_that_do_not_wait_are_loaded_by_keras_alone(tmp_path, source):
    source.save_weights(tmp_path / "a.weights.h5")
    net, other = build(), delayed()
    net.load_weights(tmp_path / "a.weights.h5")
    same(net, source)
    assert private.waits(other.layers[1].kernel)


def test_a_disk_that_fails_meanwhile_is_told(tmp_path, source, job, monkeypatch):
    source.save_weights(tmp_path / "a.weights.h5")
    model, waits = weft.DistributedModel(build()), weft.DistributedModel(delayed())
    waits.load_weights(tmp_path / "a.weights.h5")
    called, load = [], L.Dense.load_own_variables

    def second(self, store):
        called.append(self)
        load(self, store)

    monkeypatch.setattr(L.Dense, "load_own_variables", second)
    monkeypatch.setattr(
        "weft.tensorflow.private.weight_files.KeptFile._version", lambda self: (len(called) > 2, 2, 10**6)
    )
    with pytest.raises(
        CheckpointError, match="has changed since load_weights. Some variables have other values"
    ):
        model.load_weights(tmp_path / "a.weights.h5", skip_mismatch=True)
    with pytest.raises(CheckpointError, match="has changed since load_weights; take another copy"):
        weft.step(lambda x: waits(x))(tf.ones([4, 3]))
