"""TensorFlow's own way to split a model: one client places layers on two servers by ``tf.device``.

python -m benchmarks.tensorflow.servers MODEL STEPS
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

PORTS = (29711, 29712)


def serve(number: int) -> None:
    """Process ``number`` of the cluster, until it is killed."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    spec = {"worker": [f"127.0.0.1:{port}" for port in PORTS]}
    tf.distribute.Server(spec, job_name="worker", task_index=number).join()


def train(name: str, steps: int) -> None:
    """The client: the first half of the layers on one server, the second half on the other."""
    import keras

    import tensorflow as tf
    from benchmarks.tensorflow.worker import MICROBATCHES, measure, plain, problem

    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in PORTS]})
    )
    devices = [f"/job:worker/task:{number}/device:CPU:0" for number in (0, 1)]
    original, made = keras.layers.Layer.__call__, [0]

    def here(layer: Any) -> str:
        if not hasattr(layer, "_bench_device"):
            object.__setattr__(layer, "_bench_device", devices[made[0] >= HALF[name]])
            made[0] += 1
        return str(layer._bench_device)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with tf.device(here(self)):
            return original(self, *args, **kwargs)

    keras.layers.Layer.__call__ = call  # type: ignore[method-assign]
    with tf.device(devices[0]):
        model, x, y = problem(name)
    print("TOOK " + json.dumps(measure(plain(model, MICROBATCHES), x, y, steps)), flush=True)


HALF = {"gpt128": 22, "gpt256": 22, "cnn": 16}
"""So many layers are called for the first time before the middle of the model."""


def main() -> None:
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
        return
    servers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.tensorflow.servers", "serve", str(number)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for number in (0, 1)
    ]  # fmt: skip
    try:
        train(sys.argv[1], int(sys.argv[2]))
    finally:
        for server in servers:
            server.kill()


if __name__ == "__main__":
    main()
