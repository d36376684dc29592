"""What the ranks of test_checkpoints.py run: ``weft run -n 2 tests/parity/tensorflow/saves.py ACTION FOLDER``."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
import weft.tensorflow.checkpoint.save as saving
from weft.errors import CheckpointError, PeerError, UsageError
from weft.tensorflow.session.session import free_others, is_here, session

CLASSES, FEATURES = 3, 6
PARTITIONS = min(2, int(os.environ.get("WORLD_SIZE", "1")))


def network() -> Any:
    """With moving averages, dropout, and layers that Keras names by counting."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Input((FEATURES,)),
            keras.layers.Dense(16, activation="silu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=3),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )


def batch(number: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(number)
    x, y = rng.normal(size=(8, FEATURES)).astype("float32"), rng.integers(0, CLASSES, 8)
    return tf.constant(x), tf.constant(y)


class Training:
    """A model, its optimizer, a counter of its steps, and a step."""

    def __init__(self, model: Any = None) -> None:
        self.model = weft.DistributedModel(network()) if model is None else model
        self.optimizer = keras.optimizers.Adam(0.01)
        self.counter = tf.Variable(0.0)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @weft.step
        def gradients(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, self.model(x, training=True))
            return tape.gradient(loss, self.model.trainable_variables), loss

        @tf.function
        def train_step(x: Any, y: Any) -> Any:
            found, loss = gradients(x, y)
            averaged = [each.accumulate() for each in found]
            self.optimizer.apply_gradients(zip(averaged, self.model.trainable_variables, strict=True))
            return loss.reduce_mean()

        @weft.step
        def predictions(x: Any) -> Any:
            return self.model(x, training=False)

        self.train_step = train_step
        self.predictions = predictions

    def train(self, first: int, end: int) -> list[float]:
        losses = []
        for number in range(first, end):
            losses.append(float(self.train_step(*batch(number))))
            self.counter.assign_add(1.0)
        return losses

    def predict(self) -> list[list[float]]:
        return self.predictions(batch(100)[0]).merge().numpy().tolist()

    def values(self) -> dict[str, bytes]:
        """All that this rank has, as bytes."""
        named = {each.path: each for each in [*self.model.variables, *self.optimizer.variables]}
        return {name: each.numpy().tobytes() for name, each in named.items()}


CONTENT = {
    "epoch": 3, "names": ("a", 1.5, None, float("inf")), "array": np.arange(4, dtype="int16"), 7: b"x",
    "half": tf.constant([1.5, -2.0], tf.bfloat16), "flags": tf.constant([True, False]), "big": 1 << 80,
}  # fmt: skip


def check_content(found: Any) -> None:
    assert found.keys() == CONTENT.keys()
    for key in ("epoch", "names", 7, "big"):
        assert found[key] == CONTENT[key], key
    assert found["array"].dtype == "int16" and found["array"].tolist() == [0, 1, 2, 3]
    for key in ("half", "flags"):
        assert found[key].dtype == CONTENT[key].dtype
        assert found[key].numpy().tolist() == CONTENT[key].numpy().tolist()


def refused(kind: type[Exception], act: Any) -> str:
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def first_run(folder: Path) -> dict[str, Any]:
    """Two steps, saves, and two more; all of it again from each save."""
    run = Training()
    run.train(0, 1)
    free_others(session().models)
    there = {each.path: is_here(each) for each in run.model.all_variables()}
    gone = [each for each in run.model.all_variables() if not is_here(each)]
    message = refused(tf.errors.FailedPreconditionError, gone[0].numpy)
    assert f"Could not find variable {gone[0].path}, a variable of partition" in message, message
    run.train(1, 2)
    state = tf.train.Checkpoint(model=run.model, optimizer=run.optimizer, more=[run.counter])
    manager = weft.CheckpointManager(state, folder / "numbered", max_to_keep=2)
    assert manager.restore() is None and manager.latest_checkpoint is None
    manager.save()
    weft.save_checkpoint(folder / "saves", "two", run.model, run.optimizer, CONTENT)
    losses = beside(run, folder)
    assert manager.save() == str(folder / "numbered" / "ckpt-2")
    predicted = run.predict()
    again = {}
    for name, go_back in {
        "manager": lambda: manager.restore("ckpt-1"),
        "tag": lambda: check_content(weft.resume_from_checkpoint(folder / "saves", optimizer=run.optimizer)),
        "beside": lambda: check_content(
            weft.resume_from_checkpoint(folder / "beside", optimizer=run.optimizer)
        ),
    }.items():
        run.train(4, 5)
        go_back()
        again[name] = run.train(2, 4)
    manager.restore()
    counted = float(run.counter)
    run.model.save_model(str(folder / "whole.keras"))
    run.model.save_model(str(folder / "whole"))
    assert {each.path: is_here(each) for each in run.model.all_variables()} == there
    manager.save()
    damage(run, manager, folder)
    return {"losses": losses, "again": again, "predicted": predicted, "counted": counted,
            "checkpoints": manager.checkpoints, "here": [name for name, here in there.items() if here]}  # fmt: skip


def beside(run: Training, folder: Path) -> list[float]:
    """A save goes on beside two steps, and has the values of its call; the losses. Then one fails on a rank."""
    go, before = threading.Event(), saving.reached
    saving.reached = lambda phase: go.wait() if phase == "write" else None
    pending = weft.save_checkpoint(
        folder / "beside", "two", run.model, run.optimizer, CONTENT, asynchronous=True
    )
    losses = run.train(2, 4)
    assert not pending.done
    go.set()
    assert weft.finish_checkpoint() is pending.wait() and weft.finish_checkpoint() is None

    def fail(phase: str) -> None:
        if phase == "write" and weft.rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    saving.reached = fail
    weft.save_checkpoint(folder / "beside", "three", run.model, run.optimizer, asynchronous=True)
    told = refused(CheckpointError, weft.finish_checkpoint)
    assert "three was not saved: rank 1: " in told and "training can go on" in told, told
    saving.reached = before
    return losses


def damage(run: Training, manager: Any, folder: Path) -> None:
    """Saves that are damaged, or do not fit, change nothing."""
    before = run.values()
    assert "has no checkpoint with the tag 'ckpt-9'. The newest one that is whole is 'ckpt-3'" in refused(
        CheckpointError, lambda: manager.restore("ckpt-9")
    )
    if weft.rank() == 0:
        for name, at in (("rank-0001.safetensors", -1), ("index.json", 20)):
            path = folder / "numbered" / ("ckpt-2_partial" if at == -1 else "ckpt-3_partial") / name
            content = bytearray(path.read_bytes())
            content[at] ^= 1
            path.write_bytes(content)
    assert "rank-0001.safetensors is altered" in refused(CheckpointError, lambda: manager.restore("ckpt-2"))
    assert "index.json is altered" in refused(CheckpointError, lambda: manager.restore("ckpt-3"))
    saves, other = folder / "saves", keras.optimizers.SGD(0.1)
    told = refused(UsageError, lambda: weft.resume_from_checkpoint(saves, model=run.model, optimizer=other))
    assert "the optimizer was a Adam, the script has a SGD" in told, told
    for act, words in (
        (lambda: weft.save_checkpoint(saves, "../up", run.model), "the tag is '../up'"),
        (lambda: weft.save_checkpoint(saves, "a", optimizer=other), "pass its model too"),
        (lambda: weft.save_checkpoint(saves, "a", keras.Sequential()), "pass the DistributedModel"),
        (lambda: weft.save_checkpoint(saves, "a", num_kept_partial_checkpoints=0), "num_kept_partial_checkpoints is 0"),
        (lambda: weft.save_checkpoint(saves, "a", user_content={"x": {1}}), "user_content['x'] is a builtins.set"),
        (lambda: weft.save_checkpoint(saves, "a", user_content=tf.constant("x")), "holds values of string"),
        (lambda: weft.save_checkpoint(saves, f"rank{weft.rank()}", run.model), "the tag must be the same"),
        (lambda: weft.resume_from_checkpoint(saves, verify="some"), "verify is 'some'"),
        (lambda: weft.CheckpointManager(None, max_to_keep=0), "max_to_keep is 0"),
        (lambda: weft.CheckpointManager(None, checkpoint_name="a/b"), "the tag is 'a/b-1'"),
        (lambda: manager.save("last"), "checkpoint_number is 'last'"),
        (lambda: manager.restore("elsewhere/ckpt-2"), "is not in"),
        (weft.CheckpointManager(SimpleNamespace(a=1, b="x")).save, "a is a int; b is a str: a checkpoint takes"),
        (lambda: weft.CheckpointManager(SimpleNamespace(other=run.counter), saves).restore("two"),
         "there is no variable other"),
        (lambda: weft.checkpoints(saves, every=0), "every is 0: write a whole number from 1 on"),
        (lambda: weft.checkpoints(saves, 1, also={"run": run.counter}), "also['run'] is taken"),
        (lambda: weft.checkpoints(saves, 1, also={"model": run.counter}), "pass model= or choose another name"),
        (weft.checkpoints(saves, 1).__enter__, "pass optimizer= to weft.checkpoints"),
        (weft.checkpoints(saves, 1, model=keras.Sequential()).__enter__, "pass the DistributedModel"),
    ):  # fmt: skip
        assert words in refused(UsageError, act), words
    told = refused(CheckpointError, weft.checkpoints(saves, 1, optimizer=run.optimizer).__enter__)
    assert "it was not saved by weft.checkpoints: give the run a folder of its own" in told, told
    kind = CheckpointError if weft.rank() == 0 else PeerError
    told = refused(kind, lambda: run.model.save_model(str(folder / "saves" / "newest" / "whole.keras")))
    assert "the model was not saved" in told and "something of another kind is in its place" in told, told
    assert run.values() == before


def second_run(folder: Path) -> dict[str, Any]:
    """Goes on from a save before its first step; then with a second model, of a class of its own."""
    keras.layers.Dense(1), keras.layers.BatchNormalization()  # Keras counts on: names are others now
    run = Training()
    check_content(weft.resume_from_checkpoint(folder / "saves", "two", optimizer=run.optimizer))
    if weft.size() == 2:
        told = refused(
            UsageError, lambda: weft.save_checkpoint(folder / "saves", "b", run.model, run.optimizer)
        )
        assert "arrives with the first step: save after that" in told
    found = {
        "losses": run.train(2, 4), "iterations": int(run.optimizer.iterations),
        "names": [each.path for each in run.model.all_variables()],
    }  # fmt: skip
    if weft.size() == 2:
        own_class(folder, run)
    return found


class Own(weft.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(8, activation="tanh")
        self.second = keras.layers.Dense(CLASSES)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.second(self.first(x))


def own_class(folder: Path, run: Training) -> None:
    other = Training(Own())
    state = tf.train.Checkpoint(
        a=run.model, b=other.model, optimizers={"a": run.optimizer, "b": other.optimizer}
    )
    manager = weft.CheckpointManager(state, folder / "both")
    other.train(0, 2)
    manager.save()
    before, losses = [run.values(), other.values()], run.train(4, 5) + other.train(4, 5)
    manager.restore()
    assert [run.values(), other.values()] == before
    assert run.train(4, 5) + other.train(4, 5) == losses
    free_others(session().models)
    assert "could not be loaded without weft" in refused(
        UsageError, lambda: other.model.save_model(str(folder / "own.keras"))
    )
    other.model.save_model(str(folder / "own"))
    predicted = other.predict()
    if weft.rank() == 0:
        (folder / "own.json").write_text(json.dumps(predicted))


def main(action: str, folder: Path) -> None:
    weft.init({"partitions": PARTITIONS, "microbatches": 4})
    found = {"first": first_run, "second": second_run}[action](folder)
    (folder / f"{action}-{weft.size()}-{weft.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
