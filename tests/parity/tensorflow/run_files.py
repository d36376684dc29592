"""Files of Keras of a model that is split: each check compares with plain Keras in the same process.

weft run -n 2 tests/parity/tensorflow/run_files.py NAME ...
"""

from __future__ import annotations

import errno
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.harness import Checks, begin, near, refuses
from tests.parity.tensorflow.run_keras import CROSS, Tagger, rows, seeded, words
from weft.errors import CheckpointError, UsageError, WeftError
from weft.tensorflow.private.weight_files import KeptFile
from weft.tensorflow.session.session import is_here

L = keras.layers
check = Checks()


def folder() -> Path:
    """An empty folder, the same on every rank."""
    return Path(weft.allgather(tempfile.mkdtemp() if weft.rank() == 0 else "")[0])


def files(where: Path) -> list[str]:
    weft.barrier()
    return sorted(os.listdir(where))


def net() -> Any:
    return keras.Sequential(
        [
            keras.Input((6,)),
            L.Dense(8, "tanh"),
            L.BatchNormalization(trainable=False),
            L.Dense(8, "tanh"),
            L.Dense(3),
        ]
    )


def functional() -> Any:
    a = keras.Input((6,))
    h = L.Dense(8, "relu")(a)
    return keras.Model(a, L.Dense(3)(L.Add()([h, L.Dense(8)(h)])))


def compiled(model: Any, optimizer: Any = None) -> Any:
    model.compile(optimizer or keras.optimizers.Adam(0.01), CROSS(from_logits=True), metrics=["accuracy"])
    return model


def fit(model: Any, epochs: int = 1, **options: Any) -> Any:
    x, y, _ = rows(16)
    return model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options).history


def pair(
    make: Callable[[], Any] = net, epochs: int = 1, optimizer: Any = keras.optimizers.Adam
) -> tuple[Any, Any]:
    """A model in one process and one that is split, trained alike."""
    plain = compiled(seeded(make), optimizer(0.01))
    fit(plain, epochs)
    split = compiled(weft.DistributedModel(seeded(make)), optimizer(0.01))
    fit(split, epochs)
    assert len(split.variables) < len(plain.variables)
    return plain, split


def same_values(one: Any, other: Any, what: str) -> None:
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        near(np.asarray(mine), np.asarray(theirs), f"{what}: array {number}", 1e-4)


def still_split(model: Any) -> None:
    """The memory of other ranks' variables was given back."""
    assert sum(is_here(each) for each in model.all_variables()) == len(model.variables)


@check
def values_of_the_whole_model(partitions: int) -> None:
    begin(partitions)
    plain, split = pair()
    same_values(split.get_weights(), plain.get_weights(), "get_weights")
    assert split.count_params() == plain.count_params()
    for each in (split, plain):
        each.set_weights([value * 0.5 for value in each.get_weights()])
    still_split(split)
    same_values(split.get_weights(), plain.get_weights(), "set_weights")
    same_values([split.predict(rows()[0], verbose=0)], [plain.predict(rows()[0], verbose=0)], "predictions")
    lines: list[str] = []
    split.summary(print_fn=lambda text, **_: lines.append(text))
    assert f"{plain.count_params():,}" in "\n".join(lines), lines
    other = weft.DistributedModel(seeded(net))
    other.set_weights(split.get_weights())
    same_values(other.get_weights(), split.get_weights(), "before its first step")
    refuses(
        UsageError,
        "set_weights takes the 10 arrays of the whole model",
        lambda: split.set_weights([np.ones(3)]),
    )
    refuses(
        UsageError,
        "number 0 has the shape (3,), and not (6, 8)",
        lambda: split.set_weights([np.ones(3)] * 10),
    )
    same_values(split.get_weights(), plain.get_weights(), "after a refusal")


