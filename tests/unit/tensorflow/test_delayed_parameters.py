"""Variables that wait for their values, in one process."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import weft.tensorflow as weft  # noqa: E402
from weft.tensorflow import private  # noqa: E402


@pytest.fixture
def job():
    weft.init({"microbatches": 2})
    yield
    weft.shutdown()


def build():
    keras.utils.set_random_seed(4)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def test_variables_wait_until_somebody_reads_them():
    plain = build()
    with weft.delay_param_initialization():
        net = build()
    kernel, bias = net.variables
    assert private.waits(kernel) and private.waits(bias) and not private.waits(plain.variables[0])
    assert kernel.shape == (3, 2) and kernel.path.endswith("/kernel")
    assert kernel.numpy().tolist() == plain.variables[0].numpy().tolist()
    assert not private.waits(kernel) and private.waits(bias)


def test_a_graph_that_reads_one_is_told_its_name():
    with weft.delay_param_initialization():
        net = build()
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="/(kernel|bias), which has no value before the first"
    ):
        tf.function(net)(tf.ones([1, 3]))


def test_what_the_script_assigns_stays(job):
    with weft.delay_param_initialization():
        model = weft.DistributedModel(build())
    kernel, bias = model.all_variables()
    kernel.assign(tf.ones([3, 2]))
    bias.assign([1.0, 2.0])
    assert weft.step(lambda x: model(x))(tf.ones([2, 3])).merge().numpy().tolist() == [[4.0, 5.0]] * 2


@pytest.mark.parametrize("jit_compile", [None, True])
def test_a_step_of_one_process_makes_them(job, jit_compile):
    plain = build()
    with weft.delay_param_initialization():
        model = weft.DistributedModel(build())
    x = tf.ones([4, 3])
    step = weft.step(lambda x: model(x), jit_compile=jit_compile)
    for call in (step, tf.function(lambda x: step(x).merge())):
        found = call(x)
        found = found.merge() if isinstance(found, weft.StepOutput) else found
        assert found.numpy() == pytest.approx(plain(x).numpy())


def test_only_layers_wait_and_only_if_the_seed_is_a_number():
    with weft.delay_param_initialization():
        net = build()
        own = keras.layers.Dense(2, kernel_initializer=lambda shape, dtype=None: tf.ones(shape))
        seeded = keras.layers.Dense(
            2, kernel_initializer=keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(1))
        )
        for layer in (own, seeded):
            layer.build((None, 3))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(net.trainable_variables)
    assert [private.waits(layer.kernel) for layer in (own, seeded)] == [False, False]
    assert not any(private.waits(variable) for variable in optimizer.variables)


def test_a_flag_can_decide():
    with weft.delay_param_initialization(enabled=False):
        net = build()
    assert not any(private.waits(variable) for variable in net.variables)
