"""The names that scripts for TensorFlow import: smdistributed's, and Horovod's where it is not installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.launching import SOURCE
from tests.parity.tensorflow import jobs
from tests.unit.compat.test_names import python

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
needs_tensorflow = pytest.mark.skipif(not HAS_TENSORFLOW, reason="TensorFlow is not installed")


def forked(code: str, folder: Path) -> str:
    """What a script writes that is forked from a process with TensorFlow."""
    path = folder / "script.py"
    path.write_text(code)
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("SM_", "WEFT_"))}
    status, output = jobs.run([str(path)], {**environ, "PYTHONPATH": str(SOURCE)}, folder, timeout=300)
    assert status == 0, output
    return output


NAMES = """
import weft.compat; weft.compat.enable()
import smdistributed.modelparallel.tensorflow as smp
import horovod.tensorflow as hvd
import horovod.tensorflow.keras, smdistributed.dataparallel.tensorflow.keras
import smdistributed.modelparallel.tensorflow.v1
import smdistributed.dataparallel.tensorflow as sdp
import tensorflow as tf, keras
from weft.compat.tensorflow import horovod
from weft.errors import UsageError, ConfigError

def refused(kind, text, run):
    try:
        run()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)

hvd.init(); hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_rank(), horovod.axis()) == (0, 1, 0, "rdp")
smp.init({"microbatches": 2, "horovod": True, "contiguous": True, "xla": False, "fork": True, "partitions": 1})
assert smp.state.cfg.horovod and smp.state.cfg.microbatches == 2 and horovod.axis() == "rdp"
smp.init({"horovod": False})
assert horovod.axis() == "world" and smp.state.cfg.microbatches == 2
refused(ConfigError, "ddp and horovod exclude each other", lambda: smp.init({"horovod": True, "ddp": True}))
assert float(hvd.allreduce(tf.constant(2.0), op=hvd.Sum)) == float(hvd.allreduce(2.0, average=False)) == 2.0
refused(UsageError, "leave average out", lambda: hvd.allreduce(2.0, average=True, op=hvd.Sum))
optimizer = keras.optimizers.SGD(0.5)
refused(UsageError, "leave it out", lambda: hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2))
assert hvd.DistributedOptimizer(optimizer) is optimizer and type(optimizer).__name__ == "SGD"
assert optimizer.variables() == optimizer.variables != []
metric = keras.metrics.Mean()
metric.update_state(3.0)
metric.reset_states()
metric.update_state(1.0)
assert float(metric.result()) == 1.0
decay = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=2, decay_rate=0.5, staircase=True, name=None)
assert [float(decay(step)) for step in (0, 2)] == [0.5, 0.25]
assert keras.optimizers.schedules.PolynomialDecay(0.5, 2, name=None)(0) == 0.5
variable, other = keras.Variable([1.0, 2.0]), keras.Variable([1.0])

@tf.function
def train():
    loss = tf.reduce_sum(variable * variable)
    optimizer.apply_gradients(zip(optimizer.get_gradients(loss, [variable]), [variable]))

train()
assert variable.numpy().tolist() == [0.0, 0.0]
refused(UsageError, "outside of a graph", lambda: optimizer.get_gradients(0.0, [variable]))
without = tf.function(lambda: optimizer.get_gradients(tf.constant(1.0), [other]), autograph=False)
refused(UsageError, "which has no gradient", without)
assert smp.CommGroup.WORLD is smp.WORLD and smp.allgather(tf.constant(3)) == [3]
smp.barrier(); smp.core.barrier(); smp.mp_barrier()
refused(UsageError, "while a graph is traced", tf.function(smp.barrier, autograph=False))
refused(ImportError, "a folder that all machines share", lambda: smp.utils.send_checkpoint_files("a", 1))
refused(AttributeError, "docs/migration.md", lambda: smp.no_such_name)
called = []

@smp.register_post_partition_hook
def hook():
    called.append(tf.executing_eagerly())

model = smp.DistributedModel(keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]))
model.profile(tf.ones((2, 2)))
step = smp.step(lambda x: model(x))
assert not called
assert [step(tf.ones((size, 2))).merge().shape[0] for size in (4, 4, 8)] == [4, 4, 8]
assert called == [True] and model.partitioned
refused(UsageError, "before the first step", lambda: smp.register_post_partition_hook(hook))
print("done")
"""


@needs_tensorflow
def test_names_of_tensorflow_work_in_one_process(tmp_path):
    assert forked(NAMES, tmp_path).endswith("done\n")


KERAS_2 = """
import weft.compat; weft.compat.enable()
import smdistributed.dataparallel.tensorflow as sdp
import tensorflow as tf, tf_keras
sdp.init()
for kind in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
    variable, optimizer = tf.Variable([1.0, 2.0]), sdp.DistributedOptimizer(kind(0.5))
    assert isinstance(optimizer, kind)

    @tf.function
    def train():
        loss = tf.reduce_sum(variable * variable)
        optimizer.apply_gradients(zip(optimizer.get_gradients(loss, [variable]), [variable]))

    train()
    assert variable.numpy().tolist() == [0.0, 0.0] and len(optimizer.variables()) >= 1
print("done")
"""


@needs_tensorflow
@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed")
def test_optimizers_of_keras_2(tmp_path):
    assert forked(KERAS_2, tmp_path).endswith("done\n")


def test_without_tensorflow_the_names_say_what_to_install():
    code = """
import sys
sys.modules["tensorflow"] = None
import weft.compat; weft.compat.enable()
from weft.errors import UsageError
for name in ("smdistributed.modelparallel.tensorflow", "smdistributed.dataparallel.tensorflow", "horovod.tensorflow"):
    try:
        __import__(name)
    except ImportError as error:
        assert isinstance(error, UsageError) and "pip install 'weft[tensorflow]'" in str(error), error
        print("refused")
"""
    assert python(code) == ["refused"] * 3


def test_a_horovod_that_is_installed_is_left_alone(tmp_path):
    find = "import importlib.util as u; found = u.find_spec('horovod'); print(found and found.origin)"
    enabled = f"import weft.compat; weft.compat.enable(); {find}"
    assert python(find) == ["None"]
    assert python(enabled)[0].endswith("stand_ins/horovod/__init__.py")
    installed = tmp_path / "horovod" / "__init__.py"
    installed.parent.mkdir()
    installed.touch()
    assert python(enabled, PYTHONPATH=f"{SOURCE}:{tmp_path}") == [str(installed)]


ORDER = """
import sys, types
import tensorflow
import weft.compat; weft.compat.enable()
import smdistributed.dataparallel.tensorflow, smdistributed.modelparallel.tensorflow, horovod.tensorflow.keras
print(sorted({"torch._dynamo", "torch._inductor", "weft.torch"} & set(sys.modules)))
"""


@needs_tensorflow
def test_scripts_of_tensorflow_never_load_the_compiler_of_pytorch() -> None:
    """Its LLVM ends a process that has the one of TensorFlow."""
    assert python(ORDER)[-1] == "[]"