@check
def whole_models(partitions: int) -> None:
    begin(partitions)
    where = folder()
    for make in (net, functional):
        plain, split = pair(make, 2)
        split.save(where / "net.keras")
        assert files(where) == ["net.keras"]
        still_split(split)
        loaded = keras.models.load_model(where / "net.keras")
        x = rows()[0]
        same_values([loaded.predict(x, verbose=0)], [plain.predict(x, verbose=0)], "a model that was loaded")
        same_values(loaded.optimizer.variables, plain.optimizer.variables, "its optimizer")
        before, after = fit(plain, 2), fit(loaded, 2)  # with the states of the optimizer
        again = compiled(weft.DistributedModel(keras.models.load_model(where / "net.keras", compile=False)))
        again.load_weights(where / "net.keras")
        for name, value in before.items():
            near(after[name], value, f"{name} of a model that was loaded", 1e-4)
            near(fit(split, 2)[name], value, f"{name} of the model itself", 1e-4) if name == "loss" else None
        weft.barrier()
        if weft.rank() == 0:
            os.remove(where / "net.keras")
        weft.barrier()


@keras.saving.register_keras_serializable("tests")
class Steady(keras.optimizers.Optimizer):
    """Keeps the largest gradient of each row, in a list and under a name of its own."""

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.largest = [self.add_variable(each.shape[:1], name="largest") for each in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        largest = self.largest[self._get_variable_index(variable)]
        rows = tf.reduce_max(tf.abs(tf.reshape(gradient, (variable.shape[0], -1))), 1)
        self.assign(largest, tf.maximum(largest, rows))
        shape = (-1, *(1 for _ in variable.shape[1:]))
        self.assign_sub(variable, learning_rate * gradient / (tf.reshape(largest, shape) + 0.1))


class Unknown(Steady):
    """The same in a dict, so that nobody can tell what is whose."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.largest = dict(enumerate(self.largest))


OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "rows-and-columns": lambda rate: keras.optimizers.Adafactor(rate, epsilon_1=1e-12),
    "own": Steady,
    "SGD": keras.optimizers.SGD,
    "Nadam": keras.optimizers.Nadam,
    "averages": lambda rate: keras.optimizers.SGD(rate, momentum=0.9, use_ema=True),
    "loss-scale": lambda rate: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate)),
    "accumulation": lambda rate: keras.optimizers.Adam(rate, gradient_accumulation_steps=2),
    "schedule": lambda rate: keras.optimizers.RMSprop(
        keras.optimizers.schedules.ExponentialDecay(rate, 2, 0.5)
    ),
}


@check.of_each(
    "rows-and-columns", "own", "SGD", "Nadam", "averages", "loss-scale", "accumulation", "schedule"
)
def weights_there_and_back(name: str, partitions: int) -> None:
    begin(partitions)
    where, optimizer = folder(), OPTIMIZERS[name]
    plain, split = pair(net, 2, optimizer)
    split.save_weights(where / f"{name}.weights.h5")
    weft.save_checkpoint(where, name, model=split, optimizer=split.optimizer)
    other = compiled(seeded(net), optimizer(0.01))
    fit(other)
    other.load_weights(where / f"{name}.weights.h5")
    same_values(other.get_weights(), plain.get_weights(), f"{name}: weights into plain Keras")
    same_values(other.optimizer.variables, plain.optimizer.variables, f"{name}: the optimizer")
    weft.barrier()
    if weft.rank() == 0:
        plain.save_weights(where / "plain.weights.h5")
    weft.barrier()
    back = compiled(weft.DistributedModel(seeded(net)), optimizer(0.01))
    fit(back)
    back.load_weights(where / "plain.weights.h5")
    still_split(back)
    same_values(back.get_weights(), plain.get_weights(), f"{name}: weights from plain Keras")
    resumed = compiled(weft.DistributedModel(seeded(net)), optimizer(0.01))
    fit(resumed)
    weft.resume_from_checkpoint(where, name, model=resumed, optimizer=resumed.optimizer)
    expected = fit(plain, 2)["loss"]
    near(fit(back, 2)["loss"], expected, f"{name}: the loss of a model that goes on", 1e-3)
    near(fit(resumed, 2)["loss"], expected, f"{name}: the loss of a job that was resumed", 1e-3)


@check
def states_that_nobody_can_tell_whose_they_are(partitions: int) -> None:
    begin(partitions)
    where = folder()
    split = compiled(weft.DistributedModel(seeded(net)), Unknown(0.01))
    fit(split)
    says = "nothing says for which weights: not saved"
    refuses(WeftError, says, lambda: split.save_weights(where / "a.weights.h5"))
    refuses(WeftError, says, lambda: weft.save_checkpoint(where, "a", model=split, optimizer=split.optimizer))
    assert files(where) == [], files(where)


@check
def weights_before_and_after_wrapping(partitions: int) -> None:
    begin(partitions)
    where = folder()
    source = seeded(net)
    fit(compiled(source))
    if weft.rank() == 0:
        source.save_weights(where / "pre.weights.h5")
        source.save(where / "pre.keras")
        source.save(where / "pre.h5")
    weft.barrier()
    keras.utils.set_random_seed(9)
    x = rows()[0]
    expected = source.predict(x, verbose=0)
    for name in ("pre.weights.h5", "pre.keras", "pre.h5"):
        inner = net()
        if name != "pre.keras":
            inner.load_weights(where / name)
        before = weft.DistributedModel(
            inner if name != "pre.keras" else keras.models.load_model(where / name)
        )
        after = weft.DistributedModel(net())
        after.load_weights(where / name)
        with weft.delay_param_initialization():
            late = net()
        waits = weft.DistributedModel(late)
        waits.load_weights(where / name)
        started = weft.DistributedModel(net())
        started.predict(x, verbose=0)
        started.load_weights(where / name)
        still_split(started)
        for model in (before, after, waits, started):
            same_values([model.predict(x, verbose=0)], [expected], name)


@check.of_each("weights.h5", "weights.json", "keras")
def files_read_by_parts(name: str, partitions: int) -> None:
    begin(partitions, verify="off")  # the first rank makes no copy of the model
    where = folder()
    path = where / f"pre.{name}"
    source = compiled(seeded(net))
    fit(source)
    if weft.rank() == 0:
        if name == "keras":
            source.save(path)
        else:
            source.save_weights(path, max_shard_size=3e-7 if name == "weights.json" else None)
    weft.barrier()
    keras.utils.set_random_seed(9)
    for moment in ("inside", "outside", "wrapped", "split"):
        with weft.delay_param_initialization():
            late = net()
            if moment == "inside":
                late.load_weights(path)
        if moment == "outside":
            late.load_weights(path)
        model, plain = compiled(weft.DistributedModel(late)), compiled(net())
        if moment == "wrapped":
            model.load_weights(path)
        if moment == "split":
            model.predict(rows()[0], verbose=0)
            plain.optimizer.build(plain.trainable_variables)
        plain.load_weights(path)
        with tensors_read() as read:
            if moment == "split":
                model.load_weights(path)
                assert len(model.optimizer.variables) == 2 + 2 * len(model.trainable_variables)
            losses = fit(model)["loss"]
        near(losses, fit(plain)["loss"], f"{moment}: the loss of two steps", 1e-4)
        same_values(model.get_weights(), plain.get_weights(), f"{moment}: weights after two steps")
        still_split(model)
        layers = [each for each in read if each.startswith("/layers")]
        assert len(layers) == len(set(layers)) == len(model.weights), (moment, read)
        found = [each for of_rank in weft.allgather(layers) for each in of_rank]
        assert len(found) == len(set(found)) == len(plain.weights), (moment, found)


@check
def files_without_states(partitions: int) -> None:
    begin(partitions)
    where = folder()
    if weft.rank() == 0:
        seeded(net).save_weights(where / "bare.weights.h5")
    weft.barrier()
    plain, split = pair()
    before = [np.array(each) for each in split.optimizer.variables]
    for each in (plain, split):
        each.load_weights(where / "bare.weights.h5")
    same_values(split.optimizer.variables, before, "an optimizer that a file does not have")
    same_values(split.get_weights(), plain.get_weights(), "the weights of such a file")
    near(fit(split)["loss"], fit(plain)["loss"], "the loss afterwards", 1e-3)


@contextmanager
def tensors_read() -> Iterator[list[str]]:
    """The names of the tensors that this rank reads from files inside."""
    read, found = KeptFile.read, []

    def noted(self: Any, name: str, *args: Any) -> Any:
        found.append(name)
        return read(self, name, *args)

    KeptFile.read = noted
    try:
        yield found
    finally:
        KeptFile.read = read


@check
def classes_of_ones_own(partitions: int) -> None:
    begin(partitions)
    where = folder()
    x, y = words(16)
    plain = compiled(seeded(Tagger), keras.optimizers.SGD(0.1))
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    split = compiled(weft.DistributedModel(seeded(Tagger)), keras.optimizers.SGD(0.1))
    split.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    split.save_weights(where / "tagger.weights.h5")
    other = seeded(Tagger)
    other(x)
    other.load_weights(where / "tagger.weights.h5")
    same_values(other.get_weights(), plain.get_weights(), "a class")
    refuses(
        UsageError, "derives from DistributedModel, so a .keras file could not be loaded",
        lambda: Derived().save(where / "own.keras"),
    )  # fmt: skip
    own = compiled(Derived())
    fit(own)
    own.save_weights(where / "own.weights.h5")
    values = own.get_weights()
    own.set_weights([value * 0 for value in values])
    own.load_weights(where / "own.weights.h5")
    same_values(own.get_weights(), values, "a class derived from weft's")


class Derived(weft.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = L.Dense(8, "tanh"), L.Dense(3)

    def call(self, x: Any) -> Any:
        return self.b(self.a(x))


@check
def damaged_files(partitions: int) -> None:
    begin(partitions)
    where = folder()
    split = compiled(weft.DistributedModel(seeded(net)))
    fit(split)
    split.save_weights(where / "whole.weights.h5")
    split.save(where / "whole.keras")
    weft.barrier()
    if weft.rank() == 0:
        for name in ("weights.h5", "keras"):
            content = (where / f"whole.{name}").read_bytes()
            (where / f"short.{name}").write_bytes(content[: len(content) // 2])
            (where / f"empty.{name}").write_bytes(b"")
            (where / f"text.{name}").write_bytes(b"no weights" * 100)
            middle = len(content) // 2
            (where / f"holes.{name}").write_bytes(content[:middle] + bytes(600) + content[middle + 600 :])
        other = keras.Sequential([keras.Input((6,)), L.Dense(8), L.Dense(7)])
        other.save_weights(where / "other.weights.h5")
    weft.barrier()
    before = split.get_weights()
    states = [np.array(each) for each in split.optimizer.variables]
    fresh = weft.DistributedModel(seeded(net))
    first = fresh.get_weights()
    unreadable = [f"{name}.{kind}" for name in ("short", "empty", "text") for kind in ("weights.h5", "keras")]
    for model, values in ((split, before), (fresh, first)):
        load = model.load_weights
        for path in (where / name for name in unreadable):
            refuses(CheckpointError, f"no weights can be read from {path} (", functools.partial(load, path))
        missing = functools.partial(load, where / "none.weights.h5")
        refuses(OSError, "there is no such file on a rank's host", missing)
        refuses(WeftError, "do not fit the model", functools.partial(load, where / "other.weights.h5"))
        refuses(WeftError, str(where / "holes.keras"), functools.partial(load, where / "holes.keras"))
        same_values(model.get_weights(), values, "after files that cannot be read")
    same_values(split.optimizer.variables, states, "an optimizer after such files")
    still_split(split)
    fit(split)


def stopping(epoch: int) -> Any:
    """Ends `fit` with an error, as a node that goes away does."""

    def end(now: int, logs: Any = None) -> None:
        if now == epoch:
            raise InterruptedError

    return keras.callbacks.LambdaCallback(on_epoch_end=end)


@check
def checkpoints_of_fit(partitions: int) -> None:
    begin(partitions)
    where = folder()
    x, y, _ = rows(16)
    made = keras.callbacks.ModelCheckpoint
    options = {"monitor": "val_loss", "save_best_only": True, "verbose": 0}
    found = []
    for name, wrap in (("plain", lambda each: each), ("split", weft.DistributedModel)):
        model = compiled(wrap(seeded(net)), keras.optimizers.Adam(0.3))
        inside = where / (name if name == "split" else f"{name}-{weft.rank()}")
        inside.mkdir(exist_ok=True)
        saves = [
            made(inside / "deeper" / "best.keras", **options),
            made(inside / "{epoch:02d}-{val_loss:.3f}.weights.h5", save_weights_only=True),
            made(inside / "some.weights.h5", save_weights_only=True, save_freq=3),
            keras.callbacks.CSVLogger(inside / "log.csv"),
        ]
        fit(model, 4, validation_data=(x, y), callbacks=saves)
        found.append(model.predict(x, verbose=0))
    mine = where / f"plain-{weft.rank()}"
    assert files(mine) == files(where / "split") and "log.csv" in files(mine), (
        files(mine),
        files(where / "split"),
    )
    assert len((where / "split" / "log.csv").read_text().splitlines()) == 5
    assert files(where / "split" / "deeper") == ["best.keras"]
    one, other = (keras.models.load_model(each / "deeper" / "best.keras") for each in (mine, where / "split"))
    same_values([one.predict(x, verbose=0)], [other.predict(x, verbose=0)], "the best of four epochs")
    same_values(one.optimizer.variables, other.optimizer.variables, "its optimizer")
    last = sorted(mine.glob("04-*"))[0].name
    one.load_weights(mine / last)
    other.load_weights(where / "split" / last)
    same_values([one.predict(x, verbose=0)], [other.predict(x, verbose=0)], "the last of four epochs")
    same_values([other.predict(x, verbose=0)], [found[1]], "the model itself")


@check
def backups_of_fit(partitions: int) -> None:
    begin(partitions)
    where = folder()
    plain = compiled(seeded(net))
    expected = fit(plain, 4)["loss"][2:]
    for attempt in range(2):
        split = compiled(weft.DistributedModel(seeded(net)))
        backup = keras.callbacks.BackupAndRestore(where / "backup", delete_checkpoint=True)
        if attempt:
            found = fit(split, 4, callbacks=[backup])["loss"]
        else:
            refuses(InterruptedError, "", lambda: fit(split, 4, callbacks=[backup, stopping(1)]))  # noqa: B023
            assert sorted(each.name for each in (where / "backup").iterdir()), "no backup"
    near(found, expected, "the losses of a fit that goes on", 1e-3)
    same_values(split.get_weights(), plain.get_weights(), "its weights")
    assert files(where) == []


@check
def histograms_of_fit(partitions: int) -> None:
    begin(partitions)
    where = folder()
    split = compiled(weft.DistributedModel(seeded(net)))
    fit(split, 2, callbacks=[keras.callbacks.TensorBoard(where, histogram_freq=1)])
    still_split(split)
    written = [each for each in where.rglob("events.*")]
    weft.barrier()
    assert len(written) == 1, written
    tags = set()
    for record in tf.data.TFRecordDataset([str(written[0])]):
        event = tf.compat.v1.Event.FromString(record.numpy())
        tags |= {value.tag for value in event.summary.value}
    assert {f"{each.path}/histogram" for each in split.all_variables()} <= tags, tags
    assert "epoch_loss" in tags, tags


@check
def disks_that_take_nothing(partitions: int) -> None:
    begin(partitions)
    where = folder()
    split = compiled(weft.DistributedModel(seeded(net)))
    fit(split)
    (where / "taken").mkdir(exist_ok=True)
    weft.barrier()
    if weft.rank() == 0:
        (where / "file").write_text("")
        (where / "kept.weights.h5").write_text("as it was")
    weft.barrier()
    for path in ("/dev/full/x.weights.h5", str(where / "file" / "x.keras"), "/proc/x.weights.h5"):
        act = split.save if path.endswith(".keras") else split.save_weights
        refuses(WeftError, f"{path} was not written: ", lambda act=act, path=path: act(path))
    before = keras.Model.save_weights
    keras.Model.save_weights = full
    try:
        refuses(
            WeftError,
            "kept.weights.h5 was not written: the disk of",
            lambda: split.save_weights(where / "kept.weights.h5"),
        )
    finally:
        keras.Model.save_weights = before
    assert files(where) == ["file", "kept.weights.h5", "taken"], files(where)
    assert (where / "kept.weights.h5").read_text() == "as it was"
    still_split(split)


def full(net: Any, path: Any, *args: Any, **kwargs: Any) -> None:
    """A disk that is full after some bytes."""
    Path(path).write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


if __name__ == "__main__":
    check.work()
