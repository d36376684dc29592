"""A job that is started again, and what its script reads before the first step; run by test_checkpoints.py.

    weft run -n 2 tests/parity/tensorflow/early_reads.py write|read FOLDER

"write" trains two steps, saves and trains two more; "read" resumes before its first step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.saves import FEATURES, batch, refused
from weft.errors import UsageError

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "built": lambda: keras.optimizers.Adam(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=64.0, dynamic_growth_steps=2
    ),
}


class Trained:
    """A small model, its optimizer and its step."""

    def __init__(self, optimizer: Any) -> None:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Input((FEATURES,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
        self.model = weft.DistributedModel(keras.Sequential(layers))
        self.optimizer = optimizer
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @weft.step
        def gradients(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, self.model(x, training=True))
            return tape.gradient(loss, self.model.trainable_variables), loss

        self.gradients = gradients

    def train(self, first: int, end: int) -> list[str]:
        losses = []
        for number in range(first, end):
            found, loss = self.gradients(*batch(number))
            # a power of two, which changes no bit of what is unscaled
            scale = getattr(self.optimizer, "dynamic_scale", 1.0)
            means = [each.accumulate() * scale for each in found]
            self.optimizer.apply_gradients(zip(means, self.model.trainable_variables, strict=True))
            losses.append(float(loss.reduce_mean()).hex())
        return losses

    def state(self, all_of_it: bool = True) -> list[str]:
        """All that this rank keeps; or the model's variables only."""
        kept = [*self.model.trainable_variables, *(self.optimizer.variables if all_of_it else ())]
        return [tf.convert_to_tensor(each).numpy().tobytes().hex() for each in kept]


def write(folder: Path, name: str, run: Trained) -> Any:
    run.train(0, 2)
    weft.save_checkpoint(folder / name, "two", run.model, run.optimizer)
    run.model.save_model(str(folder / name / "whole.keras"))
    averages = [each.numpy().tobytes().hex() for each in run.optimizer.variables if "average" in each.path]
    (folder / f"{name}-averages-{weft.rank()}.json").write_text(json.dumps(averages))
    return {"losses": run.train(2, 4), "state": run.state(name != "built")}


WORDS = "arrives with the first step"


def read(folder: Path, name: str, run: Trained) -> Any:
    if name == "built":
        run.optimizer.build(
            run.model.trainable_variables
        )  # zeros, which must not be taken for what was saved
    for _ in range(2):
        weft.resume_from_checkpoint(folder / name, "two", model=run.model, optimizer=run.optimizer)
    inner = getattr(run.optimizer, "inner_optimizer", run.optimizer)
    assert int(inner.iterations) == 2
    for act in (
        lambda: run.optimizer.variables,
        lambda: inner.variables,
        lambda: run.optimizer.save_own_variables({}),
        lambda: run.optimizer.apply_gradients([(each, each) for each in run.model.trainable_variables]),
        lambda: weft.save_checkpoint(folder / name, "again", run.model, run.optimizer),
    ):  # fmt: skip
        assert WORDS in refused(UsageError, act)
    whole = keras.models.load_model(folder / name / "whole.keras")
    run.model.save_weights(str(folder / f"{name}.weights.h5"))
    run.model.save_model(str(folder / f"{name}-again.keras"))
    weft.barrier()
    again = keras.models.load_model(folder / f"{name}-again.keras")
    for one, other, third in zip(
        whole.get_weights(), run.model.get_weights(), again.get_weights(), strict=True
    ):
        assert one.tobytes() == other.tobytes() == third.tobytes()
    averages = [json.loads((folder / f"{name}-averages-{rank}.json").read_text()) for rank in (0, 1)]
    before = run.model.get_weights()
    run.optimizer.finalize_variable_values(run.model.trainable_variables)
    finals = [each.tobytes().hex() for each in run.model.get_weights()]
    assert finals == (sum(averages, []) or [each.tobytes().hex() for each in before])
    run.model.set_weights(before)
    return {"losses": run.train(2, 4), "state": run.state(name != "built")}


def two_models(folder: Path, action: str) -> Any:
    """Steps of one model before the first step of the other one."""
    one, other = Trained(keras.optimizers.Adam(0.01)), Trained(keras.optimizers.Adam(0.02))
    things = SimpleNamespace(
        one=one.model, other=other.model, optimizers={"one": one.optimizer, "other": other.optimizer}
    )
    manager = weft.CheckpointManager(things, folder / "both")
    if action == "write":
        one.train(0, 2)
        other.train(0, 2)
        manager.save()
    else:
        manager.restore("ckpt-1")
    return {"losses": one.train(2, 4) + other.train(2, 4), "state": one.state() + other.state()}


class Late(weft.DistributedModel):
    """Its variables come with its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.only = keras.layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.only(x)


def too_early(folder: Path) -> None:
    """What has no variables yet cannot take what was saved for them."""
    model = Late()
    told = refused(
        UsageError, lambda: weft.resume_from_checkpoint(folder / "nadam", strict=False, model=model)
    )
    assert "its variables do not exist before the first step: resume after that" in told, told


def main(action: str, folder: Path) -> None:
    weft.init({"partitions": 2, "microbatches": 4})
    act = {"write": write, "read": read}[action]
    found = {name: act(folder, name, Trained(make())) for name, make in OPTIMIZERS.items()}
    found["both"] = two_models(folder, action)
    if action == "read":
        too_early(folder)
    (folder / f"{action}-{weft.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
