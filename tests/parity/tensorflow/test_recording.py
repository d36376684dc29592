"""What real jobs of TensorFlow record: the parts of their steps add up, and a data set that sleeps is seen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from tests.launching import run_ranks  # noqa: E402
from tests.long import long, one_in  # noqa: E402
from tests.parity.tensorflow.jobs import WARM  # noqa: E402
from weft.analysis.analysis import Analysis  # noqa: E402
from weft.profiler.reading import read_run  # noqa: E402

DATA = """
import sys, time
import numpy as np
import keras
import tensorflow as tf
import weft.tensorflow as weft

weft.init({"partitions": 2, "microbatches": 2, "optimize": "speed"})
keras.utils.set_random_seed(1)

def produce():
    for number in range(5):
        time.sleep(0.25)
        yield np.full((8, 4), number / 5, "float32"), np.full((8, 1), number / 5, "float32")

data = tf.data.Dataset.from_generator(
    produce, output_signature=(tf.TensorSpec((8, 4)), tf.TensorSpec((8, 1)))
)
options = tf.data.Options()
options.experimental_optimization.inject_prefetch = False  # nothing is made before it is asked for
data = data.with_options(options)
layers = [keras.layers.Dense(4, activation="tanh") for _ in range(3)] + [keras.layers.Dense(1)]
"""
LOOP = (
    DATA
    + """
model = weft.DistributedModel(keras.Sequential(layers))
optimizer = keras.optimizers.SGD(0.01)

@weft.step
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    return tape.gradient(loss, model.trainable_variables), loss

for x, y in data:
    gradients, loss = train_step(x, y)
    means = [each.accumulate() for each in gradients]
    optimizer.apply_gradients(zip(means, model.trainable_variables))
weft.save_checkpoint(sys.argv[1], "tag", model, optimizer)
"""
)
FIT = (
    DATA
    + """
model = weft.DistributedModel(keras.Sequential(layers))
model.compile("sgd", "mse")
model.fit(data, verbose=0, steps_per_epoch=5)
"""
)


@pytest.mark.parametrize("script", one_in(2, [FIT, LOOP]), ids=["fit", "loop"])
def test_a_data_set_that_sleeps_is_seen(tmp_path: Path, script: str):
    options = ["--record", str(tmp_path / "run")]
    run_ranks(2, script, [str(tmp_path / "saved")], options=options, warm=WARM).check()
    analysis = Analysis(read_run(tmp_path / "run"))
    run = analysis.run
    assert run.warnings == () and run.complete and run.ranks == (0, 1)
    for rank in run.ranks:
        for period, parts in analysis.parts[rank].items():
            assert parts.total == pytest.approx(period.duration_s, abs=1e-6)
        steps = run.steps[rank]
        assert [step.step for step in steps] == [1, 2, 3, 4, 5]
        assert all(step.samples == 8 and step.work_s > 0 and step.memory_bytes > 1 << 20 for step in steps)
        assert all(step.optimizer_s > 0 for step in steps[:-1])
        waited = [parts.data for period, parts in analysis.parts[rank].items()]
        assert sum(seconds > 0.1 for seconds in waited) >= 3, waited
        kinds = {span.kind for span in run.timeline.of_rank(rank)}
        assert {"data", "optimizer", "prepare", "step", "F", "B"} <= kinds
        assert ("checkpoint" in kinds) == (script == LOOP)
        assert {unit.partition for unit in run.facts[rank].units} == {0, 1}
        assert "TensorFlow" in run.facts[rank].versions
    assert "wait" in {span.kind for span in run.timeline.of_rank(1)}, "for the first rank to begin"


XLA = (
    DATA
    + """
model = weft.DistributedModel(keras.Sequential(layers))
optimizer = keras.optimizers.SGD(0.01)

@weft.step
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    return tape.gradient(loss, model.trainable_variables), loss

@tf.function(jit_compile=True)
def update(means):
    optimizer.apply_gradients(zip(means, model.trainable_variables))

for x, y in data:
    gradients, loss = train_step(x, y)
    update([each.accumulate() for each in gradients])
