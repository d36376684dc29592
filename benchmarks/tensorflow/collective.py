"""The sum of 32 MiB over two processes: weft's, and that of ``MultiWorkerMirroredStrategy``.

python -m benchmarks.tensorflow.collective NAME ROUNDS        on each process
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import tensorflow as tf

BYTES = 32 << 20
PORTS = (29721, 29722)


def main() -> None:
    name, rounds = sys.argv[1], int(sys.argv[2])
    rank = int(os.environ["RANK"])
    if name == "weft":
        import weft.tensorflow as weft
        from weft.tensorflow.replicas.average import average
        from weft.tensorflow.session.session import session

        weft.init({})

        @tf.function
        def step(values: tf.Tensor) -> tf.Tensor:
            return average([values], session())[0]

        values = tf.ones([BYTES // 4])
    else:
        os.environ["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": [f"127.0.0.1:{port}" for port in PORTS]},
                "task": {"type": "worker", "index": rank},
            }
        )
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            values = tf.ones([BYTES // 4])

        @tf.function
        def step(values: tf.Tensor) -> tf.Tensor:
            def inside(given: tf.Tensor) -> tf.Tensor:
                with tf.device("CPU:0"):  # what has no device cannot be summed
                    own = tf.identity(given)
                return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, own)

            return strategy.run(inside, args=(values,))

    times = []
    for number in range(rounds + 3):
        began = time.perf_counter()
        step(values).numpy()[0]  # noqa: B018
        if number >= 3:
            times.append(time.perf_counter() - began)
    if rank == 0:
        print("TOOK " + json.dumps(1e3 * statistics.median(times)), flush=True)


if __name__ == "__main__":
    main()