"""
)


def test_an_optimizer_that_xla_compiles_is_left_alone(tmp_path: Path):
    options, shown = ["--record", str(tmp_path / "run")], {"WEFT_OPENING": "on"}
    done = run_ranks(2, XLA, env=shown, options=options, warm=WARM).check()
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("weft: 2 partitions of ")]
    assert re.search(
        r", 1F1B, \d+ microbatch.*; train_step (equals|was not compared with) one process", line
    ), line
    run = read_run(tmp_path / "run")
    assert run.complete and all(len(run.steps[rank]) == 5 for rank in run.ranks)
    assert all(step.optimizer_s == 0 for rank in run.ranks for step in run.steps[rank])


ALONE = (
    DATA
    + """
model = weft.DistributedModel(keras.Sequential(layers))
optimizer = keras.optimizers.SGD(0.01)

@weft.step
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    return tape.gradient(loss, model.trainable_variables), loss

@weft.step
def test_step(x):
    return model(x)

def train(x, y):
    gradients, loss = train_step(x, y)
    optimizer.apply_gradients(zip([each.accumulate() for each in gradients], model.trainable_variables))
    return loss.reduce_mean()

train = {"graph": tf.function(train), "calls": train}[sys.argv[1]]
for x, y in data:
    loss = train(x, y)
    test_step(x)
    weft.log({"loss": loss})
"""
)


@pytest.mark.parametrize("way", one_in(2, ["graph", "calls"]))
def test_a_process_alone_counts_its_steps(tmp_path: Path, way: str):
    script = ALONE.replace('"partitions": 2', '"partitions": 1')
    options = ["--record", str(tmp_path / "run"), "--log-dir", str(tmp_path / "log")]
    run_ranks(1, script, [way], options=options, warm=WARM).check()
    run = read_run(tmp_path / "run")
    steps = run.steps[0]
    assert [step.evaluates for step in steps] == [False, True] * 5 and all(
        step.samples == 8 for step in steps
    )
    assert all(0 < step.work_s <= step.step_s for step in steps)
    assert all(step.optimizer_s > 0 for step in steps if not step.evaluates)
    assert all("loss" in step.values for step in steps if step.evaluates)
    (log,) = (path for path in (tmp_path / "log").glob("*.jsonl") if path.name != "events.jsonl")
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3, 4, 5]


OPEN = (
    DATA
    + """
model = weft.DistributedModel(keras.Sequential(layers))

@weft.step(input_signature=[tf.TensorSpec([None, 4])])
def train_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x, training=True) ** 2)
    return tape.gradient(loss, model.trainable_variables), loss

around = tf.function(lambda x: train_step(x)[1].reduce_mean(), reduce_retracing=True)
for samples in (8, 12):
    train_step(tf.ones([samples, 4]))
    around(tf.ones([samples, 4]))
weft.init({"partitions": 2, "microbatches": 2, "optimize": "speed", "record": sys.argv[1]})
for samples in (8, 16):
    train_step(tf.ones([samples, 4]))
    around(tf.ones([8, 4]))
"""
)


@long
def test_samples_of_a_mini_batch_whose_size_is_left_open(tmp_path: Path):
    options = ["--record", str(tmp_path / "run")]
    run_ranks(2, OPEN, [str(tmp_path / "run")], options=options, warm=WARM).check()
    run = read_run(tmp_path / "run")
    assert [step.samples for step in run.steps[0]] == [8, 8, 12, 12, 8, 8, 16, 8]


@long
def test_a_function_that_was_traced_before_the_recording_is_named(tmp_path: Path):
    outcome = run_ranks(2, OPEN, [str(tmp_path / "run")], warm=WARM).check()
    run = read_run(tmp_path / "run")
    assert [step.samples for step in run.steps[0]] == [8, 8, 16, 8]
    assert [step.work_s > 0 for step in run.steps[0]] == [True, False, True, False]
    told = "the recording has when train_step ran, and nothing of what is in it"
    assert (outcome.stdout + outcome.stderr).count(told) == 2, "once on each rank"
